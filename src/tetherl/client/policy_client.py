"""PolicyClient: what a game, a simulator or a robot calls to play under a policy that is being trained."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from tetherl.client.link import Link
from tetherl.client.transport import ConnectionLost
from tetherl.errors import DisconnectedError, EpisodeLostError, RequestError
from tetherl.protocol.client_session import ClientSession, Request
from tetherl.protocol.messages import Action, Error, Phase, ServerMessage, Welcome
from tetherl.protocol.wire import WireError, decode_value

_ACTION_DTYPES = {"MultiDiscrete": "int64", "MultiBinary": "int8"}


class _Episode:
    """An open episode: the connection it lives on, steps taken, reward not sent yet."""

    __slots__ = ("generation", "reward", "steps")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.steps = 0
        self.reward = 0.0


class PolicyClient:
    """A blocking client of a policy server.

    The shortest use, one round trip per step:

        with PolicyClient("ws://127.0.0.1:9900") as client:
            action = client.step(observation)                            # starts an episode
            while True:
                observation, reward, terminated, truncated = game.apply(action)
                action = client.step(observation, reward, terminated, truncated)
                if action is None:                                       # the episode has ended
                    action = client.step(game.reset())

    Several episodes at a time, and actions of one's own: `start_episode`, `get_action`, `log_action`,
    `log_returns`, `end_episode`, `abort_episode`.

    A background thread keeps `phase`, `policy_version` and `resumes_in_s` current without calls, answers
    keep-alives, and connects again after the connection was lost. Open episodes do not survive that: the next
    call on one raises EpisodeLostError; reset the environment and start a new one. Calls may come from
    several threads, for one episode from one at a time.

    Args:
        url: the server's address, `ws://host:port` or `wss://host:port` (`host:port` is taken as ws).
        token: what the server asks for; default: the environment variable TETHERL_TOKEN, if set.
        name: shown by the server.
        purpose: "train", or "evaluate" for a client whose experience gives metrics only.
        connect_timeout_s: time to wait here for the server to be up. None: do not wait; `connected` tells,
            and the first call waits up to `reconnect_timeout_s`.
        request_timeout_s: time for one answer. None: as long as the connection lives (a server that holds
            actions while it learns may answer after minutes).
        reconnect_timeout_s: how long calls wait for a lost connection to come back.
        on_phase: called with the new phase ("collecting", "learning", "stopped") on the background thread;
            keep it short; no requests from there.

    Raises:
        ConfigError: `url` is not an address.
        RefusedError: the server refused the session (token, protocol version).
        DisconnectedError: no server within `connect_timeout_s`.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        name: str = "",
        *,
        purpose: str = "train",
        connect_timeout_s: float | None = 60.0,
        request_timeout_s: float | None = None,
        reconnect_timeout_s: float = 300.0,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        token = token if token is not None else os.environ.get("TETHERL_TOKEN") or None
        self._request_timeout_s = request_timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        self._episodes: dict[str, _Episode] = {}
        self._current: str | None = None  # the episode of `step`
        self._link = Link(url, token=token, name=name, purpose=purpose, on_phase=on_phase)
        self._link.start()
        if connect_timeout_s is not None:
            try:
                self._link.wait_up(connect_timeout_s)
            except BaseException:
                self._link.close()
                raise

    # -- episodes -------------------------------------------------------------------------------------------

    def start_episode(self, episode_id: str | None = None, training_enabled: bool = True) -> str:
        """Opens an episode and returns its identity (a fresh one by default). Waits while disconnected.

        `training_enabled=False`: the episode is played, but never trained on.

        Raises:
            RequestError, RefusedError, DisconnectedError.
        """
        episode_id = uuid.uuid4().hex if episode_id is None else str(episode_id)
        while True:
            self._link.wait_up(self._reconnect_timeout_s)
            generation = self._link.generation
            try:
                self._ask(lambda s: s.start_episode(episode_id, bool(training_enabled)), generation)
            except ConnectionLost:
                continue  # nothing was open on that connection yet: starting again elsewhere loses nothing
            self._episodes[episode_id] = _Episode(generation)
            return episode_id

    def get_action(self, episode_id: str, observation: Any, action_mask: Any = None) -> Any:
        """The policy's action in `observation`: an int for a Discrete space, a NumPy array for other plain ones, a dict
        or tuple of these for Dict and Tuple.

        `action_mask`: one boolean (or 0 and 1) per choice of a Discrete, MultiDiscrete (part after part) or MultiBinary
        space; what is false is not chosen now. At least one choice per part must be allowed.

        Waits as long as the server takes. Rewards logged since the last action go along.

        Raises:
            RequestError: the server refused this observation (the call can be repeated with a right one).
            EpisodeLostError: the connection was lost since the episode began.
            DisconnectedError, RefusedError.
        """
        episode = self._episode(episode_id)
        answer = self._ask_in(
            episode_id, episode, lambda s: s.act(episode_id, observation, episode.reward, action_mask)
        )
        assert isinstance(answer, Action)
        episode.steps += 1
        episode.reward = 0.0
        return self._to_action(answer.action)

    def log_action(self, episode_id: str, observation: Any, action: Any) -> None:
        """Reports that the caller itself chose `action` in `observation`. Errors: as `get_action`."""
        episode = self._episode(episode_id)
        self._ask_in(episode_id, episode, lambda s: s.log_action(episode_id, observation, action, episode.reward))
        episode.steps += 1
        episode.reward = 0.0

    def log_returns(self, episode_id: str, reward: float) -> None:
        """Adds to the reward of the last action; sent with the next message of the episode. No round trip.

        Raises:
            RequestError: not a finite number, or no action has been taken yet.
            EpisodeLostError: the connection was lost since the episode began.
        """
        episode = self._episode(episode_id)
        value = float(reward)
        if not math.isfinite(value):
            raise RequestError(f"reward is {reward!r}; it must be a finite number", code="bad_reward")
        if episode.steps == 0 and value:
            raise RequestError(
                f"reward {value} came before any action of episode {episode_id!r}; a reward belongs to the "
                "action before it",
                code="bad_reward",
            )
        episode.reward += value

    def end_episode(
        self,
        episode_id: str,
        observation: Any = None,
        terminated: bool | None = None,
        truncated: bool = False,
    ) -> None:
        """Ends an episode: `terminated` by the task itself (the default), or `truncated` from outside.

        `observation`, what the last action led to, is required for a truncated episode: the future it cuts
        off is estimated from it. Without it after termination nothing is missing.

        Raises:
            RequestError, EpisodeLostError (the end may or may not have arrived), DisconnectedError.
        """
        episode = self._episode(episode_id, forget=True)
        cut = bool(truncated)
        over = (not cut) if terminated is None else bool(terminated)
        self._ask_in(
            episode_id,
            episode,
            lambda s: s.end_episode(episode_id, observation, episode.reward, terminated=over, truncated=cut),
        )
        self._episodes.pop(episode_id, None)

    def abort_episode(self, episode_id: str, reason: str = "") -> None:
        """Gives an episode up (the game crashed): it ends at its last complete step and gives no return.

        An episode that was lost with its connection is forgotten silently.
        """
        try:
            episode = self._episode(episode_id, forget=True)
            self._ask_in(episode_id, episode, lambda s: s.abort_episode(episode_id, reason[:200]))
        except EpisodeLostError:
            pass
        self._episodes.pop(episode_id, None)

    def step(
        self,
        observation: Any,
        reward: float = 0.0,
        terminated: bool = False,
        truncated: bool = False,
        action_mask: Any = None,
    ) -> Any:
        """The whole loop in one call: what the environment shows now -> the next action.

        `reward` is what the previous action brought (0 on the first call of an episode, which opens it). With
        `terminated` or `truncated` the episode ends with `observation` and the answer is None; the next call
        begins a new episode. `action_mask`: see `get_action`.

        Raises:
            EpisodeLostError: reset the environment and call again with its first observation.
            RequestError: refused; nothing was recorded, the reward neither, and the call can be repeated.
            DisconnectedError, RefusedError.
        """
        ends = bool(terminated) or bool(truncated)
        if self._current is None:
            if ends or reward:
                raise RequestError(
                    "the first step of an episode has no previous action: it takes the first observation "
                    "only, without reward, terminated or truncated",
                    code="bad_message",
                )
            self._current = self.start_episode()
        current = self._current
        try:
            episode = self._episode(current)
            self.log_returns(current, reward)
            try:
                if not ends:
                    return self.get_action(current, observation, action_mask)
                self.end_episode(current, observation, bool(terminated), bool(truncated))
            except RequestError:
                episode.reward = 0.0  # it comes again with the repeated call
                raise
        except EpisodeLostError:
            self._episodes.pop(current, None)
            self._current = None
            raise
        self._current = None
        return None

    def abort(self, reason: str = "") -> None:
        """Gives up the episode that `step` has open, if any."""
        current, self._current = self._current, None
        if current is not None:
            self.abort_episode(current, reason)

    # -- what the server said -------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._link.up

    @property
    def phase(self) -> Phase:
        """What the algorithm does: "collecting", "learning" or "stopped"; the last known if disconnected."""
        return self._link.session.phase

    @property
    def policy_version(self) -> int:
        return self._link.session.policy_version

    @property
    def problem(self) -> str | None:
        """Why there is no connection now; None when there is one."""
        return None if self._link.up else f"{self._link.url} ({self._link.problem})"

    @property
    def resumes_in_s(self) -> float | None:
        """While learning: seconds that are left until collecting goes on, counting down (0 when overdue). None while
        collecting, and until a learning phase has been timed."""
        return self._link.resumes_in_s

    @property
    def observation_space(self) -> dict[str, Any]:
        """As the run declares it: {"type": "Box", "low": 0, "high": 255, "shape": [84, 84, 3], ...}."""
        return self._welcome.observation_space

    @property
    def action_space(self) -> dict[str, Any]:
        return self._welcome.action_space

    @property
    def env_config(self) -> dict[str, Any]:
        """What the run wants the environment to be set up with."""
        return self._welcome.env_config

    @property
    def session(self) -> str:
        """The server's name for this connection."""
        return self._welcome.session

    @property
    def worker(self) -> int:
        """The rollout worker that serves this connection."""
        return self._welcome.worker

    def wait_connected(self, timeout_s: float) -> None:
        """Waits for the connection, `timeout_s` from when it was lost or first tried.

        Raises:
            RefusedError, DisconnectedError.
        """
        self._link.wait_up(timeout_s)

    def close(self) -> None:
        """Says goodbye; the server aborts episodes still open. Waiting calls get DisconnectedError."""
        self._link.close()

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------------------------

    @property
    def _welcome(self) -> Welcome:
        welcome = self._link.session.welcome
        if welcome is None:
            raise DisconnectedError(f"not connected to {self._link.url} yet; call wait_connected() first")
        return welcome

    def _episode(self, episode_id: str, forget: bool = False) -> _Episode:
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise RequestError(
                f"episode {episode_id!r} is not open; call start_episode() first", code="unknown_episode"
            )
        if episode.generation != self._link.generation or not self._link.up:
            self._link.raise_if_over()
            if forget:
                del self._episodes[episode_id]
            raise self._lost(episode_id)
        return episode

    def _lost(self, episode_id: str) -> EpisodeLostError:
        if self.phase == "stopped":
            return EpisodeLostError(f"training has stopped (the server said so), and episode {episode_id!r} with it")
        return EpisodeLostError(
            f"the connection to {self._link.url} was lost and episode {episode_id!r} with it; "
            "reset the environment and start a new episode"
        )

    def _ask_in(self, episode_id: str, episode: _Episode, build: Callable[[ClientSession], Request]) -> ServerMessage:
        try:
            return self._ask(build, episode.generation)
        except ConnectionLost:
            raise self._lost(episode_id) from None

    def _ask(self, build: Callable[[ClientSession], Request], generation: int) -> ServerMessage:
        try:
            answer = self._link.call(build, generation=generation, timeout_s=self._request_timeout_s)
        except TypeError as error:
            raise RequestError(str(error), code="bad_observation") from None
        if isinstance(answer, Error):
            raise RequestError(answer.message, code=answer.code)
        return answer

    def _to_action(self, value: Any) -> Any:
        try:
            return _in_space(decode_value(value), self.action_space)
        except (WireError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RequestError(f"the server sent an action that cannot be read: {error}", code="bad_action") from None


def _in_space(value: Any, space: dict[str, Any]) -> Any:
    """A decoded action as the space's own kind of value."""
    kind = space.get("type", "")
    if kind == "Discrete":
        return int(value)
    if kind == "Dict":
        return {key: _in_space(value[key], part) for key, part in space["spaces"].items()}
    if kind == "Tuple":
        return tuple(_in_space(part, of) for part, of in zip(value, space["spaces"], strict=True))
    dtype = _ACTION_DTYPES.get(kind, space.get("dtype", "float32"))
    return np.array(value, dtype=dtype)  # a copy: the caller may write to it
