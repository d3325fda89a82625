"""Ending a sweep's jobs: the right ones, on the right cluster, and none of anybody else's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from trimtab.errors import TrimtabError
from trimtab.files import write_text
from trimtab.launch import local
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Batch, RunStatus, State
from trimtab.launch.queued import Queued, queued
from trimtab.launch.states import Row, state_of
from trimtab.launch.status import LOCAL, is_process_of

# Seconds in which jobs may save and end (a site's KillWait is 30), and one that is requeued meanwhile is ended again.
PATIENCE, POLL, LOOKS = 45.0, 1.0, 3


class Ends(Protocol):
    """What cancelling needs of a cluster."""

    def squeue(self) -> Sequence[Row]:
        """Every job of this user that has not ended."""

    def scancel(self, job: str) -> object:
        """End ``12``, or ``12_3``. TrimtabError when it refuses or cannot be reached."""


@dataclass(frozen=True)
class Choice:
    """Which jobs are meant. ``wanted``: runs, ``jobs``: jobs by name (``a:12_3``); both empty: every job of the sweep,
    also one whose runs have all ended. Of these only what has not begun (``pending``), or in which a run ``failed``.
    """

    runs: Sequence[RunStatus]
    wanted: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()
    pending: bool = False
    failed: bool = False

    @property
    def everything(self) -> bool:
        """Whether nothing was chosen: the sweep as a whole is to end."""
        return not (self.wanted or self.jobs or self.pending or self.failed)

    def concerns(self, batch: Batch) -> bool:
        """Whether jobs of the batch may be meant."""
        inside = {run for slot in batch.slots for run, _ in slot.runs}
        named = any(job in (name := f"{batch.cluster}:{batch.job}") or job.startswith(f"{name}_") for job in self.jobs)
        return not (self.wanted or self.jobs) or bool(inside & self.wanted) or named

    def of(self, there: Sequence[Queued], outcome: Outcome) -> list[Queued]:
        """The jobs that are meant, of those that are there; ``outcome`` gets a word on each that other runs need."""
        now = {run.run.dir: run for run in self.runs}
        chosen = []
        for job in there:
            inside = [run for run, _ in job.runs if run in self.wanted]
            if (self.wanted or self.jobs) and not (inside or job.name in self.jobs):
                continue
            if self.pending and state_of(job.row.word) is not State.pending:
                continue
            if self.failed and not any(_failed(now.get(run), attempt) for run, attempt in job.runs):
                continue
            others = [run for run in job.unfinished(now) if run not in self.wanted]
            if self.wanted and job.name not in self.jobs and others:
                outcome.left.append(f"{job}: {', '.join(inside)} shares it with {', '.join(others)}; choose those too")
            else:
                chosen.append(job)
        return chosen


def _failed(run: RunStatus | None, attempt: int) -> bool:
    return run is not None and run.attempt == attempt and run.state is State.failed


@dataclass
class Outcome:
    """What was ended, what could not be, and what was left as other runs need it."""

    ended: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def cancel(
    folder: SweepFolder, choice: Choice, clusters: Mapping[str, Ends], dry_run: bool = False, patience: float = PATIENCE
) -> Outcome:
    """End the jobs that are meant and there, on all clusters at once. What its cluster requeues is ended again."""
    if choice.everything and not dry_run:
        folder.ask_to_end()
    batches: dict[str, list[Batch]] = {}
    for batch in folder.all_batches() if folder.batches.exists() else []:
        if not batch.refused and choice.concerns(batch):
            batches.setdefault(batch.cluster, []).append(batch)

    def end(name: str) -> Outcome:
        outcome = Outcome()
        if name == LOCAL:
            _local(folder, choice, batches[name], dry_run, outcome)
        elif name in clusters:
            try:
                _slurm(folder, choice, batches[name], clusters[name], dry_run, patience, outcome)
            except TrimtabError as error:
                outcome.failed.append(f"{name}: {error}")
        elif left := [run for run in choice.runs if run.cluster == name and run.state.live]:
            outcome.failed.append(f"{name} is not among launch.clusters: the jobs of {len(left)} runs are left")
        return outcome

    total = Outcome()
    with ThreadPoolExecutor(max(len(batches), 1)) as pool:
        for one in pool.map(end, batches):
            total.ended += one.ended
            total.failed += one.failed
            total.left += one.left
    return total


def _local(folder: SweepFolder, choice: Choice, batches: Sequence[Batch], dry_run: bool, outcome: Outcome) -> None:
    there = [Queued(batch, Row(batch.job, None, "RUNNING")) for batch in batches
             if batch.job is not None and (is_process_of(batch) or local.live(folder, batch))]  # fmt: skip
    for job in choice.of(there, outcome):
        if not dry_run:
            write_text(folder.cancel_mark(job.batch.id, 0), "")
            pid = int(job.row.job)
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
    folder: SweepFolder, choice: Choice, batches: Sequence[Batch], cluster: Ends, dry_run: bool, patience: float,
    outcome: Outcome,
) -> None:  # fmt: skip
    rows = cluster.squeue()
    chosen = choice.of(queued(rows, batches), outcome)
    if chosen and not dry_run:
        for job in chosen:
            write_text(folder.cancel_mark(job.batch.id, job.slot), "")
        _scancel(chosen, rows, cluster)
        outcome.failed += [f"{job}: cancelled, but still {job.row.word} after {patience:.0f} s"
                           for job in _see_end(chosen, batches, cluster, patience)]  # fmt: skip
    outcome.ended += [str(job) for job in chosen]


def _see_end(jobs: Sequence[Queued], batches: Sequence[Batch], cluster: Ends, patience: float) -> list[Queued]:
    """Wait until the queue holds none of them, and end again what comes back into it; those that are left.

    Gone is what some looks in a row miss: a job that requeues itself as it ends is away for a moment.
    """
    names = {job.name for job in jobs}
    until, missed = time.monotonic() + patience, 0
    while True:
        rows = cluster.squeue()
        left = [job for job in queued(rows, batches) if job.name in names]
        missed = 0 if left else missed + 1
        if missed >= LOOKS or time.monotonic() > until:
            return left
        if back := [job for job in left if state_of(job.row.word) is State.pending]:
            _scancel(back, rows, cluster)
        time.sleep(POLL)


def _scancel(jobs: Sequence[Queued], rows: Sequence[Row], cluster: Ends) -> None:
    """One call for a whole array, one for each other job."""
    by_number: dict[str, list[Row]] = {}
    for job in jobs:
        by_number.setdefault(job.row.job, []).append(job.row)
    for number, chosen in by_number.items():
        if len(chosen) == sum(row.job == number for row in rows):
            cluster.scancel(number)
        else:
            for row in chosen:
                cluster.scancel(number if row.index is None else f"{number}_{row.index}")
