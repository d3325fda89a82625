"""The local backend: processes of this machine, and what a killed or a repeated command leaves and finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launch.made import HERE, SEARCH, packed, result, run_dir, spec_of, sweep, until

from trimtab.launch import local
from trimtab.launch.attempts import history
from trimtab.launch.cancel import Choice, cancel
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import State
from trimtab.launch.status import statuses
from trimtab.spec.launch import LaunchSpec, Packing, RetrySpec, SweepSpec

PARENT = """
import sys
from pathlib import Path
from launch.made import spec_of
from trimtab.errors import Preempted
from trimtab.launch import local
from trimtab.launch.files import SweepFolder
folder = SweepFolder(Path(sys.argv[1]))
try:
    local.carry_out(folder, folder.sweep().runs, spec_of(folder.sweep().launch["launch"]["program"]), print)
except Preempted as stop:
    print(stop)
    sys.exit(75)
"""


def carry_out(folder: SweepFolder, spec: SweepSpec) -> list[str]:
    said: list[str] = []
    local.carry_out(folder, folder.sweep().runs, spec, said.append)
    return said


def parent(folder: SweepFolder) -> subprocess.Popen[str]:
    """The command that carries a sweep out, as a process that can be killed."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", PARENT, str(folder.path)],
        env=os.environ | {"PYTHONPATH": f"{SEARCH}{os.pathsep}{HERE.parent}"}, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip


def starts(folder: SweepFolder, i: int) -> list[str]:
    """A line for each start of the i-th run, by program:steps."""
    path = run_dir(folder, i) / "starts.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_runs_end_with_results_and_logs_and_are_not_run_again(tmp_path: Path) -> None:
    spec = spec_of("program:steps", replace(LaunchSpec(), at_once=2))
    folder = sweep(tmp_path / "a sweep's $(x)", spec, [1, 2, 3])
    carry_out(folder, spec)
    assert [result(folder, i).objective for i in range(3)] == [15, 30, 45]
    assert [result(folder, i).state for i in range(3)] == [State.completed] * 3
    assert [result(folder, i).attempt for i in range(3)] == [1] * 3
    log = (run_dir(folder, 1) / "log.txt").read_text()
    assert log.startswith("== attempt 1 of ") and log.endswith("step 5 of seed 2\n")
    assert "step 5 of seed 2" in folder.log(result(folder, 1).batch, 0).read_text()
    stamp = json.loads(starts(folder, 0)[0].split(" ", 3)[3])
    assert stamp == {"batch": result(folder, 0).batch, "attempt": 1, "code": {"commit": "abc"}}
    assert carry_out(folder, spec) == []
    assert [len(starts(folder, i)) for i in range(3)] == [1, 1, 1]


def test_failures_are_told_by_their_first_line_and_run_again_by_the_same_command(tmp_path: Path) -> None:
    spec = spec_of("program:odd_seeds_fail")
    folder = sweep(tmp_path / "s", spec, [1, 2, 3])
    said = carry_out(folder, spec)
    assert [result(folder, i).state.value for i in range(3)] == ["failed", "completed", "failed"]
    assert result(folder, 2).error == "ValueError: seed 3 is odd"
    assert any("failed: ValueError: seed 3 is odd" in line for line in said)
    log = (run_dir(folder, 0) / "log.txt").read_text()
    assert "Traceback" in log and "program.py" in log
    carry_out(folder, spec)
    assert [result(folder, i).attempt for i in range(3)] == [2, 1, 2]


def test_fail_fast_starts_nothing_more(tmp_path: Path) -> None:
    spec = spec_of("program:odd_seeds_fail", replace(LaunchSpec(), fail_fast=True))
    folder = sweep(tmp_path / "s", spec, [2, 1, 4])
    carry_out(folder, spec)
    assert folder.result(folder.sweep().runs[2].dir) is None
    assert [result(folder, i).state.value for i in range(2)] == ["completed", "failed"]


@pytest.mark.parametrize("limit", [0, 1])
def test_a_kill_for_memory_is_tried_again_within_its_limit(tmp_path: Path, limit: int) -> None:
    retries = replace(RetrySpec(), out_of_memory=limit)
    spec = spec_of("program:odd_seeds_are_killed", replace(LaunchSpec(), retries=retries))
    folder = sweep(tmp_path / "s", spec, [1])
    carry_out(folder, spec)
    ended = [State.out_of_memory, State.completed]
    assert [one.state for one in history(folder, folder.sweep().runs[0].dir)] == ended[: 1 + limit]
    assert result(folder, 0).attempt == 1 + limit


def test_a_signal_saves_the_runs_and_the_same_command_goes_on(tmp_path: Path) -> None:
    spec = spec_of("program:steps")
    folder = sweep(tmp_path / "s", spec, [1, 2], steps=40, overrides=["tick=0.05"])
    command = parent(folder)
    until(lambda: "step 3 " in log_of(folder, 0))
    command.send_signal(signal.SIGINT)
    out, _ = command.communicate(timeout=20)
    assert command.returncode == 75 and "the same command goes on" in out
    assert result(folder, 0).state is State.preempted and folder.result(folder.sweep().runs[1].dir) is None
    carry_out(folder, spec)
    assert [result(folder, i).objective for i in range(2)] == [820, 1640]
    assert int(starts(folder, 0)[1].split()[2]) >= 3  # where the first start had stopped


def test_the_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    spec = spec_of("program:steps")
    folder = sweep(tmp_path / "s", spec, [1], steps=3, overrides=["tick=30"])
    command = parent(folder)
    until(lambda: bool(starts(folder, 0)))
    command.send_signal(signal.SIGTERM)
    assert command.stdout is not None
    assert any("stopping" in line for line in command.stdout)
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=10)
    assert command.returncode == 75
    until(lambda: not local.live(folder, folder.all_batches()[0]), 5)


def test_runs_that_outlive_a_killed_command_are_waited_for(tmp_path: Path) -> None:
    spec = spec_of("program:steps")
    folder = sweep(tmp_path / "s", spec, [1, 2], steps=40, overrides=["tick=0.05"])
    command = parent(folder)
    until(lambda: bool(starts(folder, 0)))
    command.kill()
    command.communicate()
    said = carry_out(folder, spec)
    assert "still running" in said[0]
    assert [result(folder, i).objective for i in range(2)] == [820, 1640]
    assert [len(starts(folder, i)) for i in range(2)] == [1, 1]


def test_a_run_that_outlives_command_and_supervisor_is_waited_for(tmp_path: Path) -> None:
    spec = spec_of("program:steps")
    folder = sweep(tmp_path / "s", spec, [1], steps=60, overrides=["tick=0.05"])
    command = parent(folder)
    until(lambda: bool(starts(folder, 0)))
    command.kill()
    command.communicate()
    os.kill(int(starts(folder, 0)[0].split()[1]), signal.SIGKILL)
    assert "still running" in carry_out(folder, spec)[0]
    assert (result(folder, 0).objective, len(starts(folder, 0))) == (1830, 1)


def test_a_run_killed_with_its_job_goes_on_from_its_last_save(tmp_path: Path) -> None:
    spec = spec_of("program:steps")
    folder = sweep(tmp_path / "s", spec, [1], steps=30, overrides=["tick=0.05"])
    command = parent(folder)
    until(lambda: "step 7 " in log_of(folder, 0))
    child, supervisor = starts(folder, 0)[0].split()[:2]
    command.kill()
    command.communicate()
    os.kill(int(supervisor), signal.SIGKILL)
    os.kill(int(child), signal.SIGKILL)
    carry_out(folder, spec)
    assert (result(folder, 0).objective, result(folder, 0).attempt) == (465, 2)
    assert int(starts(folder, 0)[1].split()[2]) == 5


def test_a_cancelled_run_is_not_started_again_by_the_command_that_lives(tmp_path: Path) -> None:
    spec = spec_of("program:steps")
    folder = sweep(tmp_path / "s", spec, [1, 2], steps=40, overrides=["tick=0.05"])
    run, other = (run.dir for run in folder.sweep().runs)
    command = parent(folder)
    until(lambda: "step 2 " in log_of(folder, 0))
    outcome = cancel(folder, Choice(statuses(folder, {}), frozenset({run})), {})
    assert len(outcome.ended) == 1 and outcome.failed == outcome.left == []
    out, _ = command.communicate(timeout=30)
    assert f"{run}: cancelled by trimtab sweep cancel" in out and f"{other}: completed" in out
    assert [result(folder, i).state for i in range(2)] == [State.preempted, State.completed]
    assert [status.state for status in statuses(folder, {})] == [State.cancelled, State.completed]
    assert len(starts(folder, 0)) == 1
    carry_out(folder, spec)
    assert result(folder, 0).objective == 820


def test_a_cancelled_sweep_starts_nothing_more(tmp_path: Path) -> None:
    spec = spec_of("program:steps")
    folder = sweep(tmp_path / "s", spec, [1, 2], steps=60, overrides=["tick=0.05"])
    command = parent(folder)
    until(lambda: "step 2 " in log_of(folder, 0))
    cancel(folder, Choice(statuses(folder, {})), {})
    command.communicate(timeout=30)
    assert len(starts(folder, 0)) == 1 and folder.result(folder.sweep().runs[1].dir) is None


@pytest.mark.parametrize("packing", Packing)
def test_jobs_are_shared_by_runs_per_job(tmp_path: Path, packing: Packing) -> None:
    spec = spec_of("program:steps", packed(packing), runs_per_job=2)
    folder = sweep(tmp_path / "s", spec, [1, 2, 3])
    carry_out(folder, spec)
    assert [[len(slot.runs) for slot in batch.slots] for batch in folder.all_batches()] == [[2], [1]]
    assert [result(folder, i).objective for i in range(3)] == [15, 30, 45]


def log_of(folder: SweepFolder, i: int) -> str:
    path = run_dir(folder, i) / "log.txt"
    return path.read_text() if path.exists() else ""
