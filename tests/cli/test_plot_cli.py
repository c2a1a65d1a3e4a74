from __future__ import annotations

import html.parser
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tetherl import cli
from tetherl.cli.curves import MAX_POINTS, Curves
from tetherl.runs.directory import RunDirectory

NAME = "a <b>run"


def lines(count: int) -> list[dict]:
    return [
        {
            "iteration": i,
            "env_steps": 100 * i,
            "time/total_s": 0.5 * i,
            "episode_return_mean": None if i == 1 else 2.0 * i,
            "evaluation/episode_return_mean": 3.0 * i,
            "episode_length_mean": 7.0,
            "learner/kl": 0.01,
            "learner/entropy": 1.5,
            "learner/lr": 1e-3,
            "lag/mean": 0.5,
            "lag/max": 1,
            "steps/trained": 80 * i,
            "steps/pending": 10 * i,
            "steps/dropped/stale": 10 * i,
            "steps/dropped/overflow": 0,
        }
        for i in range(1, count + 1)
    ]


@pytest.fixture
def run(tmp_path) -> Path:
    """A run directory with five iterations; its name is no plain HTML."""
    path = tmp_path / "run"
    with RunDirectory.open(tmp_path, "run") as directory:
        for line in lines(5):
            directory.log(line)
    path.rename(tmp_path / NAME)
    return tmp_path / NAME


class Page(html.parser.HTMLParser):
    """The title, the data, and everything that would be loaded from elsewhere."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.title, self.data, self.loads, self._in = "", "", [], ""
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self._in = dict(attrs).get("id") or tag
        self.loads += [value for key, value in attrs if key in ("src", "href", "srcset")]

    def handle_data(self, data):
        if self._in in ("title", "data"):
            setattr(self, self._in, getattr(self, self._in) + data)

    def handle_endtag(self, tag):
        self._in = ""


def test_picture_and_page_go_into_the_run_directory(run, capsys):
    assert cli.main(["plot", str(run)]) == 0
    assert capsys.readouterr().out.split("\n")[:2] == [str(run / "curves.png"), str(run / "curves.html")]
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    page = Page(run / "curves.html")
    assert page.title == NAME and page.loads == []
    data = json.loads(page.data)
    assert data["metrics"]["episode_return_mean"] == [None, 4.0, 6.0, 8.0, 10.0]
    assert data["metrics"]["learner/lr"] == [1e-3] * 5  # every metric is there, not only those of the panels
    titles = [panel["title"] for panel in data["panels"]]
    assert [title.split()[0] for title in titles] == ["return", "episode", "KL", "entropy", "lag", "steps"]
    # A reason for which nothing was dropped does not clutter the legend.
    assert [key for _, key in data["panels"][5]["series"]] == ["steps/trained", "steps/pending", "steps/dropped/stale"]


def test_the_suffix_says_what_is_written(run, tmp_path, capsys):
    assert (
        cli.main(["plot", NAME, "--runs-dir", str(tmp_path), "--out", str(tmp_path / "new" / "x.png"), "--json"]) == 0
    )
    png = str(tmp_path / "new" / "x.png")
    assert json.loads(capsys.readouterr().out) == {"run": NAME, "iterations": 5, "png": png, "html": None}
    assert cli.main(["plot", str(run), "--out", str(tmp_path / "y.html"), "--x", "iteration"]) == 0
    assert Page(tmp_path / "y.html").loads == [] and not (run / "curves.html").exists()
    assert json.loads(Page(tmp_path / "y.html").data)["axis"] == "iteration"
    assert cli.main(["plot", str(run), "--out", str(tmp_path / "both")]) == 0
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["curves.html", "curves.png"]


def test_without_matplotlib_the_page_is_still_to_be_had(run, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    assert cli.main(["plot", str(run)]) == 1
    assert "tetherl[plot]" in capsys.readouterr().err
    assert cli.main(["plot", str(run), "--out", str(run / "x.html")]) == 0


def test_what_cannot_be_drawn_says_why(tmp_path, run, capsys):
    RunDirectory.open(tmp_path, "young").close()
    assert cli.main(["plot", "young", "--runs-dir", str(tmp_path)]) == 1
    assert "no metrics yet" in capsys.readouterr().err
    assert cli.main(["plot", "nothing", "--runs-dir", str(tmp_path)]) == 1
    assert "there is no run 'nothing'" in capsys.readouterr().err
    assert cli.main(["plot", str(run), "--out", str(run / "config.yaml" / "no"), "--x", "colour"]) == 2
    (tmp_path / "file").touch()
    assert cli.main(["plot", str(run), "--out", str(tmp_path / "file" / "x.html")]) == 1
    assert "could not be written" in capsys.readouterr().err
    with RunDirectory.open(tmp_path, "odd") as directory:
        directory.log({"iteration": 1})
    assert cli.main(["plot", "odd", "--runs-dir", str(tmp_path)]) == 1
    assert "no metric 'env_steps'" in capsys.readouterr().err


def test_a_long_run_is_thinned_and_ends_with_its_last_iteration():
    curves = Curves.of("long", lines(2 * MAX_POINTS + 1))
    assert curves.every == 3 and len(curves.metrics["iteration"]) <= MAX_POINTS
    assert curves.metrics["iteration"][-2:] == [2 * MAX_POINTS - 2, 2 * MAX_POINTS + 1]
    assert Curves.of("short", lines(MAX_POINTS)).every == 1


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js to run the page's script")
def test_the_page_can_be_worked(run, tmp_path):
    assert cli.main(["plot", str(run), "--out", str(tmp_path / "x.html")]) == 0
    command = ["node", str(Path(__file__).with_name("curves_dom.js")), str(tmp_path / "x.html")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen["titles"]) == 6 and seen["lines"] == [2, 1, 1, 1, 2, 3]
    assert seen["last"][0] == ["training, last 100 episodes: 10", "evaluation: 15", "env steps: 500"]
    assert seen["last"][5] == ["trained: 400", "pending: 50", "dropped: stale: 50", "env steps: 500"]
    assert 100 < seen["zoom"][0] < seen["zoom"][1] < 500
    assert seen["more"] == ["learner/lr"] and seen["panels"] == 6 and seen["linesWithOneHidden"] == 2
