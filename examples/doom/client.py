"""ViZDoom's scenario `basic`, played by whatever policy a tetherl server serves.

This is an external program as a game studio would write one: it owns its loop, and tetherl sees only what it
sends. It needs `tetherl` (the client alone), `vizdoom` and `numpy`.

    python examples/doom/client.py --connect ws://127.0.0.1:9900
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import vizdoom
from vizdoom import Button, GameVariable

from tetherl.client import PolicyClient
from tetherl.errors import ClientError, ConfigError, DisconnectedError, EpisodeLostError, RequestError

SCREEN = (240, 320)
BUTTONS = {
    "basic": [Button.MOVE_LEFT, Button.MOVE_RIGHT, Button.ATTACK],  # what the scenario itself allows
    "nine": [
        Button.MOVE_FORWARD,
        Button.MOVE_BACKWARD,
        Button.MOVE_LEFT,
        Button.MOVE_RIGHT,
        Button.TURN_LEFT,
        Button.TURN_RIGHT,
        Button.ATTACK,
        Button.USE,
        Button.SPEED,
    ],
}
DEFAULTS = {"buttons": "basic", "frame_skip": 4, "height": SCREEN[0], "width": SCREEN[1]}


class Doom:
    """One game. Frames are grey, uint8 [height, width, 1]; keys are one 0 or 1 for each button.

    frame_skip: tics that the keys stay pressed. height, width: whole fractions of 240 and 320; each pixel is
    the mean of the screen's pixels that it covers. Rewards are the scenario's own: -1 for each tic, -5 for a
    shot, +101 for the monster.
    """

    def __init__(self, buttons: str, frame_skip: int, height: int, width: int, seed: int | None = None) -> None:
        if buttons not in BUTTONS:
            raise ConfigError(f"buttons is {buttons!r}; expected one of {', '.join(BUTTONS)}")
        if frame_skip < 1:
            raise ConfigError(f"frame_skip is {frame_skip}; expected at least 1")
        if height < 1 or width < 1 or SCREEN[0] % height or SCREEN[1] % width:
            raise ConfigError(
                f"frames of {height}x{width} cannot be made from {SCREEN[0]}x{SCREEN[1]}; take a whole fraction "
                "of it such as 120x160 or 60x80"
            )
        self._frame_skip = frame_skip
        self._blocks = (height, SCREEN[0] // height, width, SCREEN[1] // width)
        self._game = game = vizdoom.DoomGame()
        game.load_config(os.path.join(vizdoom.scenarios_path, "basic.cfg"))
        game.set_available_buttons(BUTTONS[buttons])
        game.set_screen_format(vizdoom.ScreenFormat.GRAY8)
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_320X240)
        game.set_window_visible(False)
        game.set_sound_enabled(False)
        game.set_mode(vizdoom.Mode.PLAYER)
        if seed is not None:
            game.set_seed(seed)
        # The time limit is kept here and not by the engine: an episode that the engine ends has no frame
        # after its last tic, but the value of what the limit cuts off is estimated from that frame.
        self._last_tic = game.get_episode_start_time() + game.get_episode_timeout()
        game.set_episode_timeout(0)
        game.init()

    def reset(self) -> np.ndarray:
        """Starts an episode and returns its first frame."""
        self._game.new_episode()
        return self._frame()

    def press(self, keys: np.ndarray) -> tuple[np.ndarray | None, float, bool, bool]:
        """Holds `keys` for the next tics -> frame, reward, terminated, truncated.

        Terminated: the monster or the player is dead; the frame may then be None, as the map is gone.
        Truncated: the time is up and the monster lives.
        """
        game = self._game
        tics = min(self._frame_skip, self._last_tic - game.get_episode_time())
        reward = game.make_action([bool(key) for key in keys], tics)
        if game.is_episode_finished() or game.is_player_dead():
            return None, reward, True, False
        time_is_up = game.get_episode_time() >= self._last_tic
        killed = game.get_game_variable(GameVariable.KILLCOUNT) > 0  # the map ends a few tics after
        return self._frame(), reward, time_is_up and killed, time_is_up and not killed

    def close(self) -> None:
        """Ends the game's process."""
        self._game.close()

    def __enter__(self) -> Doom:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _frame(self) -> np.ndarray:
        height, down, width, across = self._blocks
        screen = self._game.get_state().screen_buffer
        if (down, across) != (1, 1):
            total = screen.reshape(height, down, width, across).sum(axis=(1, 3), dtype=np.uint32)
            screen = (total // (down * across)).astype(np.uint8)
        return np.ascontiguousarray(screen).reshape(height, width, 1)


@dataclass
class Played:
    """What is reported at the end. The return is the mean over whole episodes."""

    episodes: int = 0
    steps: int = 0
    episode_return_mean: float | None = None
    episodes_lost: int = 0
    longest_wait_s: float = 0.0
    ended: str = ""


def settings_for(client: PolicyClient, given: dict[str, Any]) -> dict[str, Any]:
    """The game's settings: defaults, then what the run's `external.env_config` says, then `given`."""
    unknown = sorted(set(client.env_config) - set(DEFAULTS))
    if unknown:
        raise ConfigError(
            f"external.env_config has {', '.join(unknown)}, which this game does not know; "
            f"it takes {', '.join(DEFAULTS)}"
        )
    settings = {**DEFAULTS, **client.env_config, **given}
    shape = [settings["height"], settings["width"], 1]
    if client.observation_space.get("shape") != shape:
        raise ConfigError(
            f"this game sends frames of shape {shape}, the run expects {client.observation_space.get('shape')}; "
            "change external.observation_space or height and width in external.env_config"
        )
    keys = len(BUTTONS.get(settings["buttons"], []))
    if keys and client.action_space.get("nvec") != [2] * keys:
        raise ConfigError(
            f"buttons {settings['buttons']!r} are {keys} keys, but the run's action space is {client.action_space}; "
            f"expected MultiDiscrete with nvec {[2] * keys}, or other buttons in external.env_config"
        )
    return settings


def play(client: PolicyClient, game: Doom, played: Played, episodes: int | None) -> None:
    """Plays `episodes` (None: no end), or until the server says that training has stopped."""
    returns = 0.0
    while client.phase != "stopped" and played.episodes != episodes:
        try:
            returns += play_episode(client, game, played)
        except EpisodeLostError:  # the connection was lost, and the episode with it
            played.episodes_lost += 1
            continue
        played.episodes += 1
        played.episode_return_mean = returns / played.episodes


def play_episode(client: PolicyClient, game: Doom, played: Played) -> float:
    """One episode; returns the sum of its rewards."""
    total, reward, terminated, truncated = 0.0, 0.0, False, False
    frame: np.ndarray | None = game.reset()
    while True:
        asked = time.perf_counter()
        keys = client.step(frame, reward, terminated, truncated)
        played.longest_wait_s = max(played.longest_wait_s, time.perf_counter() - asked)
        if keys is None:
            return total
        frame, reward, terminated, truncated = game.press(keys)
        total += reward
        played.steps += 1


def run(args: argparse.Namespace, played: Played) -> None:
    """Connects, starts the game as the server wants it, and plays until the end."""
    given = {name: value for name in DEFAULTS if (value := getattr(args, name)) is not None}
    purpose = "evaluate" if args.evaluate else "train"

    def on_phase(phase: str) -> None:
        if phase == "stopped":
            client.close()  # wakes a call that waits for an action

    name = f"doom ({os.getpid()})"
    client = PolicyClient(args.connect, name=name, purpose=purpose, connect_timeout_s=None, on_phase=on_phase)
    # ViZDoom leaves its settings file in the current directory: each game gets a directory of its own.
    with client, tempfile.TemporaryDirectory(prefix="doom-") as scratch, contextlib.chdir(scratch):
        try:
            client.wait_connected(args.patience)
            with Doom(**settings_for(client, given), seed=args.seed) as game:
                play(client, game, played, args.episodes)
        except (DisconnectedError, RequestError):
            if client.phase != "stopped":
                raise
    played.ended = "server stopped" if client.phase == "stopped" else "episodes"


def main() -> int:
    """0: ended as asked, by a signal or with the server's run; 1: an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--connect", default="ws://127.0.0.1:9900", metavar="URL", help="the server (%(default)s)")
    parser.add_argument("--buttons", choices=sorted(BUTTONS), help="keys that the policy may press")
    parser.add_argument("--frame-skip", type=int, metavar="TICS", help="tics that keys stay pressed")
    parser.add_argument("--height", type=int, help="of the frames that are sent: a whole fraction of 240")
    parser.add_argument("--width", type=int, help="of the frames that are sent: a whole fraction of 320")
    parser.add_argument("--seed", type=int, help="of the game; give each game another one")
    parser.add_argument("--episodes", type=int, metavar="N", help="play so many and end (default: no end)")
    parser.add_argument("--evaluate", action="store_true", help="play without exploration, for metrics only")
    parser.add_argument("--patience", type=float, default=300.0, metavar="S", help="seconds to wait for the server")
    parser.add_argument("--json", action="store_true", help="report as one JSON document")
    args = parser.parse_args()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)  # as Ctrl-C: unwind, which closes game and connection
    played = Played()
    try:
        run(args, played)
    except KeyboardInterrupt:
        played.ended = "asked to stop"
    except (ConfigError, ClientError) as error:
        print(f"doom: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(asdict(played)))
    else:
        mean = "-" if played.episode_return_mean is None else f"{played.episode_return_mean:.1f}"
        print(f"{played.episodes} episodes, mean return {mean}, {played.steps} steps; ended: {played.ended}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
