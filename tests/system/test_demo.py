"""The demo, cut short: five client processes, the document, the verdict. Its full length is a slow test."""

from __future__ import annotations

import json

import pytest

from tetherl.cli import demo, main


def balanced(facts: dict) -> bool:
    steps = facts["steps"]
    return steps["received"] == steps["trained"] + sum(steps["dropped"].values()) + steps["pending"]


def check_document(facts: dict) -> None:
    assert balanced(facts) and facts["steps"]["balanced"]
    assert sum(w["clients"] for w in facts["workers"]) == 5
    assert sorted(w["clients"] for w in facts["workers"]) == [2, 3]
    assert sum(w["share"] for w in facts["workers"]) == pytest.approx(1.0)
    assert [c["exit_code"] for c in facts["clients"]] == [0] * 5
    learning = facts["while_learning"]
    assert learning["steps_arrived"] == learning["trained"] + sum(learning["dropped"].values()) + learning["pending"]
    assert learning["steps_arrived"] > 0 and learning["actions_answered"] > 0
    assert 0 < learning["queue_peak_bytes"] <= learning["queue_max_bytes"]
    assert learning["lag_max"] >= 1
    assert facts["evaluation"]["episodes"] == 20 and len(facts["evaluation"]["returns"]) == 20
    assert {row["role"] for row in facts["plan"]["rows"]} == {"algorithm", "rollout", "evaluation"}
    assert facts["curve"] and facts["seconds"] > 0


@pytest.mark.parametrize(("enough", "code"), [(0, 0), (501, 1)])
def test_a_short_demo_reports_and_judges(tmp_path, monkeypatch, capsys, enough, code):
    monkeypatch.setattr(demo, "TARGET_RETURN", 40)
    monkeypatch.setattr(demo, "PASS_RETURN", enough)
    assert main(["demo", "--json", "--runs-dir", str(tmp_path)]) == code
    facts = json.loads(capsys.readouterr().out)
    check_document(facts)
    assert bool(facts["problems"]) == bool(code)


@pytest.mark.slow
def test_the_whole_demo_solves_cartpole(tmp_path, kit):
    done = kit.tetherl("demo", "--json", "--runs-dir", str(tmp_path), timeout=400)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    check_document(facts)
    assert facts["evaluation"]["episode_return_mean"] >= 450
    text = kit.tetherl("demo", "--runs-dir", str(tmp_path), timeout=400)
    assert text.returncode == 0, text.stderr
    assert "Every step is accounted for" in text.stdout and "Try next" in text.stdout


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_cartpole_example_reaches_475_in_two_of_three_seeds(tmp_path, kit):
    scores = []
    for seed in (0, 1, 2):
        args = ["train", "examples/cartpole/ppo.yaml", f"seed={seed}", f"name=s{seed}", f"runs_dir={tmp_path}"]
        done = kit.tetherl(*args, timeout=900)
        assert done.returncode == 0, done.stderr
        evaluated = kit.tetherl("evaluate", f"s{seed}", "--runs-dir", str(tmp_path), "--episodes", "20", "--json")
        scores.append(json.loads(evaluated.stdout)["episode_return_mean"])
    assert sum(score >= 475 for score in scores) >= 2, scores
