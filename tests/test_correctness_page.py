"""docs/correctness.md names tests that exist, and speaks of each known way to learn wrongly once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "correctness.md").read_text(encoding="utf-8")
COUNT = 52
NAME = re.compile(r"`(tests/[\w/.]+\.py)::(\w+)(\[[^`\]]+\])?`")


def test_functions(source: str) -> set[str]:
    """Names of the tests in a module, also of those in classes."""
    nodes = ast.walk(ast.parse(source))
    return {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name[:5] == "test_"}


test_functions.__test__ = False  # type: ignore[attr-defined]


def missing(page: str) -> list[str]:
    """Tests that the page names and that are not there."""
    found = []
    for file, name, _ in NAME.findall(page):
        path = ROOT / file
        if not path.is_file() or name not in test_functions(path.read_text(encoding="utf-8")):
            found.append(f"{file}::{name}")
    return found


def rows(page: str) -> list[tuple[int, str]]:
    """(number, the rest of the line) of the table's rows."""
    return [(int(number), rest) for number, rest in re.findall(r"^\| (\d+) \|(.*)\|$", page, re.MULTILINE)]


def test_every_test_on_the_page_exists():
    assert len(NAME.findall(PAGE)) > 2 * COUNT
    assert not missing(PAGE)
    assert PAGE.count("`tests/") == len(NAME.findall(PAGE)), "a test that is not written as `tests/path.py::test_name`"


def test_each_way_to_learn_wrongly_is_there_once_with_a_test():
    table = rows(PAGE)
    assert [number for number, _ in table] == list(range(1, COUNT + 1))
    assert not [number for number, rest in table if not NAME.search(rest)]


def test_a_name_that_is_wrong_is_found():
    here = "tests/test_correctness_page.py"
    assert missing(f"`{here}::test_a_name_that_is_wrong_is_found[x-1]`") == []
    wrong = [f"{here}::test_that_is_gone", "tests/test_that_is_gone.py::test_x", f"{here}::rows"]
    assert missing(" ".join(f"`{name}`" for name in wrong)) == wrong
