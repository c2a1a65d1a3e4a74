"""Settings of the workers: rollout, learner, evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `rollouts` section."""

    workers: Annotated[
        NonNegativeInt | None, Meta(description="rollout workers; 0: the algorithm process samples itself")
    ] = None
    envs_per_worker: Annotated[PositiveInt | None, Meta(description="env copies stepped as one vector")] = None
    vectorization: Annotated[
        Literal["auto", "sync", "async", "own"],
        Meta(
            description="how env copies are stepped: own (the environment's vectorised version), sync (one after the "
            "other), async (a process each); auto: own if there is one, else sync"
        ),
    ] = "auto"
    cpus_per_worker: Annotated[float, Meta(gt=0, description="CPUs of each rollout worker")] = 1
    gpus_per_worker: Annotated[float, Meta(ge=0, description="GPUs of each rollout worker, for inference")] = 0
    fragment_length: Annotated[int, Meta(ge=1, description="longest fragment in steps (truncate_episodes)")] = 128
    batch_mode: Annotated[
        Literal["truncate_episodes", "complete_episodes"],
        Meta(description="train on parts of episodes, or only on whole ones"),
    ] = "truncate_episodes"
    queue_bytes: Annotated[
        PositiveInt | None,
        Meta(description="bound of the sample queue; default: derived, two train batches or more"),
    ] = None


class LearnersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `learners` section."""

    workers: Annotated[int, Meta(ge=0, description="learner workers; 0: the algorithm process learns")] = 0
    cpus_per_worker: Annotated[float, Meta(gt=0, description="CPUs of each learner worker")] = 1
    gpus_per_worker: Annotated[float, Meta(ge=0, description="GPUs of each learner worker")] = 0


class EvaluationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `evaluation` section."""

    workers: Annotated[int, Meta(ge=0, description="evaluation workers; 0: the algorithm process evaluates")] = 0
    interval: Annotated[PositiveInt | None, Meta(description="iterations between evaluations; null: no evaluation")] = (
        None
    )
    episodes: Annotated[int, Meta(ge=1, description="episodes of each evaluation")] = 10
    env: Annotated[str | None, Meta(description="Gymnasium environment to evaluate in; default: `env`")] = None
    env_config: Annotated[dict[str, Any], Meta(description="keyword arguments of `evaluation.env`")] = {}
    cpus_per_worker: Annotated[float, Meta(gt=0, description="CPUs of each evaluation worker")] = 1
    gpus_per_worker: Annotated[float, Meta(ge=0, description="GPUs of each evaluation worker")] = 0
