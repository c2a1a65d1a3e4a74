"""The open episodes of a policy server: their recurrent state, and their steps on the way into fragments."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from tetherl.data.assembler import EpisodeAssembler
from tetherl.data.fragment import EpisodeStats, Leaves, StepCounts
from tetherl.server.outbox import Outbox

if TYPE_CHECKING:
    from tetherl.server.inference import Request


class OpenEpisode:
    """An episode of one client, as the policy and the assembler see it.

    Attributes:
        name: identity chosen by the client.
        client: who plays it, for statistics.
        training: its steps are offered for training.
        evaluate: its actions are chosen without exploration.
        state: [S] float32 recurrent state for the next decision; None without a recurrent policy.
        last_action: [A] action row whose result has yet to arrive; None at the episode's start.
        pending: the request that waits for its action.
    """

    __slots__ = (
        "assembler",
        "client",
        "evaluate",
        "free",
        "last_action",
        "name",
        "pending",
        "state",
        "too_long",
        "training",
    )

    def __init__(self, name: str, client: str, assembler: EpisodeAssembler, *, training: bool, evaluate: bool) -> None:
        self.name = name
        self.client = client
        self.assembler = assembler
        self.training = training
        self.evaluate = evaluate
        self.state: np.ndarray | None = None
        self.last_action: np.ndarray | None = None
        self.pending: Request | None = None
        self.free: asyncio.Future[None] | None = None  # someone waits until `pending` is None
        self.too_long = False

    def release(self) -> None:
        """The pending request is over."""
        self.pending = None
        if self.free is not None:
            if not self.free.done():
                self.free.set_result(None)
            self.free = None


class EpisodeDesk:
    """Opens, records and closes episodes. Everything happens inside the server's loop, nothing waits.

    `counted=False` (an evaluation server): no episode is offered for training, all go into the statistics.
    """

    def __init__(
        self,
        books: StepCounts,
        outbox: Outbox,
        *,
        worker: int,
        batch_mode: str,
        fragment_length: int,
        state_every: int = 0,
        fate: str,
        counted: bool,
        max_steps: int,
        max_open_bytes: int,
        state_size: int,
    ) -> None:
        self.books = books
        self.outbox = outbox
        self.open_bytes = 0
        self.aborted = 0
        self.memory_cuts = 0
        self.episodes: set[OpenEpisode] = set()
        self.max_steps = max_steps
        self._worker = worker
        self._batch_mode = batch_mode
        self._fragment_length = fragment_length
        self._state_every = state_every
        self._fate = fate
        self._counted = counted
        self._max_open_bytes = max_open_bytes
        self._first_state = np.zeros(state_size, np.float32) if state_size else None
        self._opened = 0

    def open(self, name: str, client: str, session: str, *, training: bool, evaluate: bool) -> OpenEpisode:
        training = training and not evaluate and self._counted
        episode = OpenEpisode(name, client, self._assembler(session, training), training=training, evaluate=evaluate)
        episode.state = self._first_state
        self.episodes.add(episode)
        return episode

    @property
    def full(self) -> bool:
        """Open episodes hold all the memory they may, and cutting them frees none of it."""
        return self.open_bytes > self._max_open_bytes

    def at_limit(self, episode: OpenEpisode) -> bool:
        """The result that arrives next completes the longest episode allowed."""
        return episode.last_action is not None and episode.assembler.steps + 1 >= self.max_steps

    def observe(self, episode: OpenEpisode, reward: float, obs: Leaves) -> None:
        """The result of the last action, if there was one."""
        if episode.last_action is None:
            return
        assembler = episode.assembler
        before = assembler.nbytes
        if assembler.steps + 1 >= self.max_steps:
            self._restart(episode, reward, obs)
        else:
            assembler.result(reward, obs)
        self.open_bytes += episode.assembler.nbytes - before
        if self.full:
            self._relieve()

    def chose(
        self,
        episode: OpenEpisode,
        obs: Leaves,
        action: np.ndarray,
        logp: float,
        dist: np.ndarray,
        state: np.ndarray | None,
        version: int,
        *,
        by_policy: bool,
        learning: bool,
        mask: np.ndarray | None = None,
    ) -> None:
        """An action for `obs`, chosen with the episode's state, which becomes `state`."""
        before = episode.assembler.nbytes
        episode.assembler.decided(
            obs,
            action,
            logp,
            dist,
            version,
            state_in=episode.state,
            by_policy=by_policy,
            learning=learning,
            mask=mask,
        )
        self.open_bytes += episode.assembler.nbytes - before
        if self.full:
            self._relieve()
        episode.last_action = action
        if state is not None:
            episode.state = state

    def end(
        self,
        episode: OpenEpisode,
        reward: float,
        *,
        terminated: bool,
        truncated: bool,
        final_obs: Leaves | None,
    ) -> None:
        before = episode.assembler.nbytes
        self._finish(episode, reward, terminated=terminated, truncated=truncated, final_obs=final_obs)
        self.open_bytes += episode.assembler.nbytes - before
        self.episodes.discard(episode)

    def abort(self, episode: OpenEpisode) -> None:
        """The episode cannot go on: its complete steps are kept, its memory is freed."""
        before = episode.assembler.nbytes
        episode.assembler.abort()
        self.open_bytes += episode.assembler.nbytes - before
        self.episodes.discard(episode)
        self.aborted += 1

    def cut_all(self) -> None:
        """All complete steps leave now; the episodes go on."""
        for episode in self.episodes:
            self._cut(episode)

    def _assembler(self, session: str, training: bool) -> EpisodeAssembler:
        self._opened += 1
        return EpisodeAssembler(
            self.books,
            self.outbox.put,
            episode_id=f"{session}-{self._opened}",
            worker=self._worker,
            batch_mode=self._batch_mode,
            fragment_length=self._fragment_length,
            state_every=self._state_every,
            fate=self._fate,
            training=training,
        )

    def _finish(
        self,
        episode: OpenEpisode,
        reward: float,
        *,
        terminated: bool,
        truncated: bool,
        final_obs: Leaves | None,
    ) -> None:
        episode_return, length = episode.assembler.end(
            reward, terminated=terminated, truncated=truncated, final_obs=final_obs
        )
        if not length:  # it was opened and closed without a step: no episode to speak of
            return
        if episode.training or not self._counted:
            self.outbox.finished(EpisodeStats(episode_return, length, self._worker, episode.client))
        elif episode.evaluate:
            self.outbox.event("evaluation_episode", client=episode.client, episode_return=episode_return, length=length)

    def _restart(self, episode: OpenEpisode, reward: float, obs: Leaves) -> None:
        """Longer than allowed: ends here like a time limit, and what follows is a new episode."""
        self._finish(episode, reward, terminated=False, truncated=True, final_obs=obs)
        if not episode.too_long:
            episode.too_long = True
            self.outbox.event(
                "warning",
                client=episode.client,
                message=f"episode {episode.name!r} of {episode.client} is longer than {self.max_steps} steps "
                "(external.max_episode_steps); it is cut and bootstrapped there, each time",
            )
        session = episode.assembler.episode_id.rpartition("-")[0]
        episode.assembler = self._assembler(session, episode.training)
        episode.state = self._first_state
        episode.last_action = None

    def _relieve(self) -> None:
        """Open episodes hold more than allowed: the largest gives away its complete steps."""
        largest = max(self.episodes, key=lambda e: e.assembler.nbytes)
        steps, held = largest.assembler.steps, largest.assembler.nbytes
        self._cut(largest)
        if largest.assembler.nbytes == held:  # nothing but steps without a result yet: then no episode may be added
            return
        self.memory_cuts += 1
        if self.memory_cuts == 1:
            self.outbox.event(
                "warning",
                client=largest.client,
                message=f"open episodes hold more than {self._max_open_bytes} bytes; the largest, "
                f"{largest.name!r} of {largest.client} ({held} bytes at step {steps}), is cut and "
                "bootstrapped; this is said once, metric memory_cuts counts",
            )

    def _cut(self, episode: OpenEpisode) -> None:
        before = episode.assembler.nbytes
        episode.assembler.cut()
        self.open_bytes += episode.assembler.nbytes - before
