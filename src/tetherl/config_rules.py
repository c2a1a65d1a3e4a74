"""Which settings make sense together, and which are derived from others and from the spaces."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tetherl.errors import ConfigError, MissingExtraError, SpaceError
from tetherl.resources.plan import longest_fragment
from tetherl.resources.rules import rollout_workers, setting_problems

if TYPE_CHECKING:
    from tetherl.config import RunConfig
    from tetherl.spaces import ActionCodec, ObservationCodec

MIN_QUEUE_BYTES = 64 * 2**20
LONGEST_EXTERNAL_EPISODE = 100_000

DERIVED = {
    "name",
    *("rollouts.workers", "rollouts.envs_per_worker", "rollouts.queue_bytes"),
    *("algorithm.train_batch_size", "algorithm.minibatch_size", "algorithm.epochs", "algorithm.lr"),
    *("algorithm.entropy_coeff", "algorithm.use_kl_loss", "algorithm.normalize_values", "algorithm.max_lag"),
    *("model.fcnet_hiddens", "model.vf_share_layers", "model.lstm_use_prev_action"),
    "external.max_episode_steps",
}
"""Settings that `derive` fills in when they are None."""


# --- spaces ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spaces:
    """What observations and actions are like. horizon: the environment's own limit of an episode."""

    observation: ObservationCodec
    action: ActionCodec
    horizon: int | None = None

    @property
    def has_images(self) -> bool:
        return any(leaf.kind == "image" for leaf in self.observation.leaves)

    @property
    def has_vectors(self) -> bool:
        return any(leaf.kind != "image" for leaf in self.observation.leaves)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a fragment: observation, action, distribution inputs, mask, and four numbers."""
        action = self.action
        item = 8 if action.mask_width else 4  # int64 ids and bits, or float32
        choices = 4 * action.inputs_size + action.mask_width
        return self.observation.nbytes + item * action.width + choices + 17


def spaces_of(config: RunConfig) -> Spaces:
    """The spaces of the clients' specs, or of the environment, which is built for it. Raises ConfigError."""
    try:
        from tetherl.spaces import ActionCodec, ObservationCodec, space_from_spec
        from tetherl.workers.envs import env_factory
    except ModuleNotFoundError as error:
        raise MissingExtraError("looking at the spaces of a run", "train") from error
    horizon = None
    if config.external is not None:
        observation = space_from_spec(config.external.observation_space, "external.observation_space")
        action = space_from_spec(config.external.action_space, "external.action_space")
    else:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for results; environments print greetings
                env = env_factory(config.env, config.env_config)()
                observation, action = env.observation_space, env.action_space
                horizon = env.spec.max_episode_steps if env.spec is not None else None
                env.close()
        except ConfigError:
            raise
        except Exception as error:  # user code may raise anything
            raise ConfigError(
                f"env: {env_name(config.env)!r} with env_config {config.env_config} cannot be built: "
                f"{type(error).__name__}: {error}"
            ) from error
    try:
        squash = config.model.action_distribution == "tanh"
        return Spaces(ObservationCodec(observation), ActionCodec(action, squash), horizon)
    except SpaceError as error:
        raise ConfigError(str(error)) from error


def env_name(env: Any) -> str | None:
    """The environment as text: an id or "module:Name"."""
    if env is None or isinstance(env, str):
        return env
    name = getattr(env, "__qualname__", None)
    if name is None:
        raise ConfigError(f"env: {env!r} has no name by which it could be found again; give a class or a function")
    return f"{env.__module__}:{name}"


# --- derived settings --------------------------------------------------------------------------------------


def derive(config: RunConfig, spaces: Spaces) -> dict[str, tuple[Any, str]]:
    """Settings that are None and follow from others: dotted key -> (value, why this value)."""
    derived: dict[str, tuple[Any, str]] = {}

    def fill(key: str, value: Any, reason: str) -> Any:
        given = config.get(key)
        if given is not None:
            return given
        derived[key] = (value, reason)
        return value

    external, rollouts, algorithm, model = config.external, config.rollouts, config.algorithm, config.model
    fill("name", _run_name(config), "environment, date and time")
    fill("rollouts.workers", rollout_workers(config), "1 with external, else 0")
    fill("rollouts.envs_per_worker", 1, "one environment copy")

    heavy = external is not None or spaces.has_images
    kind = "external" if external is not None else "image observations" if heavy else "vector observations"
    batch = fill("algorithm.train_batch_size", 4096 if heavy else 1024, kind)
    fill("algorithm.minibatch_size", min(batch, 512 if heavy else 256), f"{kind}, at most train_batch_size")
    fill("algorithm.epochs", 4 if heavy else 10, kind)
    limit = config.stop.env_steps
    if heavy or limit is None:
        fill(
            "algorithm.lr",
            3e-4,
            f"{kind}, constant" if heavy else "constant, because stop.env_steps is not set",
        )
    else:
        fill("algorithm.lr", [(0.0, 1e-3), (float(limit), 0.0)], f"{kind}, down to 0 at stop.env_steps")
    fill("algorithm.entropy_coeff", 0.005 if heavy else 0.0, kind)
    fill("algorithm.use_kl_loss", heavy, kind)

    if spaces.has_vectors:
        fill("model.fcnet_hiddens", [64, 64], "vector observations")
    recurrent = model.core is not None
    core = {"lstm": "an LSTM", "gru": "a GRU", None: "no recurrent core"}[model.core]
    why = core if recurrent else "images" if spaces.has_images else "neither images nor a recurrent core"
    shared = fill("model.vf_share_layers", recurrent or spaces.has_images, why)
    fill("model.lstm_use_prev_action", recurrent, core)
    normalize = external is not None or shared
    why = "external" if external is not None else "shared value function" if shared else "separate value function"
    if algorithm.reward_scaling:
        normalize, why = False, "algorithm.reward_scaling gives values their scale"
    fill("algorithm.normalize_values", normalize, why)

    decoupled = algorithm.loss == "decoupled"
    if external is not None and external.during_learning == "hold":
        fill("algorithm.max_lag", 0, "external.during_learning is hold")
    elif decoupled:
        fill("algorithm.max_lag", 4, "the decoupled loss")
    elif external is None:
        fill("algorithm.max_lag", 1, "environments that tetherl steps")
    elif algorithm.loss == "lag_scaled" and algorithm.lag_factor > 0:
        fill("algorithm.max_lag", 8, "external with the lag-scaled loss")
    elif algorithm.loss == "lag_scaled":
        fill("algorithm.max_lag", 1, "external, algorithm.lag_factor is 0")
    else:
        fill("algorithm.max_lag", 1, "external with the plain loss")

    if external is not None:
        complete = rollouts.batch_mode == "complete_episodes"
        longest = max(batch, 1000) if complete else LONGEST_EXTERNAL_EPISODE
        why = "complete_episodes: one train batch, at least 1000" if complete else "truncate_episodes"
        longest = fill("external.max_episode_steps", longest, why)
        longest = longest if complete else rollouts.fragment_length
    else:
        longest = spaces.horizon or batch if rollouts.batch_mode == "complete_episodes" else rollouts.fragment_length
    fill(
        "rollouts.queue_bytes",
        max(MIN_QUEUE_BYTES, (2 * batch + longest) * spaces.row_bytes),
        f"two train batches and one longest fragment of {spaces.row_bytes} bytes a step, at least 64 MiB",
    )
    return derived


def _run_name(config: RunConfig) -> str:
    """Environment, date and time to the millisecond: two runs never share a name by accident."""
    env = "external" if config.external is not None else (env_name(config.env) or "")
    env = re.sub(r"[^A-Za-z0-9._-]+", "-", env.rpartition(":")[2]).strip("-.")
    now = datetime.now()
    return f"{env or 'run'}-{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03d}"


# --- meaningless combinations ------------------------------------------------------------------------------


def problems(config: RunConfig) -> list[str]:
    """What is wrong with settings taken together; settings that are still to be derived are left alone."""
    found = [*_source_problems(config), *setting_problems(config), *_training_problems(config)]
    try:
        seconds = config.checkpoint.interval_seconds
    except ValueError as error:
        found.append(f"checkpoint.interval: {error}; or give a number of iterations, or null for none")
    else:
        interval = config.checkpoint.interval
        if seconds is None and isinstance(interval, int) and interval < 1:
            found.append(f"checkpoint.interval: got {interval}; expected 1 or more iterations, or null for none")
    if config.name is not None and not re.fullmatch(r"[^/\\\0]*[^/\\\0.][^/\\\0]*", config.name):
        found.append(f"name: {config.name!r} cannot be the name of a directory; leave out slashes")
    return found


def _source_problems(config: RunConfig) -> list[str]:
    """Where experience comes from: environments or clients."""
    found = []
    env, external, evaluation = config.env, config.external, config.evaluation
    if env is None and external is None:
        found.append("env, external: neither is set; set env (for example CartPole-v1) or external")
    if env is not None and external is not None:
        found.append(
            f"env, external: both are set (env: {env_name(env)}), but a run has one source of experience; "
            "drop one. To evaluate an external run in an environment, set evaluation.env"
        )
    if env is not None and not callable(env) and not isinstance(env, str):
        found.append(f'env: got {env!r}; expected a Gymnasium id, "module:Name", or a class or function')
    if config.env_config and env is None:
        found.append("env_config: does nothing without env; what clients should be told goes to external.env_config")
    if evaluation.env_config and evaluation.env is None:
        found.append("evaluation.env_config: does nothing without evaluation.env; set evaluation.env too")
    if external is None:
        return found
    if evaluation.interval is not None and evaluation.env is None:
        found.append(
            f"evaluation.interval: {evaluation.interval} with external needs an environment that evaluation "
            "can step itself: set evaluation.env, or leave evaluation.interval out"
        )
    last = external.worker_port + max(1, 1 if config.rollouts.workers is None else config.rollouts.workers) - 1
    if external.worker_port and external.worker_port <= external.port <= last:
        found.append(
            f"external.port: {external.port} is also the port of a rollout worker (external.worker_port "
            f"{external.worker_port} to {last}); choose another, or 0 for any free port"
        )
    if last > 65535:
        found.append(f"external.worker_port: {external.worker_port}; the last worker would need port {last}")
    if config.algorithm.reward_scaling:
        found.append(
            "algorithm.reward_scaling: with external the steps of an episode may come late or not at all, and running "
            "returns need them in order; use algorithm.normalize_values, which is on by default there and does the "
            "same for the value function"
        )
    if config.rollouts.vectorization != "auto":
        found.append(
            f"rollouts.vectorization: {config.rollouts.vectorization} does nothing with external: the clients step "
            "their environments; leave it out"
        )
    if config.rollouts.envs_per_worker not in (None, 1):
        found.append(
            f"rollouts.envs_per_worker: {config.rollouts.envs_per_worker} does nothing with external: the "
            "clients decide how many environments play; leave it out"
        )
    if config.rollouts.workers == 0 and external.during_learning != "hold":
        found.append(
            f"rollouts.workers: 0 with external.during_learning {external.during_learning}: the algorithm "
            "process cannot answer clients while it learns. Set rollouts.workers to 1 or more, or "
            "during_learning to hold"
        )
    return found


def _training_problems(config: RunConfig) -> list[str]:
    found = []
    algorithm, model = config.algorithm, config.model
    batch, minibatch = algorithm.train_batch_size, algorithm.minibatch_size
    if batch is not None and minibatch is not None and minibatch > batch:
        found.append(
            f"algorithm.minibatch_size: {minibatch} is more than algorithm.train_batch_size, which is "
            f"{batch}; lower the one or raise the other"
        )
    if algorithm.use_kl_loss is False and algorithm.kl_coeff != type(algorithm)().kl_coeff:
        found.append(f"algorithm.kl_coeff: {algorithm.kl_coeff:g} does nothing while algorithm.use_kl_loss is false")
    if algorithm.use_kl_loss and algorithm.kl_coeff == 0:
        found.append("algorithm.kl_coeff: 0 can never grow; set algorithm.use_kl_loss to false to have no penalty")
    if algorithm.vf_loss_coeff == 0 and algorithm.vf_clip != "none":
        found.append(f"algorithm.vf_clip: {algorithm.vf_clip} does nothing with algorithm.vf_loss_coeff 0")
    if model.core is None and model.lstm_cell_size != 128:
        found.append(
            f"model.lstm_cell_size: {model.lstm_cell_size} does nothing without a recurrent core; set "
            "model.rnn to lstm or gru, or leave it out"
        )
    for name, value in (
        ("lr", algorithm.lr),
        ("clip_param", algorithm.clip_param),
        ("entropy_coeff", algorithm.entropy_coeff),
    ):
        points = value if isinstance(value, list) else [(0.0, 0.0 if value is None else value)]
        steps = [step for step, _ in points]
        if not points or steps != sorted(set(steps)):
            found.append(f"algorithm.{name}: {value}; a schedule needs points at ascending env steps")
        elif min(v for _, v in points) < 0:
            found.append(f"algorithm.{name}: {value}; expected no value below 0")
    found += _idle_loss_settings(config)
    clip = algorithm.clip_param
    clip = max(value for _, value in clip) if isinstance(clip, list) and clip else clip
    if algorithm.loss == "lag_scaled" and isinstance(clip, float) and clip > algorithm.clip_max:
        found.append(f"algorithm.clip_max: {algorithm.clip_max:g} is less than algorithm.clip_param, {clip:g}")
    return found


def _idle_loss_settings(config: RunConfig) -> list[str]:
    """Settings of the learner that would do nothing."""
    found = []
    algorithm, model = config.algorithm, config.model
    default = type(algorithm)()

    def idle(name: str, unless: str) -> None:
        value = getattr(algorithm, name)
        if value != getattr(default, name):
            found.append(f"algorithm.{name}: {value} does nothing {unless}, or leave it out")

    if algorithm.reward_scaling:
        for name in ("reward_scale", "reward_clip"):
            idle(name, "with algorithm.reward_scaling, which finds the scale and clips to ±10; set that to false")
    if algorithm.loss != "lag_scaled":
        for name in ("lag_factor", "clip_max"):
            idle(name, f"with algorithm.loss {algorithm.loss}; set loss to lag_scaled")
    if algorithm.loss != "decoupled":
        idle("weight_cap", f"with algorithm.loss {algorithm.loss}; set loss to decoupled")
    if algorithm.vf_clip == "none":
        idle("vf_clip_param", "with algorithm.vf_clip none; set vf_clip to clamped_error or clipped_value")
    if algorithm.use_kl_loss is False:
        idle("kl_measure", "with algorithm.use_kl_loss false; set it to true")
    if model.core is None:
        for name in ("burn_in", "state_source", "state_refresh"):
            idle(name, "without a recurrent core; set model.use_lstm to true")
    if algorithm.state_source == "stored":
        idle("state_refresh", "with algorithm.state_source stored; set it to recomputed")
    if algorithm.epochs == 1:
        for name in ("recompute_advantages", "state_refresh"):
            idle(name, "with algorithm.epochs 1, which has no second epoch; set epochs to 2 or more")
    if algorithm.minibatch_size is not None and config.learners.workers > algorithm.minibatch_size:
        found.append(
            f"learners.workers: {config.learners.workers} share minibatches of {algorithm.minibatch_size} steps "
            "(algorithm.minibatch_size), so some would never have anything to do; lower the one or raise the other"
        )
    return found


def space_problems(config: RunConfig, spaces: Spaces) -> list[str]:
    """What is wrong with a resolved configuration once the spaces are known."""
    from tetherl.models.defaults import resolve_model  # needs gymnasium, which planning without an environment does not

    found = []
    queue, batch = config.rollouts.queue_bytes, config.algorithm.train_batch_size
    longest, row = longest_fragment(config, spaces.horizon), spaces.row_bytes
    assert queue is not None and batch is not None
    need = (batch + longest) * row
    if queue < need:
        what = "episode allowed" if config.rollouts.batch_mode == "complete_episodes" else "fragment"
        lower = "external.max_episode_steps, " if what != "fragment" and config.external is not None else ""
        found.append(
            f"rollouts.queue_bytes: {queue} cannot hold one train batch ({batch} steps) and one longest "
            f"{what} ({longest} steps) of {row} bytes a step: {need} bytes. Raise it to {need} or more, or "
            f"lower {lower}algorithm.train_batch_size"
        )
    try:
        resolve_model(config.model, spaces.observation.leaves)
    except ConfigError as error:
        found.append(str(error))
    return found
