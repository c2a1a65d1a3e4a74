"""Batched inference: whatever waits when the policy is free goes into the next forward pass."""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tetherl.data.fragment import Leaves, stack_masks
from tetherl.protocol.messages import Action, Done, Error, Phase
from tetherl.server.episodes import EpisodeDesk, OpenEpisode

if TYPE_CHECKING:
    from tetherl.models.policy import Policy
    from tetherl.server.connection import Connection

MAX_BATCH = 256
"""Rows in one forward pass; bounds its memory with image encoders."""

MAX_WAITS = 10_000


class Request:
    """An observation that waits for an action; with `action` given, only for its place in the episode."""

    __slots__ = ("action", "at", "connection", "episode", "id", "mask", "obs", "observed", "reward", "step")

    def __init__(
        self,
        connection: Connection,
        episode: OpenEpisode,
        id: int,
        step: int,
        obs: Leaves,
        reward: float,
        action: np.ndarray | None,
        at: float,
        mask: np.ndarray | None = None,
    ) -> None:
        self.connection = connection
        self.episode = episode
        self.id = id
        self.step = step
        self.obs = obs
        self.reward = reward
        self.action = action
        self.at = at
        self.mask = mask  # [P] bool, the choices that are allowed; None: all
        self.observed = False  # the reward has reached the books


class Inference:
    """Waiting requests, the policy, and when it may answer. Everything happens inside the server's loop.

    Replies go out before anything is stored; both happen in one go, so that the next message of an episode
    finds it in order.

    Attributes:
        phase, version, resumes_in_s: what every reply carries.
        failure: traceback of what broke inference; from then on every request is answered with an error.
    """

    def __init__(
        self,
        policy: Policy,
        desk: EpisodeDesk,
        *,
        explore: bool,
        seed: int,
        hold: bool,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.phase: Phase = "collecting"
        self.version = 0
        self.failure: str | None = None
        self._policy = policy
        self._desk = desk
        self._explore = explore
        self._hold = hold
        self._loop = loop
        self._resumes_at: float | None = None
        self._generator = torch.Generator().manual_seed(seed)
        self._waiting: dict[Request, None] = {}  # in order of arrival
        self._ready = False
        self._scheduled = False
        self._free_since = 0.0  # waiting before this moment was not for the policy
        self._meter = _Meter()

    @property
    def resumes_in_s(self) -> float | None:
        """Seconds until actions are chosen with new weights, as far as can be told; 0 when it is overdue."""
        return None if self._resumes_at is None else max(0.0, self._resumes_at - self._loop.time())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Takes a request; its connection gets the reply. One per episode at a time."""
        if self.failure is not None:
            request.connection.send(self._failed(request))
            return
        request.episode.pending = request
        self._waiting[request] = None
        if not self._open() or self._desk.at_limit(request.episode):
            self._observe(request)
        self._schedule()

    def withdraw(self, request: Request) -> None:
        """Its episode is over: no action is wanted any more; the reward that it brought counts."""
        if request in self._waiting:
            del self._waiting[request]
            self._observe(request)
        request.episode.release()

    def set_weights(self, weights: dict[str, np.ndarray], version: int) -> None:
        self._policy.load_weights(weights)
        self.version = version
        if not self._ready:
            self._ready = True
            self._free_since = self._loop.time()
        self._schedule()

    def set_phase(self, phase: Phase, resumes_in_s: float | None, *, cut: bool) -> None:
        """With `cut`, everything that is complete at this moment leaves."""
        self.phase = phase
        self._resumes_at = None if resumes_in_s is None else self._loop.time() + resumes_in_s
        self._free_since = self._loop.time()
        if cut:
            for request in self._waiting:
                self._observe(request)
            self._desk.cut_all()
        if phase == "stopped":
            for request in list(self._waiting):
                request.connection.send(
                    Error(re=request.id, code="not_ready", message="training has stopped; no action is chosen")
                )
                self.withdraw(request)
        self._schedule()

    def numbers(self) -> dict[str, float]:
        """What happened since the last call."""
        meter, self._meter = self._meter, _Meter()
        return meter.numbers()

    def fail(self, failure: str) -> None:
        """Answers every waiting request with an error; there will be no more actions."""
        self.failure = failure
        self._desk.outbox.changed.set()
        for request in self._waiting:
            request.connection.send(self._failed(request))
        for request in list(self._waiting):
            self.withdraw(request)

    def _failed(self, request: Request) -> Error:
        cause = (self.failure or "").strip().rpartition("\n")[2]
        return Error(re=request.id, code="internal", message=f"the policy server has failed: {cause}")

    def _open(self) -> bool:
        held = self._hold and self.phase == "learning"
        return self._ready and not held and self.phase != "stopped"

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled and self._open():
            self._scheduled = True
            # after all sockets that are readable now
            self._loop.call_soon(self._loop.call_soon, self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if not self._open() or self.failure is not None:
            return
        batch = list(self._waiting)[:MAX_BATCH]
        for request in batch:
            del self._waiting[request]
        try:
            self._answer(batch)
        except Exception:
            for request in batch:
                self._waiting[request] = None
            self.fail(traceback.format_exc())
            return
        self._schedule()

    def _answer(self, batch: list[Request]) -> None:
        version, learning = self.version, self.phase == "learning"
        answers = []
        for explore in (True, False):
            group = [r for r in batch if (self._explore and not r.episode.evaluate) is explore]
            answers += self._decide(group, explore) if group else []
        now = self._loop.time()
        for request, action, _, _, _ in answers:
            if request.action is None:
                reply: Any = Action(
                    re=request.id,
                    episode=request.episode.name,
                    step=request.step,
                    action=self._policy.actions.to_wire(action),
                    phase=self.phase,
                    policy_version=version,
                    resumes_in_s=self.resumes_in_s,
                )
            else:
                reply = self.done(request.id)
            request.connection.send(reply)
        for request, action, logp, dist, state in answers:
            self._observe(request)
            self._desk.chose(
                request.episode,
                request.obs,
                action,
                logp,
                dist,
                state,
                version,
                by_policy=request.action is None,
                learning=learning,
                mask=request.mask,
            )
            request.episode.release()
            self._meter.waits.append(now - max(request.at, self._free_since))
        self._meter.requests += len(batch)
        self._meter.batches += 1
        if learning:
            self._meter.learning += len(batch)

    def done(self, id: int) -> Done:
        return Done(re=id, phase=self.phase, policy_version=self.version, resumes_in_s=self.resumes_in_s)

    def _decide(self, group: list[Request], explore: bool) -> list[tuple[Request, Any, float, Any, Any]]:
        """(request, action row, log-probability, distribution inputs, next state) for each of the group."""
        policy = self._policy
        decided = []
        if not policy.is_recurrent:  # nothing of the policy depends on the client's own actions
            no_dist = np.zeros(policy.dist.inputs_size, np.float32)
            decided = [(r, r.action, 0.0, no_dist, None) for r in group if r.action is not None]
            group = [r for r in group if r.action is None]
            if not group:
                return decided
        count = len(group)
        prev_action = np.zeros((count, policy.actions.width), policy.actions.dtype)
        prev_reward = np.zeros(count, np.float32)
        has_prev = np.zeros(count, bool)
        if policy.uses_prev_action or policy.uses_prev_reward:
            for i, request in enumerate(group):
                last = request.episode.last_action
                if last is not None:
                    prev_action[i], prev_reward[i], has_prev[i] = last, request.reward, True
        result = policy.act(
            policy.codec.stack([r.obs for r in group]),
            prev_action,
            prev_reward,
            has_prev,
            np.stack([r.episode.state for r in group]) if policy.is_recurrent else None,  # type: ignore[misc]
            explore=explore,
            generator=self._generator,
            mask=stack_masks([r.mask for r in group], policy.dist.inputs_size),
        )
        states = result.state if result.state is not None else [None] * count
        logps = result.logp.tolist()
        for i, request in enumerate(group):
            own = request.action
            decided.append(
                (
                    request,
                    result.actions[i] if own is None else own,
                    logps[i] if own is None else 0.0,
                    result.dist[i],
                    states[i],
                )
            )
        return decided

    def _observe(self, request: Request) -> None:
        if not request.observed:
            request.observed = True
            self._desk.observe(request.episode, request.reward, request.obs)


class _Meter:
    """Counts between two samples."""

    def __init__(self) -> None:
        self.requests = 0
        self.batches = 0
        self.learning = 0
        self.waits: deque[float] = deque(maxlen=MAX_WAITS)  # seconds from request to reply

    def numbers(self) -> dict[str, float]:
        waits = np.array(self.waits if self.waits else [0.0]) * 1000.0
        return {
            "requests": self.requests,
            "batches": self.batches,
            "batch_mean": self.requests / self.batches if self.batches else 0.0,
            "learning_requests": self.learning,
            "wait_max_ms": float(waits.max()),
            "wait_p50_ms": float(np.percentile(waits, 50)),
            "wait_p99_ms": float(np.percentile(waits, 99)),
        }
