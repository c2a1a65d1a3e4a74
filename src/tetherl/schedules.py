"""How sampling and learning alternate: one short function each. Every call is one training iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tetherl.algorithm import Algorithm


def rounds(algorithm: Algorithm) -> None:
    """Environments that tetherl steps: sample until the batch is full, stand still, learn from everything.

    No environment step is taken while the learner learns, so each step is trained on with lag 0 (with
    complete_episodes, an episode that spans an update has older rows).
    """
    algorithm.collect_from_envs()
    algorithm.learn(algorithm.take_all())
    algorithm.publish_weights()


def hold(algorithm: Algorithm) -> None:
    """External clients that can pause: action requests wait while the learner learns.

    When the batch is full, open fragments are cut and join it (not with complete_episodes).
    """
    algorithm.wait_for_batch()
    algorithm.announce("learning", cut=algorithm.config.rollouts.batch_mode == "truncate_episodes")
    algorithm.rollouts.stop_serving()
    algorithm.learn(algorithm.take_all())
    algorithm.publish_weights()
    algorithm.announce("collecting")
    algorithm.rollouts.start_serving()


def play_on(algorithm: Algorithm) -> None:
    """External clients that play on while the learner learns (keep, discard): inference has its own process."""
    algorithm.wait_for_batch()
    batch = algorithm.take_batch()
    algorithm.announce("learning")
    algorithm.learn(batch)
    algorithm.publish_weights()
    algorithm.announce("collecting")
