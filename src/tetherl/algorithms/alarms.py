"""Signs that experience is too old, or too different from the policy, to learn well from: said, never acted on."""

from __future__ import annotations

from tetherl.algorithms.config import AlgorithmConfig

RATIO_FIRST = 1e-3  # rounding stays well below 1e-4
OUTSIDE_CLIP = 0.3
KL_FACTOR = 5.0
DROPPED = 0.1
EFFECTIVE_SAMPLE_SIZE = 0.5
VALUE_CLIPPED = 0.2


def alarms(metrics: dict[str, float], config: AlgorithmConfig, trained: int, dropped: dict[str, int]) -> dict[str, str]:
    """What is wrong with an update's numbers: name of the alarm -> a sentence with number, limit, and what helps.

    metrics: of `LearnResult`; trained, dropped: rows. Thresholds: the constants above.
    """
    found: dict[str, str] = {}
    ratio = metrics.get("learner/ratio_max_first", 0.0)
    if ratio > RATIO_FIRST:
        found["ratio_first"] = (
            f"on fresh steps the learner's probabilities differ from those with which the actions were chosen: the "
            f"largest |ratio - 1| is {ratio:.2g} before the first optimizer step (alarm at {RATIO_FIRST:g}). Acting "
            "and learning do not see the same: look at what changes observations, recurrent states or action masks in "
            "between, and at layers that behave differently in training (dropout, batch norm)"
        )
    lag = metrics.get("lag/mean", 0.0)
    late = (
        f"rows are {lag:.1f} versions old on average; fewer epochs, larger batches or a lower lr make learning shorter"
    )

    outside = metrics.get("learner/outside_clip_first", 0.0)
    if outside > OUTSIDE_CLIP:
        found["outside_clip"] = (
            f"{outside:.0%} of the steps were outside their clip range before the first optimizer step (alarm at "
            f"{OUTSIDE_CLIP:.0%}): they hardly teach anything. The policy has moved far since they were played: {late}"
        )
    kl, limit = metrics.get("learner/kl_behaviour", 0.0), KL_FACTOR * config.kl_target * (1 + lag)
    if kl > limit:
        found["kl_behaviour"] = (
            f"the policy that played differs from the one that learns by a KL of {kl:.3g} (alarm at {limit:.3g}, "
            f"{KL_FACTOR:g} times kl_target for each version): {late}"
        )
    old = dropped.get("stale", 0) + dropped.get("not_policy", 0)
    share = old / max(1, trained + sum(dropped.values()))
    if share > DROPPED:
        found["dropped"] = (
            f"{share:.0%} of the steps of a batch were not trained on (alarm at {DROPPED:.0%}): "
            f"{dropped.get('stale', 0)} stale (older than algorithm.max_lag, {config.max_lag}) and "
            f"{dropped.get('not_policy', 0)} not chosen by the policy. Shorter learning, larger batches or a higher "
            "max_lag keep more of the stale ones"
        )
    size = metrics.get("learner/ess")
    if size is not None and size < EFFECTIVE_SAMPLE_SIZE:
        found["ess"] = (
            f"the weights of the decoupled loss leave an effective sample size of {size:.0%} (alarm below "
            f"{EFFECTIVE_SAMPLE_SIZE:.0%}): few steps decide the update. Lower algorithm.max_lag or lr, or use loss: "
            "lag_scaled"
        )
    clipped = metrics.get("learner/vf_clip_fraction", 0.0)
    if clipped > VALUE_CLIPPED:
        found["vf_clip"] = (
            f"{clipped:.0%} of the value errors reached algorithm.vf_clip_param (alarm at {VALUE_CLIPPED:.0%}): beyond "
            "it the critic does not learn. Raise it, scale rewards down (algorithm.reward_scale), or use "
            "normalize_values instead"
        )
    return found
