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
    loss: Annotated[
        Literal["lag_scaled", "plain", "decoupled"],
        Meta(
            description="policy loss on late rows: lag_scaled (ε grows with a row's lag), plain (PPO, one ε), "
            "decoupled (clip around the policy at the start of the update, rows weighted); all the same at lag 0"
        ),
    ] = "lag_scaled"
    clip_param: Annotated[Schedule, Meta(description="ε of the clipped objective, or a schedule")] = 0.2
    lag_factor: Annotated[float, Meta(ge=0, description="κ: ε grows with lag as ε·(1+κ·lag); 0 gives plain PPO")] = 0.2
    clip_max: Annotated[float, Meta(gt=0, description="upper limit of the lag-scaled ε")] = 0.8
    weight_cap: Annotated[float, Meta(gt=0, description="largest weight of a row in the decoupled loss")] = 10.0
    max_lag: Annotated[
        NonNegativeInt | None,
        Meta(description="rows older than this many policy versions are not trained on"),
    ] = None
    vf_loss_coeff: Annotated[float, Meta(ge=0, description="c_v, weight of the squared value error")] = 0.5
    vf_clip: Annotated[
        Literal["none", "clamped_error", "clipped_value"],
        Meta(
            description="clamped_error: squared value errors count as vf_clip_param at most; clipped_value: values are "
            "kept within ±vf_clip_param of those before the update"
        ),
    ] = "none"
    vf_clip_param: Annotated[float, Meta(gt=0, description="limit of vf_clip, in the critic's own scale")] = 10.0
    entropy_coeff: Annotated[Schedule | None, Meta(description="c_e, weight of the entropy bonus")] = None
    use_kl_loss: Annotated[bool | None, Meta(description="adaptive KL penalty besides the clip")] = None
    kl_coeff: Annotated[float, Meta(ge=0, description="initial β of the KL penalty")] = 0.2
    kl_target: Annotated[float, Meta(gt=0, description="KL per iteration that β is steered to")] = 0.01
    kl_measure: Annotated[
        Literal["last_epoch", "all", "last_minibatch"],
        Meta(description="which minibatches the KL is measured over that steers β"),
    ] = "last_epoch"
    target_kl: Annotated[
        Positive | None,
        Meta(description="end an update early when a minibatch's KL (estimate k3) exceeds 1.5 times this; null: off"),
    ] = None
    grad_clip: Annotated[Positive | None, Meta(description="maximum global gradient norm; null: off")] = 0.5
    advantage_norm: Annotated[
        Literal["batch", "minibatch", "none"], Meta(description="where advantages are normalised")
    ] = "batch"
    normalize_values: Annotated[
        bool | None,
        Meta(description="critic predicts normalised targets; default: true with a shared value function"),
    ] = None
    adam_eps: Annotated[float, Meta(gt=0, description="ε of Adam")] = 1e-5
    shuffle: Annotated[bool, Meta(description="minibatches in random order; false: in the order of arrival")] = True
    recompute_advantages: Annotated[
        Literal["per_batch", "per_epoch"],
        Meta(description="per_epoch: values and advantages anew before each epoch, for one more pass over the batch"),
    ] = "per_batch"
    reward_scaling: Annotated[
        bool,
        Meta(
            description="learn from rewards over the deviation of the running discounted return, clipped to ±10; "
            "reported returns stay raw; needs environments that tetherl steps"
        ),
    ] = False
    reward_scale: Annotated[float, Meta(gt=0, description="rewards are multiplied by this for learning")] = 1.0
    reward_clip: Annotated[
        Positive | None,
        Meta(description="scaled rewards are clipped to ± this for learning; reported returns stay raw; null: off"),
    ] = None
    burn_in: Annotated[
        NonNegativeInt,
        Meta(
            description="rows before a chunk that warm its recurrent state up, without a loss; 8 helps at lag 2 or more"
        ),
    ] = 0
    state_source: Annotated[
        Literal["recomputed", "stored"],
        Meta(description="recurrent states at chunk starts: by the network that learns, or those of the actor"),
    ] = "recomputed"
    state_refresh: Annotated[
        Literal["per_batch", "per_epoch"],
        Meta(description="per_epoch: recompute these states before each epoch, for one more pass over the batch"),
    ] = "per_batch"
