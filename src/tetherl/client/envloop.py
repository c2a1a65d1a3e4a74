"""Plays a Gymnasium environment through a PolicyClient, as a game would: own loop, one message per step."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tetherl.client.policy_client import PolicyClient
from tetherl.errors import (
    ClientError,
    ConfigError,
    DisconnectedError,
    EpisodeLostError,
    MissingExtraError,
    RequestError,
)

CONNECT_TIMEOUT_S = 300.0
"""The environment may be started long before the server."""

STOP_NEWS_S = 2.0
"""How long the news that the server stops may take after its last refusal."""


@dataclass(slots=True)
class PlayStats:
    """What was played. Times in seconds; returns are sums of raw rewards over whole episodes."""

    steps: int = 0
    episodes: int = 0
    return_sum: float = 0.0
    episodes_lost: int = 0
    """Episodes that ended with their connection."""
    actions: int = 0
    actions_while_learning: int = 0
    wait_sum_s: float = 0.0
    longest_wait_s: float = 0.0
    """Longest time between asking for an action and having it."""
    phases: list[str] = field(default_factory=list)
    """Phases seen, in order of their first appearance."""
    seconds: float = 0.0
    ended: str = ""
    """Why playing ended: "episodes", "steps", "server stopped" or "asked to stop"."""

    @property
    def episode_return_mean(self) -> float | None:
        return self.return_sum / self.episodes if self.episodes else None

    @property
    def wait_mean_s(self) -> float:
        return self.wait_sum_s / self.actions if self.actions else 0.0

    def merge(self, other: PlayStats) -> None:
        """Adds another player's numbers to these."""
        self.steps += other.steps
        self.episodes += other.episodes
        self.return_sum += other.return_sum
        self.episodes_lost += other.episodes_lost
        self.actions += other.actions
        self.actions_while_learning += other.actions_while_learning
        self.wait_sum_s += other.wait_sum_s
        self.longest_wait_s = max(self.longest_wait_s, other.longest_wait_s)
        self.phases += [phase for phase in other.phases if phase not in self.phases]
        self.seconds = max(self.seconds, other.seconds)
        self.ended = self.ended or other.ended

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "steps": self.steps,
            "episodes": self.episodes,
            "episode_return_mean": self.episode_return_mean,
            "episodes_lost": self.episodes_lost,
            "actions": self.actions,
            "actions_while_learning": self.actions_while_learning,
            "wait_mean_s": self.wait_mean_s,
            "longest_wait_s": self.longest_wait_s,
            "phases": self.phases,
            "seconds": self.seconds,
            "ended": self.ended,
        }


def make_env(env: str | Callable[..., Any], env_config: dict[str, Any]) -> Any:
    """A Gymnasium environment from its id, "module:Name" or a callable; `env_config` are keyword arguments.

    Raises:
        ConfigError: there is no such environment, or it does not take `env_config`.
        MissingExtraError: Gymnasium is not installed.
    """
    if callable(env):
        return env(**env_config)
    module_name, colon, attribute = env.partition(":")
    if colon and "-v" not in attribute:  # Gymnasium's own ids may name a module too, and end in a version
        try:
            factory = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"environment {env!r} cannot be imported: {error}; use module:Name") from error
        return factory(**env_config)
    try:
        import gymnasium
    except ImportError:
        raise MissingExtraError("playing a Gymnasium environment", "train") from None
    try:
        return gymnasium.make(env, **env_config)
    except (gymnasium.error.Error, TypeError, ImportError) as error:
        raise ConfigError(f"environment {env!r} cannot be made with {env_config}: {error}") from error


class Player:
    """One environment and one connection. `run` blocks until it ends; `stop` ends it from another thread.

    Args:
        env: Gymnasium id, "module:Name" or a callable.
        url: the server's address.
        episodes, steps: play so many and return (whichever comes first); None: until the server stops.
        seed: of the environment's first reset.
        token: as for PolicyClient.
        env_config: overrides, key by key, what the server's welcome says.
    """

    def __init__(
        self,
        env: str | Callable[..., Any],
        url: str,
        *,
        episodes: int | None = None,
        steps: int | None = None,
        seed: int | None = None,
        token: str | None = None,
        name: str = "",
        purpose: str = "train",
        env_config: dict[str, Any] | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.stats = PlayStats()
        self._env = env
        self._url = url
        self._episodes = episodes
        self._steps = steps
        self._seed = seed
        self._token = token
        self._name = name
        self._purpose = purpose
        self._env_config = env_config or {}
        self._connect_timeout_s = connect_timeout_s
        self._client: PolicyClient | None = None
        self._stopping = threading.Event()

    def stop(self, reason: str = "asked to stop") -> None:
        """Ends `run` soon, also while it waits for an action or for the server. From any thread."""
        if not self._stopping.is_set():
            self.stats.ended = reason
            self._stopping.set()
        if self._client is not None:
            self._client.close()

    @property
    def waiting_for(self) -> str | None:
        """Why there is no connection now; None when there is one."""
        return self._client.problem if self._client is not None else None

    def run(self) -> PlayStats:
        """Plays until the end; the numbers so far are in `stats` all the while.

        Raises:
            RefusedError, DisconnectedError: no (further) connection.
            RequestError: the environment does not fit the run's spaces.
            ConfigError, MissingExtraError: the environment cannot be made.
        """
        started = time.monotonic()
        client = self._client = PolicyClient(
            self._url,
            self._token,
            self._name,
            purpose=self._purpose,
            connect_timeout_s=None,
            on_phase=self._on_phase,
        )
        try:
            with client:
                if not self._stopping.is_set():
                    client.wait_connected(self._connect_timeout_s)
                    self._play(client)
        except DisconnectedError:
            if not self._stopping.is_set():
                raise
        finally:
            self.stats.seconds = time.monotonic() - started
        return self.stats

    def _play(self, client: PolicyClient) -> None:
        env = make_env(self._env, {**client.env_config, **self._env_config})
        try:
            seed = self._seed
            while not self._finished():
                observation, info = env.reset(seed=seed)
                seed = None
                try:
                    self._play_episode(client, env, observation, info)
                except EpisodeLostError:
                    self.stats.episodes_lost += 1
                except RequestError as error:
                    # A server that stops refuses what it has not answered yet just before it says so.
                    if error.code != "not_ready" or not self._stopping.wait(STOP_NEWS_S):
                        raise
        except Exception as error:
            with contextlib.suppress(ClientError):
                client.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            env.close()

    def _play_episode(self, client: PolicyClient, env: Any, observation: Any, info: dict[str, Any]) -> None:
        stats = self.stats
        episode_return = 0.0
        action = self._ask(client, observation, 0.0, info)
        while True:
            observation, reward, terminated, truncated, info = env.step(action)
            reward = float(reward)
            episode_return += reward
            stats.steps += 1
            if terminated or truncated:
                client.step(observation, reward, terminated, truncated)
                stats.episodes += 1
                stats.return_sum += episode_return
                return
            if self._finished():
                client.abort("the number of steps asked for was played")
                return
            action = self._ask(client, observation, reward, info)

    def _ask(self, client: PolicyClient, observation: Any, reward: float, info: dict[str, Any]) -> Any:
        stats = self.stats
        asked = time.perf_counter()
        action = client.step(observation, reward, action_mask=info.get("action_mask"))
        waited = time.perf_counter() - asked
        stats.actions += 1
        stats.actions_while_learning += client.phase == "learning"
        stats.wait_sum_s += waited
        stats.longest_wait_s = max(stats.longest_wait_s, waited)
        return action

    def _finished(self) -> bool:
        stats = self.stats
        if self._stopping.is_set():
            return True
        if self._episodes is not None and stats.episodes >= self._episodes:
            stats.ended = "episodes"
        elif self._steps is not None and stats.steps >= self._steps:
            stats.ended = "steps"
        return bool(stats.ended)

    def _on_phase(self, phase: str) -> None:
        if phase not in self.stats.phases:
            self.stats.phases.append(phase)
        if phase == "stopped":
            self.stop("server stopped")


def play(env: str | Callable[..., Any], url: str, **options: Any) -> PlayStats:
    """Plays `env` under the policy at `url`; options and errors as for `Player`.

    Example:
        stats = play("CartPole-v1", "ws://127.0.0.1:9900", episodes=20, seed=1)
    """
    return Player(env, url, **options).run()
