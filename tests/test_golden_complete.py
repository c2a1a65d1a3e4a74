"""Each case of tests/data/golden.json is run by a test: one that pytest collects, called golden, with the case's name
in its own name or among its parameters.

The names are taken from what pytest collects, not from a list kept by hand: a test that is removed or renamed, or a
parameter that is lost, leaves its case uncovered.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
CASES = {case["name"] for case in json.loads((TESTS / "data" / "golden.json").read_text())["cases"]}


def golden_tests() -> list[str]:
    """`test_name[parameters]` of all collected tests called golden, slow ones included."""
    files = [str(p) for p in sorted(TESTS.rglob("test_*.py")) if p != Path(__file__) and "golden" in p.read_text()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-k", "golden", *files]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = [line.split("::", 1)[1] for line in done.stdout.splitlines() if "::" in line]
    # -k also finds files and parameters; it is the test that must be called so.
    return [name for name in names if "golden" in name.partition("[")[0]]


def covered_by(names: list[str]) -> set[str]:
    return {case for case in CASES for name in names if re.search(rf"(?<![a-z0-9]){case}(?![a-z0-9])", name)}


def test_every_case_is_run() -> None:
    assert len(CASES) == 54
    missing = sorted(CASES - covered_by(golden_tests()))
    assert not missing, f"no test called golden runs {missing}"


def test_a_lost_case_is_noticed() -> None:
    names = ["test_gae_golden[gae_01_termination]", "test_golden_net_01_founding_conv_shapes", "test_x[gae_04_multi]"]
    assert covered_by(names) == {"gae_01_termination", "net_01_founding_conv_shapes"}
