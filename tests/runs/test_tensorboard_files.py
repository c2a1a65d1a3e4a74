"""Event files as TensorBoard itself reads them."""

from __future__ import annotations

import pytest

from tetherl.errors import RunError
from tetherl.runs.directory import RunDirectory
from tetherl.runs.tensorboard import TensorBoardLog, _checksum

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(directory) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), over all files of the directory."""
    events = accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0}, purge_orphaned_data=True)
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_checksum_is_crc_32c():
    # RFC 3720, B.4: 32 bytes of zero give 0x8A9136AA; then rotated by 15 and shifted by a constant.
    crc = 0x8A9136AA
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert _checksum(bytes(32)) == masked.to_bytes(4, "little")


def test_every_number_is_a_scalar_over_env_steps(tmp_path):
    with RunDirectory.open(tmp_path, "run") as run:
        for i in (1, 2, 300):
            metrics = {"iteration": i, "env_steps": 2**20 * i, "learner/kl": i / 8, "episode_return_mean": None}
            run.log(metrics | {"bad": float("nan"), "text": "x", "flag": True, "lag/mean": -1.5})
    found = scalars(tmp_path / "run" / "tensorboard")
    steps = [2**20, 2**21, 300 * 2**20]
    assert found == {
        "iteration": list(zip(steps, [1.0, 2.0, 300.0], strict=True)),
        "env_steps": [(s, float(s)) for s in steps],
        "learner/kl": list(zip(steps, [0.125, 0.25, 37.5], strict=True)),
        "lag/mean": [(s, -1.5) for s in steps],
    }


def test_a_run_that_resumes_voids_what_lies_beyond_its_checkpoint(tmp_path):
    def play(directory, steps, value):
        for step in steps:
            directory.append({"env_steps": step, "x": value})
        directory.close()

    log = TensorBoardLog(tmp_path / "tensorboard")
    log.restart(0)
    assert not log.directory.exists()  # nothing to void
    play(log, [100, 200, 300], 1.0)
    again = TensorBoardLog(log.directory)
    again.restart(200)
    play(again, [250, 350], 2.0)
    assert scalars(log.directory)["x"] == [(100, 1.0), (200, 1.0), (250, 2.0), (350, 2.0)]


def test_metrics_and_event_files_are_cut_back_together(tmp_path):
    with RunDirectory.open(tmp_path, "run") as run:
        for i in (1, 2, 3):
            run.log({"iteration": i, "env_steps": 10 * i})
    with RunDirectory.open(tmp_path, "run") as run:
        run.truncate_after(1, 10)
        run.log({"iteration": 2, "env_steps": 20})
        assert [m["iteration"] for m in run.metrics.read()] == [1, 2]
    assert scalars(tmp_path / "run" / "tensorboard")["iteration"] == [(10, 1.0), (20, 2.0)]


def test_a_run_opened_to_look_at_writes_nothing(tmp_path):
    RunDirectory.open(tmp_path, "run").close()
    with RunDirectory.read(tmp_path, "run") as run:
        with pytest.raises(RunError, match="reading only"):
            run.tensorboard.append({"env_steps": 1, "x": 1.0})
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "tensorboard").write_text("a file is in the way")
    with pytest.raises(RunError, match="metrics could not be written"):
        TensorBoardLog(tmp_path / "tensorboard").append({"env_steps": 1})
