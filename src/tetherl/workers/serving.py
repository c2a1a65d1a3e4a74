"""Rollout worker for external clients: a shell around the policy server."""

from __future__ import annotations

from typing import Any

import numpy as np

from tetherl.data.fragment import Sample
from tetherl.models.numerics import set_up_torch
from tetherl.models.policy import Policy
from tetherl.server.policy_server import PolicyServer
from tetherl.spaces import space_from_spec
from tetherl.workers.spec import WorkerSpec


class ServingWorker:
    """Hosts one policy server. Answers to the same calls as a rollout worker that steps its own environments."""

    def __init__(self, spec: WorkerSpec, token: str | None) -> None:
        assert spec.external is not None
        set_up_torch(spec.threads, spec.device)
        observation_space = space_from_spec(spec.external.observation_space)
        action_space = space_from_spec(spec.external.action_space)
        policy = Policy(observation_space, action_space, spec.model, seed=spec.seed).to(spec.device)
        self._server = PolicyServer(
            policy,
            spec.external,
            worker=spec.index,
            worker_port=spec.worker_port,
            token=token,
            batch_mode=spec.batch_mode,
            fragment_length=spec.fragment_length,
            state_every=spec.state_every,
            seed=int(np.random.SeedSequence([spec.seed, spec.index, spec.start]).generate_state(1)[0]),
            outbox_bytes=spec.outbox_bytes,
            open_bytes=spec.open_bytes,
        )
        self._url = self._server.start()

    def url(self) -> str:
        """Where clients reach this worker."""
        return self._url

    def set_weights(self, weights: dict[str, np.ndarray], version: int) -> None:
        self._server.set_weights(weights, version)

    def set_phase(self, phase: Any, resumes_in_s: float | None, cut: bool = False) -> None:
        """Tell the clients; with `cut`, open fragments end here and join the batch."""
        self._server.set_phase(phase, resumes_in_s, cut=cut)

    def sample(self, timeout: float) -> Sample:
        """What has arrived; waits up to `timeout` seconds for the first fragment."""
        return self._server.take(timeout)

    def release(self) -> None:
        """Make a waiting `sample` return."""
        self._server.release()

    def close(self) -> None:
        self._server.stop()
