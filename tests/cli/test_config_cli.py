"""`tetherl config`, and what all commands share: exit codes, errors, missing extras."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import tetherl.cli
from tetherl.cli import main
from tetherl.cli.common import nested, print_json, print_table
from tetherl.errors import ConfigError, PlanError, RunError


def test_every_setting_with_its_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("env: CartPole-v1\nalgorithm: {gamma: 0.98}\n")
    assert main(["config", str(path), "seed=5", "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["algorithm.gamma"]["source"] == "file" and rows["algorithm.gamma"]["default"] == 0.99
    assert rows["seed"]["source"] == "command line" and rows["seed"]["value"] == 5
    assert rows["algorithm.epochs"]["source"].startswith("derived: ")
    assert rows["algorithm.epochs"]["meaning"] == "passes over each sample batch"


def test_the_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--env", "CartPole-v1", "algorithm.lr=1e-4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["setting", "value", "default", "from", "meaning"]
    (lr,) = [line for line in lines if line.startswith("algorithm.lr ")]
    assert "0.0001" in lr and "derived" in lr and "command line" in lr and "learning rate" in lr


def test_a_terminal_gets_a_rich_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_table(("a", "b"), [("[red]x", "y")])
    out = capsys.readouterr().out
    assert "[red]x" in out and "━" in out


def test_env_with_a_file_that_has_clients_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("external: {observation_space: {type: Discrete, n: 2}, action_space: {type: Discrete, n: 2}}\n")
    assert main(["config", str(path), "--env", "CartPole-v1"]) == 2
    assert "both are set" in capsys.readouterr().err
    assert main(["config", str(path), "--env", "CartPole-v1", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "ConfigError"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Puts a command of the test's own in the place of `tetherl config`."""

    def install(run: Callable[[argparse.Namespace], int]) -> None:
        module = types.ModuleType("tetherl.cli.config")
        module.add_parser = lambda commands: commands.add_parser("config")  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tetherl.cli.config", module)

    return install


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("bad"), 2, "tetherl: bad"),
        (PlanError("too big"), 3, "tetherl: too big"),
        (RunError("gone"), 1, "tetherl: gone"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"), 1, "pip install 'tetherl[train]'"),
        (ModuleNotFoundError("No module named 'ray'", name="ray"), 1, "pip install 'tetherl[ray]'"),
    ],
)
def test_exit_codes(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str], error: BaseException, code: int, text: str
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    command(run)
    assert main(["config"]) == code
    out, err = capsys.readouterr()
    assert text in err and out == "" and "Traceback" not in err


def test_a_module_of_the_user_that_is_missing_is_not_called_an_extra(command: Callable[..., None]) -> None:
    def run(args: argparse.Namespace) -> int:
        importlib.import_module("a_module_that_is_not_there")
        return 0

    command(run)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        main(["config"])


def test_a_reader_that_has_seen_enough_causes_no_traceback() -> None:
    code = "from tetherl.cli import main; raise SystemExit(main(['config', '--env', 'CartPole-v1']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=120)
    assert "Traceback" not in err


def test_nested_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert nested({"a": 1, "steps/dropped/stale": 2, "steps/received": 3}) == {
        "a": 1,
        "steps": {"dropped": {"stale": 2}, "received": 3},
    }
    print_json({"bound": float("inf"), "list": [float("nan"), 1.5]})
    assert json.loads(capsys.readouterr().out) == {"bound": "inf", "list": ["nan", 1.5]}


def test_only_the_command_that_is_called_is_imported() -> None:
    code = (
        "import sys; from tetherl.cli import main\n"
        "main(['config', '--help'])\n"
        "others = [m for m in sys.modules if m in ('tetherl.cli.train', 'tetherl.cli.demo', 'yaml', 'torch')]\n"
        "assert not others, others\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.DEVNULL)
    assert tetherl.cli.EXTRAS["torch"] == "train"
