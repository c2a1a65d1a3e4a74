"""The layers of the house, held by a look at every import statement (also those inside functions)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "tetherl"
LEAVES = {"protocol", "errors", "ops"}
BELOW_ALGORITHMS = {"models", "ops", "data", "spaces", "errors"}
BELOW_SERVER = {"models", "protocol", "ops", "data", "spaces", "errors"}
BELOW_WORKERS = {"algorithms", "server"} | BELOW_ALGORITHMS | BELOW_SERVER
BELOW_ALGORITHM = {"workers", "engine", "resources", "runs", "client", "config"} | BELOW_WORKERS
TOP = {"algorithm", "schedules", "team", "tracking", "evaluation", "persistence", "callbacks"}
ALLOWED: dict[str, set[str]] = {
    "protocol": set(),
    "errors": set(),
    "ops": set(),
    "client": {"protocol", "errors"},
    "runs": {"errors"},
    "spaces": {"errors"},
    "data": {"errors"},
    "models": {"ops", "data", "spaces", "errors"},
    "algorithms": BELOW_ALGORITHMS,
    "engine": {"errors"},
    "resources": {"errors"},
    "server": BELOW_SERVER,
    "workers": BELOW_WORKERS,
    "config": BELOW_ALGORITHM | {"config_rules", "config_sources"},
    "config_rules": BELOW_ALGORITHM | {"config_sources"},
    "config_sources": {"errors", "spaces"},
    **dict.fromkeys(TOP, BELOW_ALGORITHM | TOP),
}
EVERYTHING = {"cli", "testing", "__init__", "__main__"}


def imports_of(path: Path) -> set[str]:
    """Parts of tetherl that the file imports: 'data', 'errors', ..."""
    parts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.module != "tetherl" else [f"tetherl.{a.name}" for a in node.names]
            assert node.level == 0, f"{path}: relative import"
        else:
            continue
        parts |= {n.split(".")[1] for n in names if n.startswith("tetherl.")}
    return parts


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_stay_in_their_layer(path: Path) -> None:
    part = part_of(path)
    if part in EVERYTHING:
        return
    assert part in ALLOWED, f"{part} is not in the house: add it to ALLOWED and to docs"
    forbidden = imports_of(path) - ALLOWED[part] - {part}
    assert not forbidden, f"{path.name} ({part}) imports {sorted(forbidden)}, allowed: {sorted(ALLOWED[part])}"


def test_ray_appears_only_in_its_engine() -> None:
    for path in FILES:
        if path.name == "ray.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.split(".")[0] == "ray" for n in names), path


def test_the_look_at_imports_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("def f():\n    from tetherl.engine import local\n    import tetherl.server.config\n")
    assert imports_of(path) == {"engine", "server"}


HEAVY = ["torch", "gymnasium", "aiohttp", "yaml", "rich", "safetensors"]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("tetherl", HEAVY),
        ("tetherl.client", HEAVY),
        ("tetherl.protocol.wire", HEAVY),
        ("tetherl.config", ["torch", "aiohttp"]),
        ("tetherl.resources.plan", ["torch", "aiohttp", "gymnasium"]),
        ("tetherl.runs.directory", ["torch", "aiohttp", "gymnasium"]),
        ("tetherl.cli", ["torch", "aiohttp", "gymnasium"]),
    ],
)
def test_light_modules_stay_light(module: str, absent: list[str]) -> None:
    code = f"import {module}, sys; print([m for m in {absent!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.strip() == "[]"


def test_client_side_is_free_of_posix_only_modules() -> None:
    """Case C112: game machines run Windows."""
    posix_only = {"fcntl", "resource", "pwd", "grp", "termios", "pty"}
    for part in ("client", "protocol", "errors"):
        for path in FILES:
            if part_of(path) != part:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    assert not posix_only & {a.name for a in node.names}, path
                elif isinstance(node, ast.ImportFrom):
                    assert node.module not in posix_only, path
