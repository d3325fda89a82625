"""Ending a sweep's jobs: the right ones, on the right cluster, and none of anybody else's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trimtab.errors import TrimtabError
from trimtab.files import write_text
from trimtab.launch import local
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Batch, RunStatus, State
from trimtab.launch.states import Row, state_of
from trimtab.launch.status import LOCAL, all_submissions, cancel_mark, is_process_of

# Seconds in which jobs may save and end (a site's KillWait is 30), and one that is requeued meanwhile is ended again.
PATIENCE, POLL, LOOKS = 45.0, 1.0, 3


class Ends(Protocol):
    """What cancelling needs of a cluster."""

    def squeue(self) -> Sequence[Row]:
        """Every job of this user that has not ended."""

    def scancel(self, job: str) -> object:
        """End ``12``, or ``12_3``. TrimtabError when it refuses or cannot be reached."""


@dataclass(frozen=True)
class Job:
    """A slot of a batch."""

    batch: Batch
    slot: int

    def __str__(self) -> str:
        index = f"_{self.slot}" if self.batch.array else ""
        return f"{self.batch.cluster}:{self.batch.job}{index} ({', '.join(run for run, _ in self.runs)})"

    @property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """(run, attempt) of its runs."""
        return self.batch.slots[self.slot].runs


@dataclass
class Outcome:
    """What was ended, and what could not be."""

    ended: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def choose(
    folder: SweepFolder, runs: Sequence[RunStatus], wanted: Collection[str], pending: bool = False, failed: bool = False
) -> tuple[list[Job], list[str]]:
    """The jobs to end, and a word on each that is left alone though it carries a wanted run.

    Jobs of earlier attempts are among them: they may still be there. Those that have ended are sorted out by the
    cluster's queue (``cancel``).
    """
    now = {run.run.dir: run for run in runs}
    jobs = {Job(one.batch, one.slot): None for of in all_submissions(folder).values() for one in of}
    chosen, said = [], []
    for job in jobs:
        states = [now[run].state for run, attempt in job.runs if run in now and now[run].attempt == attempt]
        inside = [run for run, _ in job.runs if run in wanted]
        unfinished = [run for run, attempt in job.runs if run in now and _going(now[run], attempt)]
        if not inside or (states and State.unknown not in states and not any(state.live for state in states)):
            continue
        if pending and not all(state is State.pending for state in states if state.live):
            continue
        if failed and State.failed not in states:
            continue
        if others := [run for run in unfinished if run not in wanted]:
            said.append(f"{job}: {', '.join(inside)} shares it with {', '.join(others)}; choose those too")
        else:
            chosen.append(job)
    return chosen, said


def _going(run: RunStatus, attempt: int) -> bool:
    return run.attempt == attempt and run.state.live


def cancel(
    folder: SweepFolder, jobs: Sequence[Job], clusters: Mapping[str, Ends], dry_run: bool = False,
    patience: float = PATIENCE,
) -> Outcome:  # fmt: skip
    """End the jobs that are there. A job that its cluster requeues meanwhile is ended again."""
    outcome = Outcome()
    for name in dict.fromkeys(job.batch.cluster for job in jobs):
        of = [job for job in jobs if job.batch.cluster == name]
        if name == LOCAL:
            _local(folder, of, dry_run, outcome)
        elif name not in clusters:
            outcome.failed.append(f"{name} is not among launch.clusters: {len(of)} jobs are left")
        else:
            try:
                _slurm(folder, of, clusters[name], dry_run, patience, outcome)
            except TrimtabError as error:
                outcome.failed.append(f"{name}: {error}")
    return outcome


def _local(folder: SweepFolder, jobs: Sequence[Job], dry_run: bool, outcome: Outcome) -> None:
    for job in jobs:
        if job.batch.job is None or not (is_process_of(job.batch) or local.live(folder, job.batch)):
            continue
        if not dry_run:
            write_text(folder.batches / cancel_mark(job.batch, job.slot), "")
            pid = int(job.batch.job)
            try:
                if is_process_of(job.batch):
                    os.kill(pid, signal.SIGTERM)  # it tells its runs
                else:
                    os.killpg(pid, signal.SIGTERM)  # it is gone, but a run of its group still holds its lock
            except (ProcessLookupError, PermissionError) as error:
                outcome.failed.append(f"{job}: {error}")
                continue
        outcome.ended.append(str(job))


def _slurm(
    folder: SweepFolder, jobs: Sequence[Job], cluster: Ends, dry_run: bool, patience: float, outcome: Outcome
) -> None:
    rows = cluster.squeue()
    there = {job: row for job in jobs if (row := _row(rows, job)) is not None}
    if not dry_run:
        for job in there:
            write_text(folder.batches / cancel_mark(job.batch, job.slot), "")
        _scancel(there, rows, cluster)
        if left := _see_end(there, cluster, patience):
            outcome.failed += [
                f"{job}: cancelled, but still {row.word} after {patience:.0f} s" for job, row in left.items()
            ]
    for job, row in there.items():
        index = f"_{row.index}" if row.index is not None else ""
        outcome.ended.append(f"{job.batch.cluster}:{row.job}{index} ({', '.join(run for run, _ in job.runs)})")


def _see_end(jobs: Mapping[Job, Row], cluster: Ends, patience: float) -> Mapping[Job, Row]:
    """Wait until the queue holds none of them, and end again what comes back into it; those that are left.

    Gone is what some looks in a row miss: a job that requeues itself as it ends is away for a moment.
    """
    until, missed = time.monotonic() + patience, 0
    while True:
        rows = cluster.squeue()
        found = {job: _row(rows, job) for job in jobs}
        left = {job: row for job, row in found.items() if row is not None}
        missed = 0 if left else missed + 1
        if missed >= LOOKS or time.monotonic() > until:
            return left
        if back := {job: row for job, row in left.items() if state_of(row.word) is State.pending}:
            _scancel(back, rows, cluster)
        time.sleep(POLL)


def _row(rows: Sequence[Row], job: Job) -> Row | None:
    found = [row for row in rows if row.is_of(job.batch, job.slot) and state_of(row.word).live]
    return found[-1] if found else None


def _scancel(jobs: Mapping[Job, Row], rows: Sequence[Row], cluster: Ends) -> None:
    """One call for a whole array, one for each other job."""
    by_number: dict[str, list[Row]] = {}
    for row in jobs.values():
        by_number.setdefault(row.job, []).append(row)
    for number, chosen in by_number.items():
        if len(chosen) == sum(row.job == number for row in rows):
            cluster.scancel(number)
        else:
            for row in chosen:
                cluster.scancel(number if row.index is None else f"{number}_{row.index}")
