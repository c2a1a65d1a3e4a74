"""RunDirectory: names, finding, configuration, summaries, and what importing it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tetherl.errors import CheckpointError, RunError
from tetherl.runs import RunDirectory, list_runs


def test_a_run_is_made_and_opened_again(tmp_path):
    with RunDirectory.open(tmp_path / "runs", "doom-1") as run:
        assert run.path == tmp_path / "runs" / "doom-1"
        assert not run.existed
        run.write_config({"name": "doom-1"})
        run.metrics.append({"iteration": 1})
        run.events.append("started")
        run.checkpoints.save(1, {"w": np.ones(2)}, {})
    assert sorted(os.listdir(run.path)) == [
        "checkpoints",
        "config.yaml",
        "events.jsonl",
        "lock",
        "metrics.jsonl",
    ]
    with RunDirectory.open(tmp_path / "runs", "doom-1") as run:
        assert run.existed
        assert run.read_config() == {"name": "doom-1"}
        assert run.checkpoints.load().iteration == 1
    run.close()


@pytest.mark.parametrize("name", ["", " ", ".", "..", "a/b", "../a", "/a", "a\\b", "a\0", "C:x", ".x", "x.", "é" * 150])
def test_names_that_are_no_folder_name_are_refused(tmp_path, name):
    with pytest.raises(RunError, match="cannot be the name of a run"):
        RunDirectory.open(tmp_path, name)
    with pytest.raises(RunError, match="cannot be the name of a run"):
        RunDirectory.read(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_working_directory_may_change_during_the_run(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with RunDirectory.open("runs", "doom") as run:
        monkeypatch.chdir(tmp_path / "elsewhere")
        run.metrics.append({"iteration": 1})
        run.checkpoints.save(1, {}, {})
    assert os.listdir(tmp_path / "elsewhere") == []
    assert RunDirectory.read(tmp_path / "runs", "doom").checkpoints.load().iteration == 1


@pytest.mark.parametrize("name", ["doom", "CartPole-v1 2026-03-01 14.05", "Überlauf", "a..b", "x" * 200])
def test_ordinary_names_are_fine(tmp_path, name):
    RunDirectory.open(tmp_path, name).close()
    assert RunDirectory.read(tmp_path, name).name == name


def test_run_that_cannot_be_made_says_why(tmp_path):
    (tmp_path / "doom").write_text("a file")
    with pytest.raises(RunError, match="runs_dir"):
        RunDirectory.open(tmp_path, "doom")


def test_reading_takes_no_lock_and_writes_nothing(tmp_path):
    with RunDirectory.open(tmp_path, "doom") as run:
        run.metrics.append({"iteration": 1})
        before = sorted(os.listdir(run.path))
        reader = RunDirectory.read(tmp_path, "doom")
        assert reader.metrics.read() == [{"iteration": 1}]
        assert reader.existed
        for write in (
            lambda: reader.metrics.append({}),
            lambda: reader.events.append("x"),
            lambda: reader.checkpoints.save(1, {}, {}),
            lambda: reader.write_config({}),
        ):
            with pytest.raises(RunError, match="reading only"):
                write()
        assert sorted(os.listdir(run.path)) == before


def test_find_by_name_and_by_path(tmp_path, monkeypatch):
    RunDirectory.open(tmp_path / "runs", "doom").close()
    monkeypatch.chdir(tmp_path)
    for run in ("doom", "runs/doom", Path("runs") / "doom", tmp_path / "runs" / "doom", "runs/doom/"):
        assert RunDirectory.find(run).path == tmp_path / "runs" / "doom"
    monkeypatch.chdir(tmp_path / "runs" / "doom")
    assert RunDirectory.find(".", root=tmp_path / "elsewhere").name == "doom"


def test_missing_run_offers_the_nearest_names(tmp_path):
    for name in ("doom-ppo", "doom-ppo-2", "cartpole"):
        RunDirectory.open(tmp_path, name).close()
    with pytest.raises(RunError, match=r"no run 'dom-ppo' in .*; there is 'doom-ppo', 'doom-ppo-2'$"):
        RunDirectory.read(tmp_path, "dom-ppo")
    with pytest.raises(RunError, match=r"no run 'zzz'.*'cartpole', 'doom-ppo', 'doom-ppo-2'$"):
        RunDirectory.find("zzz", tmp_path)
    with pytest.raises(RunError, match="check runs_dir"):
        RunDirectory.find("zzz", tmp_path / "nowhere")
    assert not (tmp_path / "dom-ppo").exists()


def test_config_comes_back_equal(tmp_path):
    shared = [32, [5, 5], 3]
    config = {
        "name": "doom",
        "lr": 9.0e-5,
        "tiny": 1e-05,
        "huge": float("inf"),
        "interval": "60s",
        "looks like": ["yes", "1e3", "null", "0x1", "2026-03-01", "é\nü", ""],
        "conv_filters": [shared, shared],
        "none": None,
        "flag": True,
        "empty": {},
    }
    with RunDirectory.open(tmp_path, "doom") as run:
        run.write_config(config)
        assert run.read_config() == config
        text = (run.path / "config.yaml").read_text()
        assert "&id" not in text  # a list used twice is written twice
        assert list(run.read_config()) == list(config)
        run.write_config({"name": "other"})
        assert run.read_config() == {"name": "other"}


def test_config_holds_data_only(tmp_path):
    with RunDirectory.open(tmp_path, "doom") as run:
        run.write_config({"name": "doom"})
        with pytest.raises(RunError, match="no plain value"):
            run.write_config({"env": object()})
        assert run.read_config() == {"name": "doom"}
        path = run.path / "config.yaml"
        path.write_text("name: !!python/object/apply:os.system ['touch " + str(tmp_path / "ran") + "']\n")
        with pytest.raises(RunError, match="not plain YAML"):
            run.read_config()
        assert not (tmp_path / "ran").exists()
        path.write_text("- a list\n")
        with pytest.raises(RunError, match="holds a list"):
            run.read_config()
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(RunError, match="not plain YAML"):
            run.read_config()
        path.unlink()
        with pytest.raises(RunError, match="missing"):
            run.read_config()


def test_passed_over_checkpoint_is_an_event_of_the_run(tmp_path):
    with RunDirectory.open(tmp_path, "doom") as run:
        run.checkpoints.save(1, {}, {})
        (run.checkpoints.path / "000002").mkdir()
        assert run.checkpoints.load().iteration == 1
        (event,) = run.events.read()
        assert event["kind"] == "warning"
        assert "000002" in event["message"]


def test_retention_settings_reach_the_store(tmp_path):
    with RunDirectory.open(tmp_path, "doom", keep=1, keep_best=1, mode="min") as run:
        for iteration, score in [(1, 2.0), (2, 1.0), (3, 3.0), (4, 4.0)]:
            run.checkpoints.save(iteration, {}, {}, score=score)
    assert [info.iteration for info in run.checkpoints.list()] == [2, 4]
    assert RunDirectory.read(tmp_path, "doom", mode="min").checkpoints.load("best").iteration == 2
    with pytest.raises(CheckpointError):
        RunDirectory.read(tmp_path, "doom").checkpoints.load(3)


def test_list_runs(tmp_path):
    assert list_runs(tmp_path / "none") == []
    with RunDirectory.open(tmp_path, "b") as run:
        for iteration, value in [(1, None), (2, 5.0), (3, 9.0), (4, 7.0), (5, float("nan"))]:
            run.metrics.append({"iteration": iteration, "env_steps": iteration * 100, "episode_return_mean": value})
        run.checkpoints.save(4, {}, {})
    RunDirectory.open(tmp_path, "a").close()
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").write_text("")
    first, second = list_runs(tmp_path)
    assert (first.name, first.iterations, first.best_return, first.last_checkpoint) == ("a", 0, None, None)
    assert (second.name, second.iterations, second.env_steps, second.last_checkpoint) == ("b", 5, 500, 4)
    assert (second.episode_return_mean, second.best_return) == (7.0, 9.0)


def test_reading_a_run_needs_no_heavy_import(tmp_path):
    with RunDirectory.open(tmp_path, "doom") as run:
        run.metrics.append({"iteration": 1})
        run.events.append("started")
    program = f"""
import sys
from tetherl.runs import RunDirectory, describe, list_runs
run = RunDirectory.read({str(tmp_path)!r}, "doom")
assert run.metrics.read() and describe(run.events.read()[0]) and list_runs({str(tmp_path)!r})
heavy = {{"torch", "gymnasium", "yaml", "safetensors", "aiohttp", "ray"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
