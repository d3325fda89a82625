"""The runs of a sweep as they are now: one squeue and one sacct call a cluster, merged with what lies in the folder."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trimtab.errors import DataError, TrimtabError
from trimtab.files import write_text
from trimtab.launch import local
from trimtab.launch.attempts import history
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Batch, PlannedRun, Result, RunStatus, State
from trimtab.launch.queued import queued
from trimtab.launch.states import Books, Row, cause_of, job_state, run_state, state_of, tells_of_memory

LOCAL = "local"
GRACE = 60.0  # seconds after its submission in which a job is not missed
PATIENCE = 2.0  # seconds before a job that seems lost is asked for once more
WORDS = 160  # characters of a client's complaint; slurmdbd's alone fill a screen


class Client(Protocol):
    """What the states need of a cluster; each call raises TrimtabError when it cannot be reached."""

    def squeue(self) -> Sequence[Row]:
        """Every job of this user that has not ended, one row for each index of an array."""

    def sacct(self, jobs: Sequence[str]) -> Sequence[Row]:
        """Every start of these jobs, oldest first (``-D``)."""


@dataclass(frozen=True)
class Submission:
    """One attempt of a run: a slot of a batch."""

    batch: Batch
    slot: int
    attempt: int

    @property
    def job(self) -> str:
        """As SLURM writes it: 12 or 12_3."""
        return "" if self.batch.job is None else f"{self.batch.job}_{self.slot}" if self.batch.array else self.batch.job


@dataclass
class Listing:
    """A cluster's answers."""

    queue: list[Row] = field(default_factory=list)
    books: list[Row] = field(default_factory=list)
    reachable: bool = True
    has_books: bool = True


@dataclass(frozen=True)
class Survey:
    """``runs``: one status a run, in the sweep's order; ``remarks``: clusters that did not answer; ``needless``: jobs
    that are still in a queue though no run needs them.
    """

    runs: list[RunStatus]
    remarks: list[str]
    needless: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """All that a person should know beside the runs."""
        return [*self.remarks, *self.needless]


def statuses(folder: SweepFolder, clusters: Mapping[str, Client]) -> list[RunStatus]:
    """The status of every distinct run."""
    return survey(folder, clusters).runs


def survey(folder: SweepFolder, clusters: Mapping[str, Client], patience: float = PATIENCE) -> Survey:
    """The statuses, and what could not be found out. Jobs that seem lost are asked for twice, ``patience`` apart."""
    found = _survey(folder, clusters)
    if any(run.state is State.lost and run.cluster != LOCAL for run in found.runs):
        time.sleep(patience)  # squeue forgets a job before sacct and a shared file system know how it ended
        found = _survey(folder, clusters)
    return found


def _survey(folder: SweepFolder, clusters: Mapping[str, Client]) -> Survey:
    submissions = all_submissions(folder)
    jobs: dict[str, set[str]] = {}
    for attempts in submissions.values():
        for one in attempts:
            if one.batch.cluster != LOCAL:
                jobs.setdefault(one.batch.cluster, set()).update([one.batch.job] if one.batch.job else [])
    listings, remarks = _ask_all(clusters, {name: sorted(numbers, key=int) for name, numbers in jobs.items()})
    look = Look(folder, listings, time.time())
    runs = [look.at(run, submissions.get(run.dir, [])) for run in folder.sweep().runs]
    return Survey(runs, remarks, _needless(folder, listings, runs))


def _needless(folder: SweepFolder, listings: Mapping[str, Listing], runs: Sequence[RunStatus]) -> list[str]:
    """Jobs that wait in a queue for nothing: a restarted controller may hold a job whose runs have all ended."""
    now = {run.run.dir: run for run in runs}
    batches, said = folder.all_batches(), []
    for name, listing in listings.items():
        waiting = [job for job in queued(listing.queue, [batch for batch in batches if batch.cluster == name])
                   if state_of(job.row.word) in (State.pending, State.suspended) and not job.needed(now)]  # fmt: skip
        if waiting:
            why = sorted({job_state(Books(job.row))[1] or job.row.word for job in waiting})
            jobs = ", ".join(job.name for job in waiting[:5]) + (" …" if len(waiting) > 5 else "")
            many = "1 job is" if len(waiting) == 1 else f"{len(waiting)} jobs are"
            said.append(f"{many} in the queue that no run needs: {jobs} ({'; '.join(why)}); trimtab sweep cancel ends "
                        f"{'it' if len(waiting) == 1 else 'them'}")  # fmt: skip
    return said


def all_submissions(folder: SweepFolder) -> dict[str, list[Submission]]:
    """Each run's submissions that were not refused, in order."""
    found: dict[str, list[Submission]] = {}
    for batch in folder.all_batches():
        for i, slot in enumerate(() if batch.refused else batch.slots):
            for run, attempt in slot.runs:
                found.setdefault(run, []).append(Submission(batch, i, attempt))
    return {run: sorted(attempts, key=lambda one: one.attempt) for run, attempts in found.items()}


def _ask_all(clusters: Mapping[str, Client], jobs: Mapping[str, Sequence[str]]) -> tuple[dict[str, Listing], list[str]]:
    """Each cluster's answers, all at the same time: one that hangs costs its patience once."""
    if not jobs:
        return {}, []
    with ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(lambda name: _ask(name, clusters.get(name), jobs[name]), jobs))
    return {name: one for name, (one, _) in zip(jobs, found, strict=True)}, [text for _, said in found for text in said]


def _ask(name: str, cluster: Client | None, jobs: Sequence[str]) -> tuple[Listing, list[str]]:
    """squeue first: a job that has left the queue by then is in the books by the time that sacct is asked."""
    listing, remarks = Listing(), []
    if cluster is None:
        return Listing(reachable=False, has_books=False), [f"{name}: not among launch.clusters; its jobs stay unknown"]
    try:
        listing.queue = list(cluster.squeue())
    except TrimtabError as error:
        listing.reachable = False
        remarks.append(f"{name} cannot be reached: {_first(error)}; its jobs stay unknown")
    try:
        listing.books = list(cluster.sacct(jobs)) if jobs else []
    except TrimtabError as error:
        listing.has_books = False
        remarks.append(f"{name}: sacct does not answer: {_first(error)}")
    return listing, remarks


def _first(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= WORDS else line[:WORDS] + " …"


class Look:
    """Puts the parts together."""

    def __init__(self, folder: SweepFolder, listings: Mapping[str, Listing], now: float) -> None:
        self._folder, self._listings, self._now = folder, listings, now
        self._queue = {name: _by_job(listing.queue) for name, listing in listings.items()}
        self._books = {name: _by_job(listing.books) for name, listing in listings.items()}
        self._local: dict[str, bool] = {}

    def at(self, run: PlannedRun, attempts: Sequence[Submission]) -> RunStatus:
        """The run's status."""
        result, status = _result(self._folder, run.dir), _status(self._folder, run.dir)
        noted = _noted(self._folder, run.dir)
        step, reward = status.get("step"), status.get("reward")
        said: dict[str, Any] = {
            "step": step if isinstance(step, int) else None,
            "steps": status["steps"] if isinstance(status.get("steps"), int) else None,
            "reward": float(reward) if isinstance(reward, (int, float)) else None,
        }
        if not attempts:
            return RunStatus(run, State.unsubmitted, **said)
        last = attempts[-1]
        state, reason = run_state(last.batch, last.attempt, self._job(last, status), result, status)
        if state in (State.preempted, State.lost) and self._folder.cancel_mark(last.batch.id, last.slot).exists():
            state, reason = State.cancelled, "by trimtab sweep cancel"
        if state is State.lost and (words := self._folder.last_words(last.batch.id, last.slot)):
            state = State.out_of_memory if tells_of_memory(words) else state
            reason = f"{reason}; the last line of its job's log: {words}"
        causes = self._causes(run.dir, attempts, state, noted)
        log = self._folder.run(run.dir) / "log.txt"
        return RunStatus(
            run, state, last.attempt, last.batch.cluster, last.job, reason, **said,
            objective=result.objective if result is not None and state is State.completed else None,
            log=str(log if log.exists() else self._folder.log(last.batch.id, last.slot)),
            causes={state.value: count for state, count in sorted(causes.items(), key=lambda item: item[0].value)},
        )  # fmt: skip

    def _rows(self, of: Mapping[str, Mapping[str, list[Row]]], one: Submission) -> list[Row]:
        jobs = of.get(one.batch.cluster, {})
        if one.batch.job is None:
            rows = [row for job in jobs.values() for row in job]
        else:
            rows = jobs.get(f"{one.batch.job}_{one.slot}", [])
        return [row for row in rows if row.is_of(one.batch, one.slot)]

    def _job(self, one: Submission, status: Mapping[str, Any]) -> tuple[State, str]:
        batch = one.batch
        fresh = self._now - batch.created < GRACE
        if batch.cluster == LOCAL:
            return self._process(batch, fresh, status)
        listing = self._listings[batch.cluster]
        queued, kept = self._rows(self._queue, one), self._rows(self._books, one)
        if batch.job is None and not queued and listing.reachable and not fresh:
            return State.unsubmitted, "its submitter ended before the cluster answered"
        row = queued[-1] if queued else None
        return job_state(Books(row, kept[-1] if kept else None, listing.reachable, listing.has_books, fresh))

    def _process(self, batch: Batch, fresh: bool, status: Mapping[str, Any]) -> tuple[State, str]:
        """A local job: whether its process is there. One of another machine cannot be seen from here."""
        if batch.job is None:
            return (State.pending, "is being started") if fresh else (State.unsubmitted, "")
        host, updated = status.get("host"), status.get("updated")
        newer = isinstance(updated, (int, float)) and updated >= batch.created
        if newer and status.get("state") == "running" and host not in (None, socket.gethostname()):
            return State.unknown, f"runs on {host}; look there"
        if batch.id not in self._local:
            self._local[batch.id] = local.live(self._folder, batch) or is_process_of(batch)
        return (State.running, "") if self._local[batch.id] else (State.lost, "its process is gone without a result")

    def _causes(
        self, run: str, attempts: Sequence[Submission], state: State, noted: Mapping[int, State]
    ) -> Counter[State]:
        """How many starts ended for which cause, over all attempts and SLURM's own restarts of a job.

        A start tells its cause in the run's history; one that was killed can't, so the cluster's word is added, or the
        one noted when the run was resubmitted.
        """
        told: dict[int, Counter[State]] = {}
        for result in history(self._folder, run):
            told.setdefault(result.attempt, Counter())[result.state] += 1
        causes: Counter[State] = Counter()
        for one in attempts:
            last = state if one is attempts[-1] else noted.get(one.attempt)
            seen = Counter(self._ends(one))
            if last in (State.lost, State.out_of_memory) and seen[State.failed]:
                seen[State.failed] -= 1  # sacct has no other word for a job that was killed whole
            if last is not None and last in WHY and not seen[last]:
                seen[last] += 1
            mine = told.get(one.attempt, Counter())
            if not mine and last is not None and not seen:
                mine[last] += 1
            for cause in State:
                words = seen[cause] if cause in WHY or not mine else 0
                causes[cause] += max(mine[cause], words) if cause_of(cause) is not None else 0
        return +causes

    def _ends(self, one: Submission) -> list[State]:
        """How the starts of an attempt ended, as sacct has it: SLURM may have requeued its job."""
        rows = self._rows(self._books, one)
        found = [State.preempted if row.word.startswith("REQUEUE") else state_of(row.word) for row in rows]
        return [state for state in found if cause_of(state) is not None]


# What a start cannot tell of itself: it was killed.
WHY = (State.node_failed, State.out_of_memory, State.timed_out, State.lost)


def _by_job(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row.job}_{row.index or 0}", []).append(row)
    return found


def is_process_of(batch: Batch) -> bool:
    """Whether the batch's process lives; its command line names the batch, so a number used anew is no proof."""
    if batch.job is None:
        return False
    try:
        return batch.id.encode() in Path("/proc", batch.job, "cmdline").read_bytes()  # empty for a zombie
    except OSError:
        if Path("/proc/self").exists():
            return False
    shown = subprocess.run(["ps", "-ww", "-o", "stat=,args=", "-p", batch.job], capture_output=True, text=True)
    return batch.id in shown.stdout and not shown.stdout.lstrip().startswith("Z")


def _result(folder: SweepFolder, run: str) -> Result | None:
    try:
        return folder.result(run)
    except (DataError, ValueError, TypeError, KeyError):
        return None  # damaged: as if there were none, so the run is made again


def _status(folder: SweepFolder, run: str) -> dict[str, Any]:
    try:
        return folder.status(run)
    except DataError:
        return {}


# -- causes, kept for clusters whose books forget --------------------------------------------------------------------


def note_cause(folder: SweepFolder, status: RunStatus) -> None:
    """Keep why an attempt ended, before the next one is submitted: its cluster may forget it, or keep no books."""
    path = folder.run(status.run.dir) / "ended.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    noted = {**_noted(folder, status.run.dir), status.attempt: status.state}
    write_text(path, json.dumps({str(attempt): state.value for attempt, state in sorted(noted.items())}) + "\n")


def _noted(folder: SweepFolder, run: str) -> dict[int, State]:
    try:
        found = json.loads((folder.run(run) / "ended.json").read_text())
        return {int(attempt): State(state) for attempt, state in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}
