"""The benchmarks run from end to end and say what they promise to say; how fast anything was is not tested."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEADLINE_S = 240.0
PAGE = "before\n<!-- {0}: begin -->\nold table\n<!-- {0}: end -->\nafter\n"


def run(name, *options):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def measured(name, page):
    page.write_text(PAGE.format(name))
    done = run(name, "--seconds", "0.1", "--rounds", "1", "--json", "--write", str(page))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["benchmark"] == name
    assert document["machine"]["cpus"] >= 1
    assert set(document["load"]) == {"before", "after", "others_cpus"}
    text = page.read_text()
    assert text.startswith(f"before\n<!-- {name}: begin -->\n| ")
    assert text.endswith(f"\n<!-- {name}: end -->\nafter\n")
    assert "old table" not in text
    return document, text


def test_serving_measures_ours_next_to_bare(tmp_path):
    document, text = measured("serving", tmp_path / "page.md")
    rows = {(r["game"].split(",")[0], r["clients"], r["client"]): r for r in document["rows"]}
    assert set(rows) == {
        *(("CartPole", n, "load") for n in (1, 4, 16)),
        ("CartPole", 1, "PolicyClient"),
        *(("240×320 frame", n, "load") for n in (1, 4)),
    }
    for (_, _, client), row in rows.items():
        sides = [row["ours"]] if client == "PolicyClient" else [row["ours"], row["bare"]]
        for side in sides:
            assert set(side) == {"requests_per_s", "p50_ms", "p99_ms", "server_cpu_us"}
            assert all(math.isfinite(v) and v >= 0 for v in side.values())
            assert side["requests_per_s"] > 0 and 0 < side["p50_ms"] <= side["p99_ms"]
        if client == "PolicyClient":
            assert row["bare"] == {} and row["ratio"] is None
        else:
            assert row["ratio"] == pytest.approx(row["ours"]["requests_per_s"] / row["bare"]["requests_per_s"])
    assert text.count("\n| ") >= len(rows)


def test_training_measures_the_whole_next_to_its_parts(tmp_path):
    document, text = measured("training", tmp_path / "page.md")
    rows = {r["name"]: r for r in document["rows"]}
    assert list(rows) == ["stepping", "vector", "sampling", "learning", "training"]
    for row in rows.values():
        assert 0 < row["least"] <= row["steps_per_s"] <= row["most"]
        assert row["ratio"] == pytest.approx(rows["stepping"]["cpu_us_per_step"] / row["cpu_us_per_step"])
    assert "learning only" in text


def test_a_page_without_a_place_for_the_table_is_refused_before_measuring(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no markers\n")
    done = run("training", "--write", str(page))
    assert done.returncode == 1
    assert "expected one line '<!-- training: begin -->'" in done.stderr
    assert "round 1" not in done.stderr
    assert page.read_text() == "no markers\n"


def test_an_interrupted_benchmark_leaves_no_process():
    process = subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "serving.py"), "--seconds", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + DEADLINE_S
        children = []
        while len(children) < 6:  # two load clients, a client, a bare server, two workers
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
            children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert "interrupted" in err and "Traceback" not in err and out == ""
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
    finally:
        process.kill()
        process.wait()
