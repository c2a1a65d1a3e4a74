"""The events of a run: events.jsonl, what happened and when."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tetherl.errors import RunError
from tetherl.runs.jsonlines import JsonLines, to_json


class EventLog(JsonLines):
    """`events.jsonl`: one JSON object per event, for example

    {"time": "2026-03-01T14:05:09.120+00:00", "kind": "worker_died", "role": "rollout", "exit_code": -9}
    """

    def append(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        """Append an event of `kind` with the present time (UTC) and return it as it was written.

        Values that JSON cannot hold (paths, exceptions) are written as text: an event log must not raise
        where a failure is being reported. RunError when the line cannot be written or a field is called
        `time` or `kind`.
        """
        if "time" in fields or "kind" in fields:
            raise RunError(f"event {kind!r}: the log itself sets 'time' and 'kind'; give the field another name")
        event: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind}
        event.update((key, to_json(value, key, other=str)) for key, value in fields.items())
        self.append_line(event)
        return event


def describe(event: Mapping[str, Any]) -> str:
    """One line for people: `2026-03-01 14:05:09Z  worker died  role=rollout exit_code=-9`.

    A field `message` comes first and unquoted.
    """
    time = str(event.get("time", "?"))[:19].replace("T", " ") + "Z"
    kind = str(event.get("kind", "?")).replace("_", " ")
    parts = [f"{time}  {kind}"]
    if event.get("message"):
        parts.append(str(event["message"]))
    fields = [f"{key}={_short(value)}" for key, value in event.items() if key not in ("time", "kind", "message")]
    if fields:
        parts.append(" ".join(fields))
    return "  ".join(parts)


def _short(value: Any) -> str:
    if isinstance(value, str) and value and not any(c.isspace() or c in "\"'=" for c in value):
        return value
    return json.dumps(value, ensure_ascii=False)
