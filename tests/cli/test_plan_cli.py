"""`tetherl plan`: one document, exit codes 0, 2 and 3."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tetherl.cli import COMMANDS, main

FOUNDING = """
name: doom
external:
  observation_space: {type: Box, low: 0, high: 255, shape: [240, 320, 1], dtype: uint8}
  action_space: {type: MultiDiscrete, nvec: [2, 2, 2, 2, 2, 2, 2, 2, 2]}
  during_learning: keep
algorithm: {name: ppo, gamma: 0.998, lambda_: 0.99, train_batch_size: 12000, minibatch_size: 512, epochs: 7, lr: 9e-5}
model: {conv_filters: [[16, [5, 5], 3], [32, [5, 5], 3]], use_lstm: true, lstm_cell_size: 128, max_seq_len: 32}
rollouts: {workers: 2, cpus_per_worker: 2, gpus_per_worker: 0.25, batch_mode: complete_episodes}
learners: {workers: 1, cpus_per_worker: 2, gpus_per_worker: 0.5}
checkpoint: {interval: 5, keep: 3, score: episode_return_mean, at_end: true}
"""


@pytest.fixture
def founding(tmp_path: Path) -> str:
    path = tmp_path / "doom.yaml"
    path.write_text(FOUNDING)
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = main(["plan", *arguments, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_a_plan_that_fits(capsys: pytest.CaptureFixture[str], founding: str) -> None:
    code, document, _ = plan(capsys, founding, "--machine", "cpus=9,gpus=1")
    assert code == 0 and document["fits"] is True
    assert (document["total"]["cpus"], document["total"]["gpus"]) == (7, 1)
    assert [row["role"] for row in document["rows"]] == ["algorithm", "rollout", "learner"]
    assert document["machine"] == {"cpus": 9, "gpus": 1, "memory": None}
    assert {row["device"] for row in document["rows"]} == {"cpu", "cuda:0"}
    assert document["problems"] == [] and document["warnings"] == []


def test_settings_may_stand_before_between_and_behind_options(
    capsys: pytest.CaptureFixture[str], founding: str
) -> None:
    code, document, _ = plan(
        capsys, "rollouts.workers=4", founding, "--machine", "cpus=9,gpus=2", "rollouts.cpus_per_worker=1"
    )
    assert code == 0 and document["total"]["cpus"] == 7


def test_case_044_a_plan_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, document, _ = plan(
        capsys,
        *("--env", "CartPole-v1", "--machine", "cpus=9,gpus=1"),
        *("rollouts.workers=8", "rollouts.gpus_per_worker=0.125", "algorithm.gpus=1"),
    )
    assert code == 3 and document["fits"] is False
    assert (document["total"]["cpus"], document["total"]["gpus"]) == (9, 2)
    assert "algorithm.gpus" in document["problems"][0]


def test_cpus_that_were_not_set_only_warn(capsys: pytest.CaptureFixture[str]) -> None:
    code, document, _ = plan(capsys, "--env", "CartPole-v1", "rollouts.workers=4000", "machine.memory=1e15")
    assert code == 0 and document["fits"] is True
    assert "4001 CPUs" in document["warnings"][0]
    code, document, _ = plan(
        capsys, "--env", "CartPole-v1", "rollouts.workers=4", "machine.cpus=2", "machine.memory=1e15"
    )
    assert code == 3 and "machine.cpus" in document["problems"][0]


def test_memory_is_checked(capsys: pytest.CaptureFixture[str], founding: str) -> None:
    code, document, _ = plan(capsys, founding, "--machine", "cpus=9,gpus=1,memory=4e9")
    assert code == 3 and document["problems"][0].startswith("memory:")


def test_a_bad_configuration_is_a_document_too(capsys: pytest.CaptureFixture[str], founding: str) -> None:
    code, document, err = plan(capsys, founding, "rollout.workers=3")
    assert code == 2 and document["fits"] is False and document["rows"] == []
    assert "did you mean rollouts.workers?" in document["problems"][0]
    assert "rollouts.workers" in err
    code, document, _ = plan(capsys, founding, "algorithm.gpus=0.25")
    assert code == 2 and "algorithm.gpus" in document["problems"][0]


@pytest.mark.parametrize("machine", ["cpus", "cpus=x", "gpu=1", "gpus=-1", "memory=0"])
def test_a_bad_machine_is_named(capsys: pytest.CaptureFixture[str], machine: str) -> None:
    code, document, _ = plan(capsys, "--env", "CartPole-v1", "--machine", machine)
    assert code == 2 and machine in document["problems"][0]


def test_the_text_for_people(capsys: pytest.CaptureFixture[str], founding: str) -> None:
    assert main(["plan", founding, "--machine", "cpus=9,gpus=1"]) == 0
    out = capsys.readouterr().out
    assert "algorithm 1 × 1 + rollout 2 × 2 + learner 1 × 2 = 7" in out
    assert "Why: rollouts.workers is 2" in out and "The plan fits." in out
    assert main(["plan", founding, "--machine", "cpus=9,gpus=0"]) == 3
    assert "problem: GPUs: the plan needs 1" in capsys.readouterr().out


def test_usage_errors_are_exit_code_2(capsys: pytest.CaptureFixture[str], founding: str) -> None:
    assert main(["plan"]) == 2
    assert "give a CONFIG.yaml" in capsys.readouterr().err
    assert main(["plan", founding, founding]) == 2
    assert "one configuration file" in capsys.readouterr().err
    assert main(["plan", founding, "--nonsense"]) == 2
    assert "--nonsense" in capsys.readouterr().err
    assert main(["nonsense"]) == 2


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tetherl ")


NOISY = """
import os, sys
import gymnasium
class Env(gymnasium.Env):
    def __init__(self):
        print("noise of the environment")
        os.write(1, b"noise of a C library\\n")
        self.observation_space = gymnasium.spaces.Box(-1, 1, (3,))
        self.action_space = gymnasium.spaces.Discrete(2)
"""


def test_stdout_is_one_document_whatever_the_environment_prints(tmp_path: Path) -> None:
    (tmp_path / "noisy_env_module.py").write_text(NOISY)
    for command in ("plan", "config"):
        done = subprocess.run(
            [sys.executable, "-m", "tetherl", command, "--env", "noisy_env_module:Env", "--json"],
            capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)
        assert "noise of the environment" in done.stderr and "noise of a C library" in done.stderr


def test_planning_leaves_nothing_behind_and_needs_no_torch(tmp_path: Path, founding: str) -> None:
    code = (
        "import sys; from tetherl.cli import main\n"
        f"assert main(['plan', {founding!r}, '--machine', 'cpus=9,gpus=1']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["doom.yaml"]
