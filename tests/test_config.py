"""RunConfig: one object from YAML, command line and Python; errors that name the mend; derived settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
import yaml

from tetherl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    ExternalConfig,
    LearnersConfig,
    MachineConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    StopConfig,
    describe,
)
from tetherl.config_rules import DERIVED
from tetherl.errors import ConfigError, MissingExtraError

VECTOR = {"type": "Box", "low": -1, "high": 1, "shape": [4]}
IMAGE = {"type": "Box", "low": 0, "high": 255, "shape": [240, 320, 1], "dtype": "uint8"}
EXTERNAL = {"observation_space": IMAGE, "action_space": {"type": "MultiDiscrete", "nvec": [2] * 9}}


class ImageEnv(gymnasium.Env):
    """84 x 84 images, three actions."""

    def __init__(self, size: int = 84) -> None:
        sys.stdout.write("hello from the environment")
        self.observation_space = gymnasium.spaces.Box(0, 255, (size, size, 1), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)


def external(**more: Any) -> dict[str, Any]:
    return {"external": {**EXTERNAL, **more}}


def test_yaml_command_line_and_python_give_the_same_object(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("env: CartPole-v1\nalgorithm: {lr: [[0, 1e-3], [5000, 0]], gamma: 0.98}\nstop: {env_steps: 5000}\n")
    from_yaml = RunConfig.load(path)
    from_line = RunConfig.load(
        None,
        ["env=CartPole-v1", "algorithm.lr=[[0, 1e-3], [5000, 0]]", "algorithm.gamma=0.98", "stop={env_steps: 5000}"],
    )
    from_structs = RunConfig(
        env="CartPole-v1",
        algorithm=AlgorithmConfig(lr=[(0, 0.001), (5000, 0)], gamma=0.98),
        stop=StopConfig(env_steps=5000),
    )
    from_maps = RunConfig(
        env="CartPole-v1", algorithm={"lr": [[0, 1e-3], [5000, 0]], "gamma": 0.98}, stop={"env_steps": 5000}
    )
    assert from_yaml == from_line == from_structs == from_maps
    assert from_yaml.algorithm.lr == [(0.0, 0.001), (5000.0, 0.0)]
    assert from_yaml != RunConfig.load(path, ["algorithm.gamma=0.97"])


@pytest.mark.parametrize("text", ["9e-5", "9.0e-5", "0.9E-4", ".9e-4", "+9e-5", '"9e-5"', "0.00009"])
def test_every_way_to_write_a_small_number_is_a_number(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"env: CartPole-v1\nalgorithm:\n  lr: {text}\n  train_batch_size: 1e4\n")
    config = RunConfig.load(path)
    assert config.algorithm.lr == pytest.approx(9e-5)
    assert config.algorithm.train_batch_size == 10_000
    assert isinstance(config.algorithm.train_batch_size, int)


def test_command_line_wins_over_the_file_which_wins_over_the_base(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("env: CartPole-v1\nseed: 2\nrollouts: {workers: 2, fragment_length: 16}\n")
    base = {"seed": 1, "runs_dir": "elsewhere", "rollouts": {"envs_per_worker": 3}}
    config = RunConfig.load(path, ["rollouts.workers=4", "env_config.max_episode_steps=7"], base)
    assert (config.seed, config.runs_dir, config.rollouts.workers) == (2, "elsewhere", 4)
    assert (config.rollouts.envs_per_worker, config.rollouts.fragment_length) == (3, 16)
    assert config.env_config == {"max_episode_steps": 7}
    origin = config.sources
    assert origin["seed"] == "file"
    assert origin["runs_dir"] == origin["rollouts.envs_per_worker"] == "python"
    assert origin["rollouts.workers"] == origin["env_config"] == "command line"
    assert origin["algorithm.gamma"] == "default"
    RunConfig.load(None, ["rollouts.workers=4", "env=CartPole-v1"], base)
    assert base == {"seed": 1, "runs_dir": "elsewhere", "rollouts": {"envs_per_worker": 3}}


def test_a_section_can_be_dropped_and_a_space_replaced_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(external()))
    config = RunConfig.load(path, ["external.observation_space={type: Discrete, n: 3}"])
    assert config.external is not None
    assert config.external.observation_space == {"type": "Discrete", "n": 3}
    assert RunConfig.load(path, ["external=null", "env=CartPole-v1"]) == RunConfig(env="CartPole-v1")


def test_an_empty_section_is_a_section_of_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("env: CartPole-v1\nmodel:\n")
    assert RunConfig.load(path) == RunConfig(env="CartPole-v1")


ENV = {"env": "CartPole-v1"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**ENV, "lr": 0.1}, ["lr: unknown key (value 0.1)", "algorithm.lr?", "Allowed at the top"]),
        ({**ENV, "rollout": {"workers": 2}}, ["rollout.workers: unknown", "(value 2)", "rollouts.workers?"]),
        ({**ENV, "algorithm": {"lambda": 0.9}}, ["algorithm.lambda:", "algorithm.lambda_?", "Allowed in algorithm"]),
        ({**ENV, "algorithm": {"workers": 2}}, ["rollouts.workers or learners.workers"]),
        ({**ENV, "rollouts": {"envs_per_worke": 2}}, ["rollouts.envs_per_worker?"]),
        ({**ENV, "algorithm.lr": 0.1}, ["algorithm: {lr: 0.1}"]),
        ({**ENV, "algorithm": {"lr": "fast"}}, ["algorithm.lr: got 'fast'", "a number or a list", "learning rate"]),
        ({**ENV, "algorithm": {"lr": [[0, 1], [2, "x"]]}}, ["algorithm.lr", "(at [1][1])"]),
        ({**ENV, "algorithm": {"gamma": 1.5}}, ["algorithm.gamma: got 1.5", "> 0 and <= 1"]),
        ({**ENV, "algorithm": {"gamma": float("nan")}}, ["algorithm.gamma: got nan"]),
        ({**ENV, "algorithm": {"clip_max": float("inf")}}, ["algorithm.clip_max: got inf", "finite"]),
        ({**ENV, "algorithm": {"epochs": 0}}, ["algorithm.epochs: got 0", "a whole number >= 1 or null"]),
        ({**ENV, "algorithm": {"epochs": 2.5}}, ["algorithm.epochs: got 2.5"]),
        ({**ENV, "algorithm": {"name": "dqn"}}, ["algorithm.name: got 'dqn'", "one of ppo"]),
        ({**ENV, "model": 3}, ["model: got 3; expected a map with the keys fcnet_hiddens"]),
        ({**ENV, "model": {"fcnet_hiddens": [64, 0]}}, ["model.fcnet_hiddens", "(at [1])"]),
        ({**ENV, "resume": False}, ["resume: got False", "auto"]),
        ({"external": {"port": 70000}}, ["external.port: got 70000", "external.action_space: missing", "3 settings"]),
        ({**ENV, "algorithm": {"lr": [[10, 1], [0, 2]]}}, ["algorithm.lr", "ascending"]),
        ({**ENV, "algorithm": {"lr": -1}}, ["algorithm.lr", "below 0"]),
        ({**ENV, "algorithm": {"clip_param": 0.9}}, ["algorithm.clip_max"]),
        ({**ENV, "algorithm": {"reward_scaling": True, "reward_clip": 5}}, ["algorithm.reward_clip", "reward_scaling"]),
        (
            {"external": EXTERNAL, "algorithm": {"reward_scaling": True}},
            ["algorithm.reward_scaling", "external", "algorithm.normalize_values"],
        ),
        (
            {"external": EXTERNAL, "rollouts": {"vectorization": "sync"}},
            ["rollouts.vectorization", "external", "leave it out"],
        ),
        ({**ENV, "name": "a/b"}, ["name: 'a/b'"]),
        ({**ENV, "name": ".."}, ["name: '..'"]),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(settings)
    for word in words:
        assert word in str(caught.value)


def test_all_wrong_settings_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match="3 settings are wrong") as caught:
        RunConfig.from_dict({**ENV, "seed": -1, "algorithm": {"gamma": 2, "foo": 1}})
    assert all(key in str(caught.value) for key in ("seed", "algorithm.gamma", "algorithm.foo"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["neither", "set env"]),
        ({**ENV, **external()}, ["both", "evaluation.env"]),
        ({"env": 3}, ["env: got 3"]),
        ({**external(), "env_config": {"a": 1}}, ["env_config", "external.env_config"]),
        ({**ENV, "evaluation": {"workers": 2}}, ["evaluation.workers", "evaluation.interval"]),
        ({**ENV, "evaluation": {"interval": 1, "env_config": {"a": 1}}}, ["evaluation.env_config"]),
        ({**external(), "evaluation": {"interval": 5}}, ["evaluation.interval", "set evaluation.env"]),
        (
            {**ENV, "algorithm": {"gpus": 0.25}, "learners": {"workers": 1}, "rollouts": {"workers": 2}},
            ["algorithm.gpus", "algorithm.gpus to 0", "learners.workers to 0"],
        ),
        ({**ENV, "learners": {"cpus_per_worker": 2}}, ["learners.cpus_per_worker", "learners.workers is 0"]),
        ({**ENV, "learners": {"gpus_per_worker": 0.5}}, ["learners.gpus_per_worker", "algorithm.gpus"]),
        ({**ENV, "rollouts": {"gpus_per_worker": 0.5}}, ["rollouts.gpus_per_worker"]),
        ({**external(), "rollouts": {"workers": 0}}, ["rollouts.workers", "hold"]),
        ({**external(during_learning="discard"), "rollouts": {"workers": 0}}, ["rollouts.workers", "hold"]),
        ({**external(), "rollouts": {"envs_per_worker": 4}}, ["rollouts.envs_per_worker"]),
        ({**ENV, "algorithm": {"train_batch_size": 100, "minibatch_size": 200}}, ["algorithm.minibatch_size"]),
        ({**ENV, "model": {"lstm_cell_size": 64}}, ["model.lstm_cell_size", "model.rnn"]),
        ({**ENV, "algorithm": {"loss": "plain", "lag_factor": 0.1}}, ["algorithm.lag_factor", "loss to lag_scaled"]),
        ({**ENV, "algorithm": {"loss": "decoupled", "clip_max": 0.5}}, ["algorithm.clip_max", "decoupled"]),
        ({**ENV, "algorithm": {"weight_cap": 5}}, ["algorithm.weight_cap", "loss to decoupled"]),
        ({**ENV, "algorithm": {"vf_clip_param": 5}}, ["algorithm.vf_clip_param", "clamped_error"]),
        ({**ENV, "algorithm": {"use_kl_loss": False, "kl_measure": "all"}}, ["algorithm.kl_measure", "use_kl_loss"]),
        ({**ENV, "algorithm": {"burn_in": 8}}, ["algorithm.burn_in", "model.use_lstm"]),
        ({**ENV, "algorithm": {"state_source": "stored"}}, ["algorithm.state_source", "model.use_lstm"]),
        (
            {
                **ENV,
                "model": {"use_lstm": True},
                "algorithm": {"state_source": "stored", "state_refresh": "per_epoch"},
            },
            ["algorithm.state_refresh", "recomputed"],
        ),
        ({**ENV, "algorithm": {"epochs": 1, "recompute_advantages": "per_epoch"}}, ["recompute_advantages", "epochs"]),
        ({**ENV, "algorithm": {"minibatch_size": 2}, "learners": {"workers": 3}}, ["learners.workers: 3", "of 2"]),
        ({**ENV, "checkpoint": {"interval": "7 days"}}, ["checkpoint.interval", "60s"]),
        ({**ENV, "checkpoint": {"interval": 0}}, ["checkpoint.interval", "null"]),
        ({**ENV, "device": "cuda"}, ["device", "algorithm.gpus"]),
    ],
)
def test_a_meaningless_combination_is_an_error_with_its_mend(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(settings)
    for word in words:
        assert word in str(caught.value)


def test_combinations_that_do_have_a_meaning_are_allowed() -> None:
    RunConfig.from_dict({**external(during_learning="hold"), "rollouts": {"workers": 0}})
    RunConfig.from_dict({**ENV, "model": {"lstm_use_prev_action": True}})
    RunConfig.from_dict({**external(), "evaluation": {"interval": 5, "env": "CartPole-v1", "workers": 1}})
    RunConfig.from_dict({**ENV, "algorithm": {"gpus": 1}, "learners": {"workers": 1}})  # it samples itself


@pytest.mark.parametrize(
    ("interval", "seconds"), [(5, None), (None, None), ("60s", 60.0), ("5m", 300.0), ("1.5 h", 5400.0)]
)
def test_checkpoint_intervals(interval: Any, seconds: float | None) -> None:
    config = RunConfig(env="CartPole-v1", checkpoint=CheckpointConfig(interval=interval))
    assert config.checkpoint.interval_seconds == seconds


def test_derived_settings_for_vector_observations() -> None:
    config = RunConfig(env="CartPole-v1", stop=StopConfig(env_steps=1000)).resolved()
    algorithm = config.algorithm
    assert (algorithm.train_batch_size, algorithm.minibatch_size, algorithm.epochs) == (1024, 256, 10)
    assert algorithm.lr == [(0.0, 1e-3), (1000.0, 0.0)]
    assert (algorithm.entropy_coeff, algorithm.use_kl_loss, algorithm.normalize_values) == (0.0, False, False)
    assert (algorithm.max_lag, config.rollouts.workers, config.rollouts.envs_per_worker) == (1, 0, 1)
    assert config.model.fcnet_hiddens == [64, 64]
    assert (config.model.vf_share_layers, config.model.lstm_use_prev_action) == (False, False)
    assert config.rollouts.queue_bytes == 64 * 2**20
    assert RunConfig(env="CartPole-v1").resolved().algorithm.lr == 3e-4


def test_derived_settings_with_an_lstm() -> None:
    config = RunConfig(env="CartPole-v1", model=ModelConfig(use_lstm=True)).resolved()
    assert (config.model.vf_share_layers, config.model.lstm_use_prev_action) == (True, True)
    assert config.algorithm.normalize_values is True
    gru = RunConfig(env="CartPole-v1", model=ModelConfig(rnn="gru")).resolved()
    assert (gru.model.vf_share_layers, gru.model.lstm_use_prev_action) == (True, True)
    assert gru.sources["model.lstm_use_prev_action"] == "derived: a GRU"
    scaled = RunConfig(env="CartPole-v1", model=ModelConfig(rnn="gru"), algorithm=AlgorithmConfig(reward_scaling=True))
    assert scaled.resolved().algorithm.normalize_values is False


def test_derived_settings_for_images(capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(env=ImageEnv, env_config={"size": 64}, stop=StopConfig(env_steps=1000)).resolved()
    algorithm = config.algorithm
    assert (algorithm.train_batch_size, algorithm.minibatch_size, algorithm.epochs) == (4096, 512, 4)
    assert (algorithm.lr, algorithm.entropy_coeff, algorithm.use_kl_loss) == (3e-4, 0.005, True)
    assert algorithm.normalize_values is True
    assert config.model.vf_share_layers is True
    assert config.model.fcnet_hiddens is None
    row = 64 * 64 + 8 + 3 * (4 + 1) + 17
    assert config.row_bytes() == row
    assert config.rollouts.queue_bytes == max(64 * 2**20, (2 * 4096 + 128) * row)
    assert capsys.readouterr().out == ""  # what the environment prints does not reach stdout


def test_derived_settings_for_external_clients() -> None:
    config = RunConfig.from_dict(external()).resolved()
    assert config.rollouts.workers == 1
    assert (config.algorithm.train_batch_size, config.algorithm.max_lag) == (4096, 8)
    assert config.algorithm.normalize_values is True
    assert config.external is not None and config.external.max_episode_steps == 100_000
    assert RunConfig.from_dict({**external(), "algorithm": {"lag_factor": 0}}).resolved().algorithm.max_lag == 1
    assert RunConfig.from_dict(external(during_learning="hold")).resolved().algorithm.max_lag == 0
    decoupled = {"algorithm": {"loss": "decoupled"}}
    for source, settings, lag in (
        (external(), {"algorithm": {"loss": "plain"}}, 1),
        (external(), decoupled, 4),
        (ENV, decoupled, 4),
        (external(during_learning="hold"), decoupled, 0),
        (ENV, {"algorithm": {"loss": "lag_scaled"}}, 1),
    ):
        assert RunConfig.from_dict({**source, **settings}).resolved().algorithm.max_lag == lag

    vector = {"external": {"observation_space": VECTOR, "action_space": {"type": "Discrete", "n": 2}}}
    small = RunConfig.from_dict({**vector, "algorithm": {"train_batch_size": 64}, "rollouts": COMPLETE}).resolved()
    assert small.external is not None and small.external.max_episode_steps == 1000
    assert small.algorithm.minibatch_size == 64
    assert small.algorithm.normalize_values is True and small.model.vf_share_layers is False


COMPLETE = {"batch_mode": "complete_episodes"}


def test_the_queue_holds_a_batch_and_the_longest_episode() -> None:
    founding = {**external(), "algorithm": {"train_batch_size": 12_000}, "rollouts": COMPLETE}
    config = RunConfig.from_dict(founding).resolved()
    row = 240 * 320 + 9 * 8 + 18 * (4 + 1) + 17
    assert config.rollouts.queue_bytes == (2 * 12_000 + 12_000) * row

    enough, short = 24_000 * row, 24_000 * row - 1
    founding["rollouts"] = {**COMPLETE, "queue_bytes": enough}
    assert RunConfig.from_dict(founding).resolved().rollouts.queue_bytes == enough
    founding["rollouts"] = {**COMPLETE, "queue_bytes": short}
    with pytest.raises(ConfigError, match=f"rollouts.queue_bytes: {short} cannot hold .* Raise it to {enough}"):
        RunConfig.from_dict(founding).resolved()


def test_what_only_the_spaces_show_to_be_wrong() -> None:
    with pytest.raises(ConfigError, match=r"model\.conv_filters: would do nothing"):
        RunConfig(env="CartPole-v1", model=ModelConfig(conv_filters=[[16, [4, 4], 2]])).resolved()
    with pytest.raises(ConfigError, match=r"model\.fcnet_hiddens: .* would do nothing"):
        RunConfig(env=ImageEnv, model=ModelConfig(fcnet_hiddens=[64])).resolved()
    with pytest.raises(ConfigError, match=r"model\.encoder: would do nothing"):
        RunConfig(env="CartPole-v1", model=ModelConfig(encoder="impala")).resolved()
    with pytest.raises(ConfigError, match=r"model\.normalize_observations: would do nothing"):
        RunConfig(env=ImageEnv, model=ModelConfig(normalize_observations=True)).resolved()
    with pytest.raises(ConfigError, match=r"external\.observation_space"):
        RunConfig.from_dict({"external": {**EXTERNAL, "observation_space": {"type": "Bix"}}}).resolved()
    with pytest.raises(ConfigError, match=r"minibatch_size: 2000 is more than algorithm\.train_batch_size"):
        RunConfig(env="CartPole-v1", algorithm=AlgorithmConfig(minibatch_size=2000)).resolved()


def failing_env() -> gymnasium.Env:
    raise RuntimeError("no display")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("CartPol-v1", ["CartPol-v1", "CartPole"]),
        ("no_such_module:Env", ["no_such_module"]),
        (failing_env, ["failing_env", "RuntimeError: no display"]),
    ],
)
def test_an_environment_that_cannot_be_built_is_a_configuration_error(env: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(env=env).resolved()
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("settings", [ENV, external(), {**ENV, "model": {"use_lstm": True}, "stop": {"env_steps": 9}}])
def test_resolving_twice_changes_nothing(settings: dict[str, Any]) -> None:
    config = RunConfig.from_dict(settings).resolved()
    assert config.resolved() is config
    written = yaml.safe_load(yaml.safe_dump(config.to_dict()))
    again = RunConfig.from_dict(written)
    assert again == config
    assert again.resolved() == config


def test_the_name_is_always_new_and_says_the_environment() -> None:
    first, second = RunConfig(env="ALE/Pong-v5"), RunConfig(env="tests.x:Some_Env")
    with_names = [c.name for c in (RunConfig(env="CartPole-v1").resolved(),)]
    assert with_names[0] is not None and with_names[0].startswith("CartPole-v1-20")
    from tetherl.config_rules import _run_name

    assert _run_name(first).startswith("ALE-Pong-v5-20")
    assert _run_name(second).startswith("Some_Env-20")
    assert RunConfig(env="CartPole-v1", name="mine").resolved().name == "mine"


def test_a_class_is_written_down_by_its_name_and_a_lambda_instance_is_not() -> None:
    assert RunConfig(env=ImageEnv).to_dict()["env"] == f"{ImageEnv.__module__}:ImageEnv"
    with pytest.raises(ConfigError, match=r"env_config\.thing"):
        RunConfig(env="CartPole-v1", env_config={"thing": object()}).to_dict()


def test_values_that_python_callers_hold_become_plain(tmp_path: Path) -> None:
    config = RunConfig(
        external=ExternalConfig(
            observation_space=gymnasium.spaces.Box(-1, 1, (4,)),  # type: ignore[arg-type]
            action_space=gymnasium.spaces.Discrete(2),  # type: ignore[arg-type]
            env_config={"levels": np.arange(3), "pair": (1, 2)},
        ),
        runs_dir=tmp_path,  # type: ignore[arg-type]
        seed=np.int64(3),  # type: ignore[arg-type]
    )
    assert config.external is not None
    assert config.external.action_space["type"] == "Discrete"
    assert (config.runs_dir, config.seed) == (str(tmp_path), 3)
    assert config.to_dict()["external"]["env_config"] == {"levels": [0, 1, 2], "pair": [1, 2]}


def test_sections_are_checked_when_they_come_as_structs() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.gamma: got 2"):
        RunConfig(env="CartPole-v1", algorithm=AlgorithmConfig(gamma=2))
    with pytest.raises(ConfigError, match=r"rollouts\.workers: got -1"):
        RunConfig(env="CartPole-v1", rollouts=RolloutConfig(workers=-1))


def test_a_configuration_cannot_be_changed() -> None:
    config = RunConfig(env="CartPole-v1")
    with pytest.raises(AttributeError):
        config.seed = 1  # type: ignore[misc]


def test_describe_tells_value_default_source_and_meaning_of_every_setting(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("env: CartPole-v1\nalgorithm: {gamma: 0.98}\n")
    rows = {row.key: row for row in describe(RunConfig.load(path, ["seed=3"]).resolved())}
    assert rows["algorithm.gamma"][1:4] == (0.98, 0.99, "file")
    assert rows["seed"][1:4] == (3, 0, "command line")
    assert rows["algorithm.lambda_"][1:4] == (0.95, 0.95, "default")
    assert rows["algorithm.train_batch_size"].value == 1024
    assert rows["algorithm.train_batch_size"].default == "derived"
    assert rows["algorithm.train_batch_size"].source == "derived: vector observations"
    assert all(row.meaning for row in rows.values())
    assert not any(key.startswith("external.") for key in rows)
    assert "external.port" in {row.key for row in describe(RunConfig.from_dict(external()))}


def test_the_list_of_derived_settings_is_the_truth() -> None:
    found = set()
    for settings in (ENV, external()):
        config = RunConfig.from_dict(settings)
        found |= {key for key, source in config.resolved().sources.items() if source.startswith("derived")}
    found.add("model.fcnet_hiddens")
    assert found == DERIVED


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1\n- 2\n", ["expected a map", "[1, 2]"]),
        ("env: [\n", ["not valid YAML"]),
        ("env: CartPole-v1\nseed: 1\nseed: 2\n", ["seed", "lines 2 and 3"]),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(path)
    assert all(word in str(caught.value) for word in [*words, "config.yaml"])


@pytest.mark.parametrize(
    ("override", "words"),
    [("algorithm.lr", ["key=value"]), ("seed.x=1", ["seed is 0"]), ("env=[", ["not valid YAML", "env=["])],
)
def test_an_override_that_is_none(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(None, [override], {"env": "CartPole-v1", "seed": 0})
    assert all(word in str(caught.value) for word in words)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        RunConfig.load("nowhere.yaml")


def test_every_section_is_a_type_that_msgspec_knows() -> None:
    """Constraints sit where msgspec can apply them, so that any code may convert a section."""
    for cls in (
        *(AlgorithmConfig, CheckpointConfig, EvaluationConfig, LearnersConfig, MachineConfig),
        *(ModelConfig, RolloutConfig, StopConfig),
    ):
        assert msgspec.convert({}, cls) == cls()


def test_without_yaml_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from tetherl import config_sources

    config_sources._loader.cache_clear()
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match=r"tetherl\[train\]"):
        RunConfig.load(None, ["seed=1"])
    config_sources._loader.cache_clear()


def test_planning_and_the_public_names_need_no_torch() -> None:
    code = (
        "import sys, tetherl\n"
        "config = tetherl.RunConfig(env='CartPole-v1').resolved()\n"
        "tetherl.ResourcePlan.for_this_machine(config)\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "assert 'RunConfig' in dir(tetherl)\n"
        "try: tetherl.Nothing\n"
        "except AttributeError as error: assert 'Nothing' in str(error)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": {"use_kl_loss": False, "kl_coeff": 0.5}}, "algorithm.kl_coeff"),
        ({"algorithm": {"use_kl_loss": True, "kl_coeff": 0}}, "can never grow"),
        ({"algorithm": {"vf_loss_coeff": 0, "vf_clip": "clipped_value"}}, "algorithm.vf_clip"),
        ({"algorithm": {"clip_param": [[0, 2.0], [10, 0.1]], "clip_max": 0.5}}, "algorithm.clip_max"),
    ],
)
def test_more_settings_that_would_do_nothing(settings, words):
    base = {"env": "CartPole-v1"}
    if words == "algorithm.clip_max":
        bit = {"type": "Discrete", "n": 2}
        base = {"external": {"observation_space": bit, "action_space": bit}}
    with pytest.raises(ConfigError, match=words):
        RunConfig.from_dict({**base, **settings}).resolved()
