"""metrics.jsonl: strict, whole lines, nothing lost to kill -9, right after a resume."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab.errors import DataError
from trimtab.track import JsonlTracker, Trackers, read_metrics, truncate_after
from trimtab.track.jsonl import encode, write_whole


def start(run_dir: Path) -> JsonlTracker:
    tracker = JsonlTracker()
    tracker.start({}, "id", "name", run_dir)
    return tracker


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_each_line_is_strict_json_with_the_step_first(tmp_path: Path) -> None:
    tracker = start(tmp_path / "run")
    tracker.log(0, {"train/reward": 0.1, "train/count": 3})
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.30000000000000004})
    tracker.finish("completed", {})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == '{"step": 0, "train/reward": 0.1, "train/count": 3}'
    second = json.loads(lines[1], parse_constant=refuse)
    expected = {"step": 1, "a": None, "b": None, "c": None, "d": 0.30000000000000004, "nonfinite": ["a", "b", "c"]}
    assert second == expected and next(iter(second)) == "step"


def test_other_number_types_become_floats() -> None:
    import numpy as np
    import torch

    line = encode(1, {"a": np.float32(0.5), "b": torch.tensor(2.0), "c": True, "d": np.float64("nan")})
    assert json.loads(line) == {"step": 1, "a": 0.5, "b": 2.0, "c": True, "d": None, "nonfinite": ["d"]}


def test_reserved_names_are_refused() -> None:
    for name in ("step", "nonfinite"):
        with pytest.raises(ValueError, match=name):
            encode(1, {name: 1.0})


def test_reading_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 2, "x": 1}\n{"step": 0, "x": null, "nonfinite": ["x"]}\n{"step": 2, "x": 5}\n{"step": 3, "x'
    )
    records = read_metrics(path)
    assert [r["step"] for r in records] == [0, 2]
    assert math.isnan(records[0]["x"]) and records[0]["nonfinite"] == ["x"] and records[1]["x"] == 5


@pytest.mark.parametrize(
    "tail", [b"", b"\n", b'{"step": 2', b"\x00\x00\x00", b'{"x": 1}\n', b'"step"\n', b"\xff\xfe\n"]
)
def test_a_torn_last_line_is_left_out_and_does_not_spoil_the_next(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "x": 1}\n' + tail)
    assert [r["step"] for r in read_metrics(path)] == [1]
    tracker = start(tmp_path)
    tracker.log(2, {"x": 2.0})
    tracker.finish("completed", {})
    assert path.read_bytes() == b'{"step": 1, "x": 1}\n{"step": 2, "x": 2.0}\n'


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    tracker = start(tmp_path)
    tracker.log(3, {})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    tracker.finish("completed", {})


def test_a_bad_line_that_is_not_the_last_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a line of metrics"):
        read_metrics(path)


def test_truncating_for_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(b'{"step": %d, "x": 0.1}\n' % i for i in range(6)) + b'{"step": 6, "x')
    before = path.read_bytes()
    truncate_after(path, 10)
    assert path.read_bytes() == before[: before.rindex(b"\n") + 1]
    truncate_after(path, 3)
    assert path.read_bytes() == b"".join(b'{"step": %d, "x": 0.1}\n' % i for i in range(4))
    truncate_after(path, -1)
    assert path.read_bytes() == b"" and os.listdir(tmp_path) == ["metrics.jsonl"]
    truncate_after(tmp_path / "none.jsonl", 3)
    assert not (tmp_path / "none.jsonl").exists()


def test_killed_and_resumed_is_byte_for_byte_as_never_killed(tmp_path: Path) -> None:
    whole, cut = start(tmp_path / "whole"), start(tmp_path / "cut")
    for step in range(10):
        whole.log(step, {"x": step / 3})
    for step in range(7):
        cut.log(step, {"x": step / 3})
    truncate_after(tmp_path / "cut" / "metrics.jsonl", 4)  # the checkpoint is older than the log
    resumed = start(tmp_path / "cut")
    for step in range(5, 10):
        resumed.log(step, {"x": step / 3})
    for tracker in (whole, cut, resumed):
        tracker.finish("completed", {})
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


WRITER = """
import sys
from pathlib import Path
from trimtab.track.jsonl import JsonlTracker
tracker = JsonlTracker()
tracker.start({}, "id", "name", Path(sys.argv[1]))
step = 0
while True:
    tracker.log(step, {"x": step / 7, "name/" + "y" * 200: 1.0})
    print(step, flush=True)
    step += 1
"""


@pytest.mark.parametrize("logged", [1, 700])
def test_kill_minus_9_loses_no_logged_step(tmp_path: Path, logged: int) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = -1
    while acknowledged < logged:
        acknowledged = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read().split("\n")
    writer.stdout.close()
    writer.wait()
    acknowledged = max([acknowledged, *(int(s) for s in rest[:-1])])
    steps = [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(len(steps))) and len(steps) >= acknowledged + 1


class FullDisk:
    """A file that takes ``room`` bytes and then has no space left."""

    def __init__(self, path: Path, room: int) -> None:
        self.file, self.room = path.open("ab", buffering=0), room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        took = self.file.write(data[: self.room])
        self.room -= took
        return took

    def seek(self, *where: int) -> int:
        return self.file.seek(*where)

    def fileno(self) -> int:
        return self.file.fileno()


def test_a_line_that_does_not_fit_is_taken_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    disk = FullDisk(path, room=20)
    write_whole(disk, b'{"step": 1}\n')
    with pytest.raises(OSError, match="No space left"):
        write_whole(disk, b'{"step": 2}\n')
    disk.file.close()
    assert path.read_bytes() == b'{"step": 1}\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = start(tmp_path)

    def full(file: object, line: bytes) -> None:
        with open("/dev/full", "wb", buffering=0) as disk:
            disk.write(line)

    monkeypatch.setattr("trimtab.track.jsonl.write_whole", full)
    with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl") as caught:
        tracker.log(1, {})
    assert caught.value.errno == errno.ENOSPC
    tracker.finish("failed", {})


def test_logging_outside_a_run_is_an_error_and_finishing_twice_is_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="before start"):
        JsonlTracker().log(0, {})
    tracker = start(tmp_path)
    tracker.finish("completed", {})
    tracker.finish("completed", {})


def test_several_trackers_get_every_call_in_order(tmp_path: Path) -> None:
    calls: list[tuple[object, ...]] = []

    class Spy:
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, config: object, run_id: str, name: str, run_dir: Path) -> None:
            calls.append((self.name, "start", config, run_id, name, run_dir))

        def log(self, step: int, metrics: object) -> None:
            calls.append((self.name, "log", step, metrics))

        def finish(self, state: str, summary: object) -> None:
            calls.append((self.name, "finish", state, summary))

    both = Trackers([Spy("a"), Spy("b")])
    both.start({"s": 1}, "id", "n", tmp_path)
    both.log(3, {"x": 1.0})
    both.finish("failed", {"y": 2})
    per = [("start", {"s": 1}, "id", "n", tmp_path), ("log", 3, {"x": 1.0}), ("finish", "failed", {"y": 2})]
    assert calls == [(name, *call) for call in per for name in "ab"]


def test_a_log_call_is_cheap(tmp_path: Path) -> None:
    tracker = start(tmp_path)
    metrics = {f"train/metric_{i}": i / 7 for i in range(80)}
    began = time.perf_counter()
    for step in range(200):
        tracker.log(step, metrics)
    each = (time.perf_counter() - began) / 200
    tracker.finish("completed", {})
    assert each < 5e-3
