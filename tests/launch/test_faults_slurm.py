"""What goes wrong on a real SLURM: everything killed, a controller away, suspensions, memory, books that are closed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launch.made import result
from launch.on_slurm import completed, gone, log, prepared, sent, starts_of, wait

from trimtab.launch.attempts import history
from trimtab.launch.clusters import Cluster
from trimtab.launch.files import SweepFolder
from trimtab.launch.follow import clusters_of, follow
from trimtab.launch.model import Batch, RunStatus, State
from trimtab.launch.status import GRACE, Survey, statuses
from trimtab.launch.submit import submit
from trimtab.spec.launch import SweepSpec

if TYPE_CHECKING:
    from launch.conftest import Slurm

pytestmark = pytest.mark.slurm


def processes(slurm: Slurm, batch: Batch) -> list[int]:
    """All that run for a batch's job, but SLURM's own."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            around = (folder / "environ").read_bytes().split(b"\0")
            ours = f"SLURM_JOB_ID={batch.job}".encode() in around and str(slurm.state).encode() in b"".join(around)
            if ours and "slurmstepd" not in (folder / "comm").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def followed(folder: SweepFolder, spec: SweepSpec, seconds: float = 60) -> list[RunStatus]:
    """What ``wait=true`` finds in the end."""
    end = time.monotonic() + seconds

    def show(seen: Survey) -> None:
        assert time.monotonic() < end, f"not over: {[(run.state, run.reason) for run in seen.runs]}"

    return follow(folder, spec, show, pause=lambda _: time.sleep(0.5))


def now(folder: SweepFolder, spec: SweepSpec) -> RunStatus:
    """The first run's status."""
    return statuses(folder, clusters_of(spec))[0]


def test_a_job_of_which_every_process_is_killed_is_started_again(slurm: Slurm, tmp_path: Path) -> None:
    folder, spec = prepared(slurm, tmp_path / "s", "program:steps", [1], steps=20, overrides=["tick=0.2"])
    batch = sent(folder, spec)
    wait(lambda: "step 7 " in log(folder), 30, "seventh step")
    for pid in processes(slurm, batch):
        os.kill(pid, signal.SIGKILL)
    (run,) = followed(folder, spec)
    assert (run.state, run.attempt, run.objective) == (State.completed, 2, 20 * 21 / 2)
    assert run.causes == {"lost": 1}, run
    assert starts_of(folder) == [0, 5]


def test_a_controller_that_is_away_while_a_run_ends(slurm: Slurm, tmp_path: Path) -> None:
    folder, spec = prepared(slurm, tmp_path / "s", "program:steps", [1], steps=30, overrides=["tick=0.1"])
    sent(folder, spec)
    wait(lambda: "step 7 " in log(folder), 30, "seventh step")
    slurm.stop("alpha", signal.SIGTERM)  # killed at once it may forget the job, and use its number again
    wait(lambda: folder.result(folder.sweep().runs[0].dir) is not None, 20, "result")
    begin = time.monotonic()
    assert now(folder, spec).state is State.completed  # its own word counts, though nobody can ask
    assert time.monotonic() - begin < 12
    slurm.start("alpha")
    slurm.ready("alpha")
    (run,) = followed(folder, spec)
    assert (run.state, run.attempt, run.objective) == (State.completed, 1, 30 * 31 / 2)
    assert starts_of(folder) == [0]


def test_a_suspended_job_has_not_ended_and_may_be_requeued(slurm: Slurm, tmp_path: Path) -> None:
    folder, spec = prepared(slurm, tmp_path / "s", "program:steps", [1], steps=30, overrides=["tick=0.2"])
    batch = sent(folder, spec)
    wait(lambda: "step 7 " in log(folder), 30, "seventh step")
    slurm.client("alpha", "scontrol", "suspend", str(batch.job))
    assert now(folder, spec).state is State.suspended
    slurm.client("alpha", "scontrol", "requeue", str(batch.job))
    wait(lambda: now(folder, spec).state is State.pending, 20, "requeue")
    assert now(folder, spec).reason == "JobHeldAdmin"  # SLURM holds what was suspended when it was requeued
    slurm.client("alpha", "scontrol", "release", str(batch.job))
    completed(slurm, folder, batch, seconds=60)
    assert result(folder, 0).objective == 30 * 31 / 2 and starts_of(folder)[1] >= 5
    assert [one.state for one in history(folder, folder.sweep().runs[0].dir)].count(State.completed) == 1


def test_books_that_are_closed_keep_nothing_from_going_on(slurm: Slurm, tmp_path: Path) -> None:
    """slurmdbd is down: sacct says nothing, and the queue and the results have to do."""
    folder, spec = prepared(slurm, tmp_path / "s", "program:steps", [1], steps=20, overrides=["tick=0.2"])
    batch = sent(folder, spec)
    wait(lambda: "step 7 " in log(folder), 30, "seventh step")
    slurm.stop("slurmdbd")
    assert now(folder, spec).state is State.running
    assert not submit(folder, spec, folder.sweep().runs, print)  # it runs: resume leaves it alone
    for pid in processes(slurm, batch):
        os.kill(pid, signal.SIGKILL)
    wait(lambda: gone(slurm), 20, "end of the job")
    folder.write_batch(replace(batch, created=batch.created - GRACE))  # else it is not missed yet
    (run,) = followed(folder, spec)
    assert (run.state, run.attempt, run.objective) == (State.completed, 2, 20 * 21 / 2)


@pytest.mark.parametrize("name", ["TERM", "USR2"])
def test_a_signal_while_the_interpreter_starts_is_not_lost(slurm: Slurm, tmp_path: Path, name: str) -> None:
    """With several tasks that is srun's: TERM kills what it is starting (the run is lost), USR2 is dropped."""
    folder, spec = prepared(slurm, tmp_path / "s", "program:steps", [1])
    batch = sent(folder, spec)
    wait(lambda: processes(slurm, batch), 30, "first process", 0.01)
    Cluster("alpha", spec.launch.clusters["alpha"]).scancel(str(batch.job), signal=name)
    completed(slurm, folder, batch, seconds=60)
    said = folder.log(batch.id, 0).read_text()
    assert f"{name}: the runs save and end" in said and "requeued: its next start goes on" in said
    assert [one.state for one in history(folder, folder.sweep().runs[0].dir)][-1] is State.completed
