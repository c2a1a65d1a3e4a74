# ruff: noqa: T201
"""`tetherl plot`: the learning curves of a run as a picture and as an interactive page."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from tetherl.cli.curves import AXES

PICTURE, PAGE = "curves.png", "curves.html"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plot",
        help="learning curves as PNG and interactive HTML",
        description="Draws the learning curves of a run, which may still be training: return, episode length, KL, "
        "entropy, lag and the fate of the steps. The page also shows every other metric and needs no network.",
    )
    parser.add_argument("run", metavar="RUN", help="name of a run, or the path of its directory")
    parser.add_argument("--runs-dir", default="runs", help="where runs are (default: runs)")
    parser.add_argument(
        "--out",
        metavar="PATH",
        help=f"a directory for {PICTURE} and {PAGE} (default: the run's own), or a file that ends in .png or .html",
    )
    parser.add_argument("--x", choices=list(AXES), default="env_steps", help="x-axis (default: env_steps)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout: what was written")


def run(args: argparse.Namespace) -> int:
    from tetherl.cli.curves import Curves, write_png
    from tetherl.cli.curves_page import write_page
    from tetherl.errors import MissingExtraError, RunError
    from tetherl.runs.directory import RunDirectory

    directory = RunDirectory.find(args.run, args.runs_dir)
    lines = directory.metrics.read()
    if not lines:
        raise RunError(
            f"run {directory.name!r} has no metrics yet: {directory.metrics.path} is written iteration by iteration"
        )
    curves = Curves.of(directory.name, lines)
    if args.x not in curves.metrics:
        known = ", ".join(axis for axis in AXES if axis in curves.metrics)
        raise RunError(
            f"run {directory.name!r} has no metric {args.x!r} to draw its curves over; it has {known or 'none'}"
        )
    picture, page = _targets(args.out, directory.path)
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("a PNG (--out FILE.html does without)", "plot")
    try:
        for path in (picture, page):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        if picture is not None:
            write_png(curves, picture, args.x)
        if page is not None:
            write_page(curves, page, args.x)
    except OSError as error:
        raise RunError(f"the curves could not be written: {error}") from error
    if args.json:
        files = {"png": picture and str(picture), "html": page and str(page)}
        print(json.dumps({"run": directory.name, "iterations": curves.iterations, **files}))
    else:
        for path in (picture, page):
            if path is not None:
                print(path)
    return 0


def _targets(out: str | None, run: Path) -> tuple[Path | None, Path | None]:
    """Where picture and page go; None for what is not asked for."""
    if out is None:
        return run / PICTURE, run / PAGE
    path = Path(out)
    if path.suffix.lower() == ".png":
        return path, None
    if path.suffix.lower() in (".html", ".htm"):
        return None, path
    return path / PICTURE, path / PAGE
