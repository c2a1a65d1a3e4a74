"""Which resource settings make sense together: asked when a run is configured and planned."""

from __future__ import annotations

from typing import Any


def rollout_workers(config: Any) -> int:
    """The number of rollout workers, also of a configuration that is not resolved yet."""
    if config.rollouts.workers is not None:
        return int(config.rollouts.workers)
    return 1 if config.external is not None else 0


def setting_problems(config: Any) -> list[str]:
    """Resource settings that would do nothing or that no machine can give, with the key and the mends."""
    rollouts, learners, evaluation = (
        rollout_workers(config),
        config.learners.workers,
        config.evaluation.workers,
    )
    use_gpus = config.device != "cpu"
    problems = []
    for section, workers, instead in (
        ("rollouts", rollouts, "the algorithm process samples itself and has algorithm.{what}"),
        ("learners", learners, "the algorithm process learns and has algorithm.{what}"),
        (
            "evaluation",
            evaluation,
            "there is no evaluation worker; the algorithm process has algorithm.{what}",
        ),
    ):
        settings = getattr(config, section)
        for what, default in (("cpus", 1), ("gpus", 0)):
            value = getattr(settings, f"{what}_per_worker")
            if not workers and value != default and (what == "cpus" or use_gpus):
                problems.append(
                    f"{section}.{what}_per_worker: {value:g} does nothing, because {section}.workers is 0: "
                    f"{instead.format(what=what)}. Set {section}.workers to 1 or more, or leave the key out"
                )
    if evaluation and config.evaluation.interval is None:
        problems.append(
            f"evaluation.workers: {evaluation} would never be used, because evaluation.interval is not set. "
            "Set evaluation.interval (for example 10), or evaluation.workers to 0"
        )
    if not use_gpus:
        return problems
    gpus = config.algorithm.gpus
    if gpus and learners and rollouts:
        problems.append(
            f"algorithm.gpus: {gpus:g} does nothing, because the algorithm process neither learns "
            f"(learners.workers is {learners}) nor samples (rollouts.workers is {rollouts}). Set "
            "algorithm.gpus to 0, or set learners.workers to 0 so that the algorithm process learns on it"
        )
    for key, value in (
        ("algorithm.gpus", gpus),
        ("rollouts.gpus_per_worker", config.rollouts.gpus_per_worker),
        ("learners.gpus_per_worker", config.learners.gpus_per_worker),
        ("evaluation.gpus_per_worker", config.evaluation.gpus_per_worker),
    ):
        if value > 1 and value != int(value):
            problems.append(
                f"{key}: {value:g} is neither a share of one GPU (0 to 1) nor a whole number of GPUs; "
                f"set {int(value)} or {int(value) + 1}"
            )
    share = config.learners.gpus_per_worker
    if learners > 1 and 0 < share < 1:
        problems.append(
            f"learners.gpus_per_worker: {share:g} with {learners} learner workers: workers of one group "
            "cannot share a GPU. Set it to 1 (a GPU each) or to 0, or set learners.workers to 1"
        )
    if config.device == "cuda" and not gpus_asked(config):
        problems.append(
            "device: cuda, but no process has a GPU. Set algorithm.gpus (for example 1; with learner workers "
            "learners.gpus_per_worker), or set device to auto"
        )
    return problems


def gpus_asked(config: Any) -> float:
    """The sum of all GPU numbers, whether or not `device` lets them be used."""
    return float(
        config.algorithm.gpus
        + rollout_workers(config) * config.rollouts.gpus_per_worker
        + config.learners.workers * config.learners.gpus_per_worker
        + config.evaluation.workers * config.evaluation.gpus_per_worker
    )
