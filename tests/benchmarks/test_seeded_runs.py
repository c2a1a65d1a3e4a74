"""The scripts that repeat runs with several seeds: what they keep, what they run, what they write."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    """The scripts' own folder is on the path, also in the processes they start."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]))
    yield
    for name in ("common", "seeds", "anchors", "lag"):
        sys.modules.pop(name, None)


def small(name: str, seed: int, directory: Path, **stop):
    """The anchor's job with a training of hardly any steps."""
    import anchors
    from seeds import Job

    job = anchors.job(name, seed, directory)
    return Job(name, seed, job.settings | {"file": job.settings["file"] | {"stop": stop}}, directory)


def test_only_what_is_missing_is_run_and_a_failure_stops_no_other_run(tmp_path):
    import anchors
    import seeds

    jobs = [small("cartpole", seed, tmp_path, env_steps=256) for seed in (0, 1)]
    broken = small("cartpole", 2, tmp_path, env_steps=-1)
    path = tmp_path / "results.json"
    failures = seeds.fill([*jobs, broken], seeds.Results(path), anchors.train, workers=2)
    assert len(failures) == 1 and failures[0].startswith("cartpole/2: ConfigError: stop.env_steps")
    found = [seeds.Results(path).get(job) for job in jobs]
    assert all(256 <= r["env_steps"] < 512 for r in found) and found[0]["greedy"] != found[1]["greedy"]
    assert all(len(r["greedy"]) == len(r["sampled"]) == seeds.EPISODES for r in found)

    def never(job):
        raise AssertionError(f"{job.key} was run again")

    assert seeds.fill(jobs, seeds.Results(path), never, workers=1) == []
    other = small("cartpole", 0, tmp_path, env_steps=512)
    assert seeds.Results(path).get(other) is None  # other settings, other run


@pytest.mark.timeout(300)
def test_external_clients_play_with_a_policy_four_versions_late(tmp_path):
    import anchors

    result = anchors.train(small("cartpole_external", 0, tmp_path, iterations=8))
    assert result["env_steps"] >= 8 * 512 and len(result["greedy"]) == 20
    assert result["lag_mean"] >= (0 + 1 + 2 + 3 + 4 * 4) / 8


def test_the_table_of_anchors_and_the_page(tmp_path, monkeypatch, capsys):
    import anchors
    import seeds

    results = seeds.Results(tmp_path / "results.json")
    base = {"date": "2026-01-01", "training": 400.0, "env_steps": 100_096, "wall_s": 60.0, "lag_mean": 4.5, "stale": 10}
    for name in anchors.ANCHORS:
        for seed, score in enumerate((500.0, 474.0, 500.0)):
            scores = {"greedy": [score] * 20, "sampled": [0.5] * 20}
            results.put(anchors.job(name, seed, tmp_path), base | scores)
    page = tmp_path / "results.md"
    page.write_text("before\n<!-- anchors: begin -->\nold\n<!-- anchors: end -->\nafter\n")
    words = ["anchors.py", "--dir", str(tmp_path), "--write", str(page), "--json", "--only", "cartpole"]
    monkeypatch.setattr(sys, "argv", words)
    assert anchors.main() == 0
    document = json.loads(capsys.readouterr().out)
    assert [r["seed"] for r in document["anchors"]["cartpole"]] == [0, 1, 2]
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    [line] = [line for line in text.splitlines() if line.startswith("| CartPole-v1 ")]
    assert "474.0 (0.500, 400.0)" not in line and "474.0 (0.5, 400.0)" in line and "passed, 2 of 3" in line
    [line] = [line for line in text.splitlines() if "must fail" in line and line.startswith("|")]
    assert "missed, 0 of 3" in line
    # What was asked for decides the exit code.
    words = ["anchors.py", "--dir", str(tmp_path), "--only", "cartpole_no_velocity_feed_forward"]
    monkeypatch.setattr(sys, "argv", words)
    assert anchors.main() == 1


def test_the_table_of_lags(tmp_path, monkeypatch, capsys):
    import lag
    import seeds

    assert len(lag.names()) == 18
    results = seeds.Results(tmp_path / "results.json")
    for name in lag.names():
        for seed in (0, 1, 2):
            result = {"date": "2026-01-01", "training": 300.0 + seed, "greedy": -200.0, "fell": seed == 2}
            results.put(lag.job(name, seed, tmp_path), result)
    monkeypatch.setattr(sys, "argv", ["lag.py", "--dir", str(tmp_path)])
    assert lag.main() == 1  # two criteria, one missed
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if line.startswith("| decoupled")]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[1:4] == ["as PPO", "300, 301, 302↓", "300, 301, 302↓"] and cells[-1] == "−200, −200, −200↓"
    assert "`cartpole-lag_scaled-16`: training at least 350; 0 of 3 reach it." in out


def test_a_fall_is_a_loss_of_more_than_a_third(monkeypatch):
    from types import SimpleNamespace

    import lag

    def fell(*returns, full=True):
        curve = lag.Curve()
        for value in returns:
            curve.on_iteration(SimpleNamespace(tracker=SimpleNamespace(full=full)), {"episode_return_mean": value})
        return curve.fell

    assert fell(30, 300, 190) and not fell(30, 300, 210, 290)
    assert fell(-1500, -300, -450) and not fell(-1500, -300, -390)
    assert not fell(300, 30, full=False)


@pytest.mark.parametrize("name", ["cartpole", "pendulum"])
def test_the_lag_jobs_are_valid_runs(name, tmp_path):
    import lag

    from tetherl.config import RunConfig

    for job in [lag.job(n, 0, tmp_path) for n in lag.names() if n.startswith(name)]:
        RunConfig.from_dict(job.settings | {"name": job.run_name})
