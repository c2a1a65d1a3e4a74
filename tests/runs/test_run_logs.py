"""metrics.jsonl and events.jsonl: what is written, what a killed writer leaves, cutting back on resume."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from tetherl.errors import RunError
from tetherl.runs import EventLog, MetricsLog, describe


def lines(path: Path) -> list[dict]:
    """Every line must be JSON in the strict sense: no NaN, no torn rest."""

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_metrics_are_one_line_each_and_readable_at_once(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.read() == []
    log.append({"iteration": 1, "env_steps": 4000, "learner/kl": 0.1 + 0.2})
    assert lines(log.path) == [{"iteration": 1, "env_steps": 4000, "learner/kl": 0.1 + 0.2}]
    log.append({"iteration": 2})
    assert [record["iteration"] for record in MetricsLog(log.path, read_only=True).read()] == [1, 2]


def test_metric_values_become_plain_json(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(
        {
            "nan": math.nan,
            "inf": -math.inf,
            "np_nan": np.float32("nan"),
            "f32": np.float32(0.5),
            "i64": np.int64(2**62),
            "flag": np.bool_(True),
            "zero_d": np.array(3),
            "nested": {"a": [1, np.inf], 7: (True, None, "x")},
        }
    )
    assert lines(log.path) == [
        {
            "nan": None,
            "inf": None,
            "np_nan": None,
            "f32": 0.5,
            "i64": 2**62,
            "flag": True,
            "zero_d": 3,
            "nested": {"a": [1, None], "7": [True, None, "x"]},
        }
    ]


def test_metric_that_json_cannot_hold_is_named_and_writes_nothing(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"iteration": 1})
    with pytest.raises(RunError, match=r"metric 'bad'\['x'\] is a object"):
        log.append({"iteration": 2, "bad": {"x": object()}})
    assert lines(log.path) == [{"iteration": 1}]


@pytest.mark.parametrize("cut", range(1, 16))
def test_torn_last_line_is_ignored_then_removed(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    whole, torn = b'{"iteration": 1}\n', b'{"iteration": 2}\n'[:cut]
    path.write_bytes(whole + torn)
    log = MetricsLog(path)
    assert log.read() == [{"iteration": 1}]
    log.append({"iteration": 3})
    assert lines(path) == [{"iteration": 1}, {"iteration": 3}]


def test_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n{"iteration": 2}')
    log = MetricsLog(path)
    assert len(log.read()) == 2
    log.append({"iteration": 3})
    assert [record["iteration"] for record in lines(path)] == [1, 2, 3]


def test_unreadable_line_in_the_middle_is_skipped_and_logged(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n\x00\x00\x00\n[2]\n\n{"iteration": 3}\n')
    assert [record["iteration"] for record in MetricsLog(path).read()] == [1, 3]
    assert [record.args[1] for record in caplog.records] == [2, 3]


def test_truncate_after_cuts_back_and_appending_goes_on(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for iteration in range(1, 8):
        log.append({"iteration": iteration})
    log.append({"note": "no iteration"})
    with open(log.path, "ab") as file:
        file.write(b'{"iteration": 8, "tor')
    assert log.truncate_after(4) == 3
    assert lines(log.path) == [{"iteration": i} for i in range(1, 5)] + [{"note": "no iteration"}]
    log.append({"iteration": 5})  # into the new file, not the replaced one
    assert [record.get("iteration") for record in lines(log.path)] == [1, 2, 3, 4, None, 5]
    assert log.truncate_after(100) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncate_after_without_a_file_and_to_nothing(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.truncate_after(3) == 0
    log.append({"iteration": 1})
    assert log.truncate_after(0) == 1
    assert log.read() == []


def test_failed_rewrite_leaves_the_log_unchanged(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for iteration in range(1, 4):
        log.append({"iteration": iteration})

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="No space left"):
            log.truncate_after(1)
    assert len(lines(log.path)) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    log.append({"iteration": 4})
    assert len(lines(log.path)) == 4


def test_full_disk_in_the_middle_of_a_line_leaves_no_half_line(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"iteration": 1})
    real_write, calls = os.write, []

    def nearly_full(fd, data):
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(fd, data[:5])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", nearly_full)
        with pytest.raises(RunError, match=r"metrics\.jsonl.*No space left"):
            log.append({"iteration": 2})
    assert len(calls) == 2
    assert lines(log.path) == [{"iteration": 1}]
    log.append({"iteration": 3})
    assert [record["iteration"] for record in lines(log.path)] == [1, 3]


@pytest.mark.parametrize("read_only", [True, False])
def test_read_only_and_closed_logs_refuse_to_write(tmp_path, read_only):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n')
    log = MetricsLog(path, read_only=read_only)
    if not read_only:
        log.close()
        log.close()
    with pytest.raises(RunError, match="reading only" if read_only else "closed"):
        log.append({"iteration": 2})
    with pytest.raises(RunError):
        log.truncate_after(0)
    assert log.read() == [{"iteration": 1}]


def test_event_has_utc_time_kind_and_fields(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    before = datetime.now(UTC)
    returned = log.append("worker_died", role="rollout", index=2, exit_code=-9, where=tmp_path, why=ValueError("x"))
    assert log.read() == [returned] == lines(log.path)
    time = datetime.fromisoformat(returned.pop("time"))
    assert time.utcoffset().total_seconds() == 0
    assert abs((time - before).total_seconds()) < 60
    assert returned == {
        "kind": "worker_died",
        "role": "rollout",
        "index": 2,
        "exit_code": -9,
        "where": str(tmp_path),
        "why": "x",
    }


def test_event_field_cannot_replace_the_stamp(tmp_path):
    with pytest.raises(RunError, match="'time'"):
        EventLog(tmp_path / "events.jsonl").append("x", time=3)


def test_events_from_many_threads_are_all_there_and_whole(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")

    def work(thread: int) -> None:
        for number in range(50):
            log.append("tick", thread=thread, number=number, text="x" * 500)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    records = lines(log.path)
    assert {(r["thread"], r["number"]) for r in records} == {(t, n) for t in range(8) for n in range(50)}
    assert len(records) == 400


def test_describe_is_one_readable_line():
    event = {
        "time": "2026-03-01T14:05:09.120+00:00",
        "kind": "worker_died",
        "role": "rollout",
        "exit_code": -9,
    }
    assert describe(event) == "2026-03-01 14:05:09Z  worker died  role=rollout exit_code=-9"
    event = {"time": event["time"], "kind": "warning", "n": None, "message": "disk is full"}
    assert describe(event) == "2026-03-01 14:05:09Z  warning  disk is full  n=null"
    assert describe({"kind": "x", "text": "two\nlines"}).count("\n") == 0
