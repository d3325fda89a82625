"""A job on its node: what it runs, what signals do to it, which start of a run counts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from launch.made import SEARCH, job, result, run_dir, spec_of, sweep, until

from trimtab.launch import node
from trimtab.launch.attempts import history, hold
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Batch, Slot, State
from trimtab.spec.launch import LaunchSpec, RetrySpec

STUB = """#!/bin/sh
echo "$@" >> "$STUB_CALLS"
if [ "$1" = show ]; then cat "$STUB_JOB"; fi
"""


def batch(folder: SweepFolder, attempt: int = 1, cluster: str = "local") -> Batch:
    """One more batch of all of the sweep's runs, in one job."""
    runs = tuple((run.dir, attempt) for run in folder.sweep().runs)
    return folder.write_batch(replace(folder.new_batch(cluster, "default", [Slot(runs)]), job="1"))


def ended(process: subprocess.Popen[str], seconds: float = 20) -> str:
    """What the job printed, once it has ended."""
    out, _ = process.communicate(timeout=seconds)
    return out


def code(process: subprocess.Popen[str]) -> int:
    """The job's exit code."""
    ended(process)
    return process.returncode


def log(folder: SweepFolder, i: int = 0) -> str:
    path = run_dir(folder, i) / "log.txt"
    return path.read_text() if path.exists() else ""


def slurm(tmp_path: Path, fields: str) -> dict[str, str]:
    """Environment of a job whose scontrol says ``fields``."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(STUB)
    (tools / "scontrol").chmod(0o755)
    (tmp_path / "job.txt").write_text(f"JobId=12 {fields}\n")
    return {
        "PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "12",
        "STUB_CALLS": str(tmp_path / "calls"), "STUB_JOB": str(tmp_path / "job.txt"),
    }  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_saves_the_run_and_the_next_start_ends_as_an_undisturbed_one(
    tmp_path: Path, number: signal.Signals
) -> None:
    spec = spec_of("program:steps")
    folder = sweep(tmp_path / "s", spec, [3], steps=30, overrides=["tick=0.05"])
    whole = sweep(tmp_path / "whole", spec, [3], steps=30)
    assert code(job(whole, batch(whole).id)) == 0
    first = job(folder, batch(folder).id)
    until(lambda: "step 2 " in log(folder))
    for _ in range(3):  # SLURM sends to each process, and more than once
        first.send_signal(number)
    out = ended(first)
    assert first.returncode == 75 and "Preempted" not in out
    assert (result(folder, 0).state, result(folder, 0).objective) == (State.preempted, None)
    assert result(folder, 0).error.startswith(f"Preempted: {number.name} after step")
    second = job(folder, batch(folder, 2).id)
    assert ended(second).startswith("== attempt 2") and second.returncode == 0
    assert (result(folder, 0).state, result(folder, 0).attempt) == (State.completed, 2)
    assert (run_dir(folder, 0) / "metrics.jsonl").read_bytes() == (run_dir(whole, 0) / "metrics.jsonl").read_bytes()
    assert [one.state.value for one in history(folder, folder.sweep().runs[0].dir)] == ["preempted", "completed"]


def test_a_signal_while_the_program_is_imported_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(1)\nrun = None\n")
    folder = sweep(tmp_path / "s", spec_of("slow_import:run"), [1])
    one = job(folder, batch(folder).id, PYTHONPATH=f"{SEARCH}:{tmp_path}")
    assert one.stdout is not None and one.stdout.readline() == "importing\n"
    one.send_signal(signal.SIGTERM)
    ended(one)
    assert one.returncode == 75 and folder.result(folder.sweep().runs[0].dir) is None


def test_a_signal_while_the_run_is_set_up_ends_it_as_preempted(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:steps"), [1], overrides=["setup=30"])
    one = job(folder, batch(folder).id)
    until(lambda: log(folder) != "")
    one.send_signal(signal.SIGUSR2)
    ended(one)
    assert one.returncode == 75 and result(folder, 0).state is State.preempted
    assert result(folder, 0).error.startswith("Preempted: SIGUSR2 before the run took signals")


def test_signals_from_the_very_first_moment_are_kept(tmp_path: Path) -> None:
    from trimtab.launch.stop import blocked

    folder = sweep(tmp_path / "s", spec_of("program:steps"), [1])
    with blocked():  # as the local backend starts jobs
        one = job(folder, batch(folder).id)
    one.send_signal(signal.SIGTERM)
    assert "SIGTERM: the runs save and end" in ended(one) or folder.result(folder.sweep().runs[0].dir) is None
    assert one.returncode == 75


def test_a_program_without_handlers_ends_as_preempted(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:deaf"), [1])
    one = job(folder, batch(folder).id)
    until(lambda: (run_dir(folder, 0) / "begun").exists())
    one.send_signal(signal.SIGTERM)
    one.send_signal(signal.SIGTERM)
    ended(one)
    assert one.returncode == 75 and result(folder, 0).state is State.preempted


def test_a_completed_run_is_not_run_again_whatever_attempt_completed_it(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:steps"), [1])
    assert code(job(folder, batch(folder).id)) == 0
    before = (run_dir(folder, 0) / "result.json").read_bytes()
    again = job(folder, batch(folder, 2).id)
    assert "is completed" in ended(again) and again.returncode == 0
    assert (run_dir(folder, 0) / "result.json").read_bytes() == before


def test_a_stale_attempt_touches_nothing(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:steps"), [1])
    old = batch(folder)
    batch(folder, 2)
    out = ended(job(folder, old.id))
    assert "a newer attempt has taken it" in out and not run_dir(folder, 0).exists()


def test_a_refused_batch_makes_no_attempt_stale(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:steps"), [1])
    old = batch(folder)
    folder.write_batch(replace(batch(folder, 2), refused="no such partition"))
    assert code(job(folder, old.id)) == 0
    assert result(folder, 0).state is State.completed


def test_a_start_waits_for_an_earlier_one_that_still_writes(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:steps"), [1])
    run_dir(folder, 0).mkdir()
    lock = hold(run_dir(folder, 0) / ".launch.lock")
    new = job(folder, batch(folder, 2).id)
    until(lambda: "waiting for an earlier start of this run to end" in log(folder))
    assert lock is not None and "step" not in log(folder)
    os.close(lock)
    assert code(new) == 0 and "step 5 " in log(folder)


@pytest.mark.parametrize("same_batch", [False, True], ids=["another batch", "requeued"])
def test_a_running_attempt_that_becomes_stale_makes_room(tmp_path: Path, same_batch: bool) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:steps"), [1], steps=200, overrides=["tick=0.05"])
    old = batch(folder)
    ghost = job(folder, old.id)  # its node is believed dead
    until(lambda: "step 2 " in log(folder))
    new = job(folder, old.id if same_batch else batch(folder, 2).id)
    assert code(ghost) == 0
    assert folder.result(folder.sweep().runs[0].dir) is None
    assert code(new) == 0
    assert result(folder, 0).objective == 200 * 201 / 2
    assert len(history(folder, folder.sweep().runs[0].dir)) == 1


def test_a_changed_config_is_refused_and_hurts_no_other_run(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:steps"), [1, 2])
    path = folder.config(folder.sweep().runs[0].dir)
    path.write_text(path.read_text().replace("steps: 5", "steps: 6"))
    assert code(job(folder, batch(folder).id)) == 1
    assert "was changed" in result(folder, 0).error and result(folder, 1).state is State.completed


def test_a_job_that_imports_other_code_than_the_copy_is_refused(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:steps"), [1])
    (folder.code / "src" / "trimtab").mkdir(parents=True)
    one = job(folder, batch(folder).id)
    assert "not the sweep's copy" in ended(one) and one.returncode == 2


@pytest.mark.parametrize("program", ["nowhere:run", "program:nothing", "broken:run"])
def test_a_program_that_does_not_load_fails_each_run(tmp_path: Path, program: str) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('broken')")
    folder = sweep(tmp_path / "s", spec_of(program), [1, 2])
    assert code(job(folder, batch(folder).id, PYTHONPATH=f"{SEARCH}:{tmp_path}")) == 1
    words = {"nowhere:run": "No module named 'nowhere'", "program:nothing": "has no 'nothing'", "broken:run": "broken"}
    assert all(words[program] in result(folder, i).error for i in range(2))
    assert words[program] in log(folder, 1)


# -- under SLURM, by a stub of scontrol ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "state", "requeued"),
    [
        ("JobState=RUNNING PreemptTime=2026-01-01T00:00:00 EndTime=2026-01-01T00:00:10", "preempted", True),
        ("JobState=RUNNING PreemptTime=None EndTime=2020-01-01T00:00:00", "timed_out", True),
        ("JobState=RUNNING PreemptTime=None EndTime=2999-01-01T00:00:00", "preempted", True),
        ("JobState=CANCELLED PreemptTime=None EndTime=2020-01-01T00:00:00", "preempted", False),
        ("JobState=COMPLETING PreemptTime=None EndTime=2020-01-01T00:00:00", "preempted", False),
    ],
)
def test_a_stopped_job_is_requeued_unless_it_was_cancelled(
    tmp_path: Path, fields: str, state: str, requeued: bool
) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:steps"), [1], steps=100, overrides=["tick=0.05"])
    one = job(folder, batch(folder, cluster="alpha").id, **slurm(tmp_path, fields))
    until(lambda: "step 2 " in log(folder))
    one.send_signal(signal.SIGUSR2)
    ended(one)
    assert one.returncode == 75 and result(folder, 0).state.value == state
    assert ("requeue 12" in (tmp_path / "calls").read_text()) is requeued


def test_retries_end(tmp_path: Path) -> None:
    retries = replace(RetrySpec(), preempted=1)
    spec = spec_of("program:steps", replace(LaunchSpec(), retries=retries))
    folder = sweep(tmp_path / "s", spec, [1], steps=100, overrides=["tick=0.05"])
    only = batch(folder, cluster="alpha").id
    stub = slurm(tmp_path, "JobState=RUNNING PreemptTime=None EndTime=2999-01-01T00:00:00")
    for restart in ("0", "1"):
        seen = log(folder).count("step ")
        one = job(folder, only, **stub, SLURM_RESTART_COUNT=restart)
        until(lambda seen=seen: log(folder).count("step ") > seen)  # type: ignore[misc]
        one.send_signal(signal.SIGTERM)
        ended(one)
        assert one.returncode == 75
    assert (tmp_path / "calls").read_text().count("requeue") == 1
    third = job(folder, only, **stub, SLURM_RESTART_COUNT="2")  # SLURM requeued it once more by itself
    assert "ended as preempted before this restart" in ended(third) and third.returncode == 75


def test_a_failed_run_is_not_started_again_by_a_requeue(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:odd_seeds_fail"), [1, 2])
    only = batch(folder, cluster="alpha").id
    stub = slurm(tmp_path, "JobState=RUNNING")
    assert code(job(folder, only, **stub)) == 1
    assert code(job(folder, only, **stub, SLURM_RESTART_COUNT="1")) == 1
    assert len(history(folder, folder.sweep().runs[0].dir)) == 1


NOW = datetime(2026, 1, 1, 12).timestamp()


@pytest.mark.parametrize(
    ("job_fields", "end", "expected"),
    [
        ({"JobState": "RUNNING", "PreemptTime": "None", "EndTime": "2026-01-01T12:02:00"}, "", State.timed_out),
        ({"JobState": "RUNNING", "PreemptTime": "None", "EndTime": "2026-01-01T12:20:00"}, "", State.preempted),
        ({"JobState": "RUNNING", "PreemptTime": "2026-01-01T11:59:59", "EndTime": "2026-01-01T12:00:10"}, "",
         State.preempted),
        ({"JobState": "TIMEOUT", "PreemptTime": "None", "EndTime": "2026-01-01T12:00:00"}, "", State.timed_out),
        ({"JobState": "CANCELLED"}, "", State.cancelled),
        ({"JobState": "COMPLETING", "EndTime": "2026-01-01T12:00:00"}, "", State.cancelled),
        ({}, str(NOW + 100), State.timed_out),
        ({}, str(NOW + 1000), State.preempted),
        ({}, "", State.preempted),
        ({"JobState": "RUNNING", "EndTime": "Unknown"}, "", State.preempted),
    ],
)  # fmt: skip
def test_why_a_job_is_to_stop(job_fields: dict[str, str], end: str, expected: State) -> None:
    assert node.cause_of(job_fields, end, 120, NOW) is expected


def test_the_result_is_json_of_plain_words(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:odd_seeds_are_refused"), [1])
    assert code(job(folder, batch(folder).id)) == 1
    found = json.loads((run_dir(folder, 0) / "result.json").read_text())
    assert (found["state"], found["error"], found["objective"]) == ("failed", "TrimtabError: seed=1 is odd", None)
    assert "Traceback" not in log(folder) and "error: seed=1 is odd" in log(folder)


@pytest.mark.parametrize("there", [True, False])
def test_relative_paths_mean_the_folder_in_which_the_sweep_was_started(tmp_path: Path, there: bool) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:where"), [1])
    home = tmp_path / "home"
    if there:
        home.mkdir()
    folder.write_sweep(replace(folder.sweep(), code={"cwd": str(home)}))
    assert code(job(folder, batch(folder).id)) == 0
    assert (run_dir(folder, 0) / "cwd.txt").read_text() == str(home if there else Path.cwd())
