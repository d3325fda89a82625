"""Runs of a sweep as processes of this machine: the jobs of SLURM without SLURM.

Each job holds a lock beside its batch while it or one of its runs lives, whoever started it: the command that is given
again after a ``kill -9`` waits for those, and starts only what is missing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.errors import Preempted
from trimtab.launch.attempts import hold
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Batch, PlannedRun, Result, Slot, State
from trimtab.launch.retry import allowed
from trimtab.launch.stop import Asked, blocked
from trimtab.spec.launch import SweepSpec

POLL = 0.05


def lock_of(folder: SweepFolder, batch: Batch) -> Path:
    """What a local job holds while it lives."""
    return folder.batches / f"{batch.id}.lock"


def live(folder: SweepFolder, batch: Batch) -> bool:
    """Whether a local job, or a run that outlived it, is still there."""
    if batch.cluster != "local" or not lock_of(folder, batch).exists():
        return False
    handle = hold(lock_of(folder, batch))
    if handle is None:
        return True
    os.close(handle)
    return False


def carry_out(folder: SweepFolder, runs: Sequence[PlannedRun], spec: SweepSpec, say: Callable[[str], None]) -> None:
    """Carry out what is not completed; each run's end is in its result. Preempted once a signal asked to stop."""
    with Asked() as asked:
        Local(folder, runs, spec, say, asked).carry_out()
    if asked.names:
        raise Preempted(f"{asked.names[0]}: the sweep was stopped; the same command goes on with it")


@dataclass
class Job:
    """A job and the runs it carries out; ``process``: None when another command started it."""

    batch: Batch
    process: subprocess.Popen[bytes] | None
    begun: float


class Local:
    """The loop over jobs: start, watch, start again."""

    def __init__(
        self, folder: SweepFolder, runs: Sequence[PlannedRun], spec: SweepSpec, say: Callable[[str], None], asked: Asked
    ) -> None:
        self._folder, self._runs, self._spec, self._say, self._asked = folder, runs, spec, say, asked
        self._attempts: Counter[str] = Counter()
        self._causes: dict[str, Counter[State]] = {run.dir: Counter() for run in runs}
        self._jobs: list[Job] = []
        self._classes = {run.dir: run.resources for run in runs}
        self._obeyed = 0
        self._failed = False
        self._ends = folder.asked_to_end()

    def carry_out(self) -> None:
        """Until every run has ended for good, or a signal has ended them all."""
        for batch in self._folder.all_batches() if self._folder.batches.exists() else []:
            for slot in batch.slots if not batch.refused else ():
                self._attempts |= Counter(dict(slot.runs))
            if live(self._folder, batch):
                self._jobs.append(Job(batch, None, time.time()))
                self._say(f"{', '.join(_names(batch))}: still running (process {batch.job}), is waited for")
        taken = {run for job in self._jobs for run in _names(job.batch)}
        waiting = deque(
            self._slots([run for run in self._runs if run.dir not in taken and not self._completed(run.dir)])
        )
        while self._jobs or waiting:
            if self._asked.names or (self._failed and self._spec.launch.fail_fast) or self._cancelled():
                waiting.clear()
            while waiting and len(self._jobs) < max(self._spec.launch.at_once, 1):
                self._jobs.append(self._start(waiting.popleft()))
            self._obey()
            over = [job for job in self._jobs if self._over(job)]
            self._jobs = [job for job in self._jobs if job not in over]
            for job in over:
                waiting.extend((run,) for run in self._tell(job))
            if not over:
                time.sleep(POLL)

    def _cancelled(self) -> bool:
        """Whether somebody has cancelled the whole sweep since this began."""
        return self._folder.asked_to_end() != self._ends

    def _completed(self, run: str) -> bool:
        result = self._folder.result(run)
        return result is not None and result.state is State.completed

    def _slots(self, runs: Sequence[PlannedRun]) -> Iterator[tuple[str, ...]]:
        """Runs that share a job: as many as wanted, of one class of resources."""
        each = max(self._spec.runs_per_job, 1)
        for resources in dict.fromkeys(run.resources for run in runs):
            alike = [run.dir for run in runs if run.resources == resources]
            yield from (tuple(alike[i : i + each]) for i in range(0, len(alike), each))

    def _start(self, runs: Sequence[str]) -> Job:
        self._attempts.update(runs)
        slot = Slot(tuple((run, self._attempts[run]) for run in runs))
        batch = self._folder.new_batch("local", self._classes[runs[0]], [slot])
        lock = hold(lock_of(self._folder, batch))
        assert lock is not None, "a new batch's lock is free"
        command = (sys.executable, "-u", "-P", "-m", "trimtab.launch.job", str(self._folder.path.absolute()), batch.id)
        with self._folder.log(batch.id, 0).open("ab") as log, blocked():
            process = subprocess.Popen(
                command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                pass_fds=[lock], start_new_session=True,
            )  # fmt: skip
        os.close(lock)  # the job has its own
        batch = self._folder.write_batch(replace(batch, job=str(process.pid)))
        for run, attempt in slot.runs:
            self._say(f"{run}: attempt {attempt}, process {process.pid}")
        return Job(batch, process, time.time())

    def _environment(self) -> dict[str, str]:
        """The shell's, with what the sweep has kept of it, and the copied code first."""
        kept = dict(self._folder.sweep().environment)
        own = kept.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        copy = self._folder.code / "src"
        path = [str(copy.absolute())] if copy.is_dir() else []
        return os.environ | kept | {"PYTHONPATH": os.pathsep.join([*path, *([own] if own else [])])}

    def _over(self, job: Job) -> bool:
        if job.process is not None and job.process.poll() is None:
            return False
        return not live(self._folder, job.batch)  # a run may outlive its supervisor

    def _obey(self) -> None:
        """Pass signals on; the second one ends the jobs at once."""
        for _ in self._asked.names[self._obeyed :]:
            self._obeyed += 1
            if self._obeyed == 1:
                self._say("stopping: the runs save and end; a second signal ends them at once")
            for job in self._jobs:
                _signal(job, signal.SIGTERM if self._obeyed == 1 else signal.SIGKILL)

    def _tell(self, job: Job) -> list[str]:
        """Say how the job's runs ended; those that are to be started again."""
        again = []
        for run in _names(job.batch):
            result = self._folder.result(run)
            ours = result if result is not None and result.batch == job.batch.id else None
            if ours is None and self._completed(run):
                continue
            state = ours.state if ours is not None else State.lost
            if state is State.completed and ours is not None:
                self._say(f"{run}: completed{_objective(ours)} ({ours.ended - ours.started:.1f} s)")
                continue
            if state in (State.preempted, State.lost) and self._folder.cancel_mark(job.batch.id, 0).exists():
                self._say(f"{run}: cancelled by trimtab sweep cancel")
                continue
            self._causes.setdefault(run, Counter())[state] += 1
            retry = not self._asked.names and allowed(self._causes[run], self._spec.launch.retries, state)
            error = ours.error if ours is not None else self._silent(job)
            self._say(f"{run}: {state.value}: {error}{'; starts again' if retry else ''}")
            if retry:
                again.append(run)
            else:
                self._failed = True
        return again

    def _silent(self, job: Job) -> str:
        last = self._folder.last_words(job.batch.id, 0)
        said = f", whose last line is: {last}" if last else ""
        return f"its job ended without a result; see {self._folder.log(job.batch.id, 0)}{said}"


def _names(batch: Batch) -> list[str]:
    return [run for slot in batch.slots for run, _ in slot.runs]


def _objective(result: Result) -> str:
    return "" if result.objective is None else f", objective {result.objective:g}"


def _signal(job: Job, number: signal.Signals) -> None:
    """To the job, which tells its runs; to all of its session to end it at once, or where it may be gone."""
    with suppress(ProcessLookupError):
        if job.process is not None and job.process.poll() is None and number != signal.SIGKILL:
            job.process.send_signal(number)
        elif pid := job.process.pid if job.process is not None else int(job.batch.job or 0):
            os.killpg(pid, number)
