"""Settings of the learning algorithm. None means: derived, see `tetherl config`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Schedule = float | list[tuple[float, float]]
"""A constant, or [[env steps trained, value], ...]: piecewise linear, constant outside."""

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


class AlgorithmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `algorithm` section (PPO)."""

    name: Annotated[Literal["ppo"], Meta(description="the algorithm")] = "ppo"
    cpus: Annotated[float, Meta(gt=0, description="CPUs of the algorithm process")] = 1
    gpus: Annotated[
        float, Meta(ge=0, description="GPUs of the algorithm process, for learning without learner workers")
    ] = 0
    gamma: Annotated[float, Meta(gt=0, le=1, description="discount γ")] = 0.99
    lambda_: Annotated[float, Meta(ge=0, le=1, description="λ of GAE")] = 0.95
    train_batch_size: Annotated[PositiveInt | None, Meta(description="env steps per training iteration")] = None
    minibatch_size: Annotated[PositiveInt | None, Meta(description="valid steps per optimizer step")] = None
    epochs: Annotated[PositiveInt | None, Meta(description="passes over each sample batch")] = None
    lr: Annotated[Schedule | None, Meta(description="learning rate of Adam, or a schedule")] = None
    clip_param: Annotated[Schedule, Meta(description="ε of the clipped objective, or a schedule")] = 0.2
    lag_factor: Annotated[float, Meta(ge=0, description="κ: ε grows with lag as ε·(1+κ·lag); 0 gives plain PPO")] = 0.2
    clip_max: Annotated[float, Meta(gt=0, description="upper limit of the lag-scaled ε")] = 0.8
    max_lag: Annotated[
        NonNegativeInt | None,
        Meta(description="rows older than this many policy versions are not trained on"),
    ] = None
    vf_loss_coeff: Annotated[float, Meta(ge=0, description="c_v, weight of the squared value error")] = 0.5
    entropy_coeff: Annotated[Schedule | None, Meta(description="c_e, weight of the entropy bonus")] = None
    use_kl_loss: Annotated[bool | None, Meta(description="adaptive KL penalty besides the clip")] = None
    kl_coeff: Annotated[float, Meta(ge=0, description="initial β of the KL penalty")] = 0.2
    kl_target: Annotated[float, Meta(gt=0, description="KL per iteration that β is steered to")] = 0.01
    grad_clip: Annotated[Positive | None, Meta(description="maximum global gradient norm; null: off")] = 0.5
    advantage_norm: Annotated[
        Literal["batch", "minibatch", "none"], Meta(description="where advantages are normalised")
    ] = "batch"
    normalize_values: Annotated[
        bool | None,
        Meta(description="critic predicts normalised targets; default: true with a shared value function"),
    ] = None
    adam_eps: Annotated[float, Meta(gt=0, description="ε of Adam")] = 1e-5
