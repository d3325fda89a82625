"""TensorBoard's files, read back by its own reader."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trimtab.spec import Algo
from trimtab.track.tensorboard import TensorboardTracker

CONFIG = {"seed": 3, "algo": {"name": Algo.bypass}, "mis": {"tis_level": "token"}, "optim": {"betas": [0.9, 0.99]}}


def read(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(run_dir / "tensorboard"))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def attempt(run_dir: Path, steps: range, value: float) -> None:
    tracker = TensorboardTracker()
    tracker.start(CONFIG, "id", "n", run_dir)
    for step in steps:
        tracker.log(step, {"train/reward": value, "train/bad": math.nan, "train/step": step})
    tracker.finish("completed", {})


def test_scalars_and_settings_are_read_back(tmp_path: Path) -> None:
    attempt(tmp_path, range(5), 0.25)
    assert read(tmp_path, "train/reward") == [(i, 0.25) for i in range(5)]
    assert all(math.isnan(value) for _, value in read(tmp_path, "train/bad"))
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    (hparams,) = found.PluginTagToContent("hparams").values()
    for name in (b"algo", b"bypass", b"level", b"token", b"mis.tis_level"):
        assert name in hparams


def test_after_a_resume_the_last_attempt_of_a_step_stands(tmp_path: Path) -> None:
    attempt(tmp_path, range(8), 0.25)
    attempt(tmp_path, range(5, 10), 0.5)
    assert read(tmp_path, "train/reward") == [(i, 0.25 if i < 5 else 0.5) for i in range(10)]


@pytest.mark.slow
def test_a_killed_process_loses_no_more_than_a_second(tmp_path: Path) -> None:
    code = f"""
import os, signal, time
from pathlib import Path
from trimtab.track.tensorboard import TensorboardTracker
tracker = TensorboardTracker()
tracker.start({{}}, "id", "n", Path({str(tmp_path)!r}))
for step in range(20):
    tracker.log(step, {{"x": 1.0}})
time.sleep(2.0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60).returncode == -9
    assert read(tmp_path, "x") == [(i, 1.0) for i in range(20)]


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    tracker = TensorboardTracker()
    with caplog.at_level(logging.WARNING):
        tracker.start({}, "id", "n", tmp_path / "file")
        tracker.log(0, {"x": 1.0})
        tracker.finish("failed", {})
    assert len(caplog.records) == 1 and "training goes on" in caplog.text
