"""What became of a run, from what its cluster says, its result.json and its status.json. Pure.

Two rules hold throughout: what is not known to have ended has not ended (an unknown word of SLURM's, a job that was
requeued, an unreachable cluster), and a result counts only for the attempt that is stamped on it. The one exception is
a completed result from before the newest submission: that submission was needless.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.launch.files import serial
from trimtab.launch.model import Batch, Result, State

NAME = "trimtab-"  # and the batch's id: name and comment of its job


@dataclass(frozen=True)
class Row:
    """One job as squeue or sacct lists it. ``index``: the array's index, None for a plain job; ``word``: SLURM's state.

    ``name`` and ``comment``: one of them holds the batch's id, without which the row is another job with a number that
    was used before.
    """

    job: str
    index: int | None
    word: str
    reason: str = ""
    name: str = ""
    comment: str = ""

    def is_of(self, batch: Batch, slot: int) -> bool:
        """Whether the row is the slot's job: its number where it is known, and the batch's own id."""
        return self.carries(batch) and batch.job in (None, self.job) and (self.index or 0) == slot

    def carries(self, batch: Batch) -> bool:
        """Whether the row is a job of the batch, by its id alone.

        Where the number says so too the id may be a part of the name; else some job that names another would do.
        """
        if self.job == batch.job:
            return batch.id in self.name or batch.id in self.comment
        return batch.id in (self.name.removeprefix(NAME), self.comment.removeprefix(NAME))


# SLURM's words, by what they mean for a job. Those not listed here are taken for live.
ENDED: Mapping[str, State] = {
    "COMPLETED": State.completed,
    "FAILED": State.failed,
    "TIMEOUT": State.timed_out,
    "DEADLINE": State.timed_out,
    "PREEMPTED": State.preempted,
    "OUT_OF_MEMORY": State.out_of_memory,
    "NODE_FAIL": State.node_failed,
    "BOOT_FAIL": State.node_failed,
    "LAUNCH_FAILED": State.node_failed,
    "RECONFIG_FAIL": State.node_failed,
    "CANCELLED": State.cancelled,
    "REVOKED": State.cancelled,  # its sibling in a federation was started instead
}
LIVE: Mapping[str, State] = {
    "PENDING": State.pending,
    "CONFIGURING": State.pending,
    "POWER_UP_NODE": State.pending,
    "REQUEUED": State.pending,
    "REQUEUE_FED": State.pending,
    "REQUEUE_HOLD": State.pending,
    "RESV_DEL_HOLD": State.pending,
    "SPECIAL_EXIT": State.pending,  # requeued and held
    "RUNNING": State.running,
    "COMPLETING": State.running,
    "SIGNALING": State.running,
    "STAGE_OUT": State.running,
    "RESIZING": State.running,
    "UPDATE_DB": State.running,
    "EXPEDITING": State.running,
    "SUSPENDED": State.suspended,
    "STOPPED": State.suspended,
}
SHORT: Mapping[str, str] = {
    "BF": "BOOT_FAIL", "CA": "CANCELLED", "CD": "COMPLETED", "CF": "CONFIGURING", "CG": "COMPLETING", "DL": "DEADLINE",
    "F": "FAILED", "NF": "NODE_FAIL", "OOM": "OUT_OF_MEMORY", "PD": "PENDING", "PR": "PREEMPTED", "R": "RUNNING",
    "RD": "RESV_DEL_HOLD", "RF": "REQUEUE_FED", "RH": "REQUEUE_HOLD", "RQ": "REQUEUED", "RS": "RESIZING",
    "RV": "REVOKED", "S": "SUSPENDED", "SE": "SPECIAL_EXIT", "SI": "SIGNALING", "SO": "STAGE_OUT", "ST": "STOPPED",
    "TO": "TIMEOUT",
}  # fmt: skip


def state_of(word: str) -> State:
    """The state that SLURM's word stands for; ``unknown``, which is live, for one that it does not know.

    ``CANCELLED by 1000``, ``CANCELLED+`` (cut off by a column's width) and ``RUNNING,COMPLETING`` are read too; of
    several words a live one counts.
    """
    found = [_one(part) for part in word.upper().replace(",", " ").split(" BY ")[0].split()]
    live = [state for state in found if state.live]
    return (live or found or [State.unknown])[0]


def _one(word: str) -> State:
    cut, word = word.endswith("+"), word.rstrip("+*")
    known = {**ENDED, **LIVE}
    word = SHORT.get(word, word)
    if cut and word not in known:
        fits = {state for name, state in known.items() if name.startswith(word)}
        return fits.pop() if len(fits) == 1 else State.unknown
    return known.get(word, State.unknown)


@dataclass(frozen=True)
class Books:
    """What is known of one slot's job. ``reachable``: whether squeue answered; ``books``: whether sacct did.

    ``queued``: its row in squeue; ``kept``: its last row in sacct; ``fresh``: too young to be missed.
    """

    queued: Row | None = None
    kept: Row | None = None
    reachable: bool = True
    books: bool = True
    fresh: bool = False


def job_state(seen: Books) -> tuple[State, str]:
    """The state of a slot's job, and why. squeue is believed before sacct, whose rows come late.

    ``lost``: squeue answers and does not list it, and sacct has no end of it.
    """
    if seen.queued is not None:
        state = state_of(seen.queued.word)
        reason = "" if seen.queued.reason in ("None", "(null)") else seen.queued.reason
        odd = "" if state in (State.pending, State.running) and _plain(seen.queued.word) else seen.queued.word
        return state, ", ".join(part for part in (odd, reason) if part)
    kept = state_of(seen.kept.word) if seen.kept is not None else None
    if kept is not None and seen.kept is not None and not kept.live and (seen.reachable or kept not in REQUEUES):
        return kept, ", ".join(part for part in (seen.kept.word, seen.kept.reason) if part not in ("", "None"))
    if not seen.reachable:
        return State.unknown, "its cluster cannot be reached"
    if seen.fresh:
        return State.pending, "was submitted just now"
    if not seen.books:
        return State.lost, "not in the queue; sacct does not answer"
    last = f"; sacct's last word is {seen.kept.word}" if seen.kept is not None else " nor in sacct's books"
    return State.lost, f"not in the queue{last}"


# sacct says so of a job that the controller has put back into its queue, until it starts again.
REQUEUES = (State.preempted, State.node_failed)


def _plain(word: str) -> bool:
    return SHORT.get(word, word) in ("PENDING", "RUNNING")


def run_state(
    batch: Batch, attempt: int, job: tuple[State, str], result: Result | None, status: Mapping[str, Any]
) -> tuple[State, str]:
    """The state of a run in its counting attempt, and why.

    ``job``: what ``job_state`` says of the attempt's job, which may carry out other runs too.
    """
    state, reason = job
    own = result if result is not None and (result.batch, result.attempt) == (batch.id, attempt) else None
    if result is not None and result.state is State.completed and (own is not None or _needless(batch, result)):
        return State.completed, ""
    if own is not None and own.state in FINAL:
        return own.state, own.error
    if state.live:
        return _live(batch, state, reason, own, status)
    if own is not None:  # it saved and ended; the job's end says why it was asked to
        return (state, reason) if state in WHY else (own.state, own.error)
    if state is State.completed:
        return State.lost, "its job ended well, but left no result"
    if state is State.failed:
        if said := _words(batch, status):
            return State.failed, said
        return State.lost, f"its job ended as {reason} without a word of the run"  # killed whole, or never begun
    return state, reason


def _needless(batch: Batch, result: Result) -> bool:
    """Whether the run was completed before the batch was submitted: its job finds that, and does nothing."""
    return serial(result.batch) < serial(batch.id) and result.ended <= batch.created


# Its job does not start a run again that ended so, even when the job goes on.
FINAL = (State.failed, State.cancelled, State.out_of_memory, State.node_failed, State.lost)
WHY = (State.cancelled, State.timed_out, State.node_failed, State.out_of_memory)


def _live(batch: Batch, state: State, reason: str, own: Result | None, status: Mapping[str, Any]) -> tuple[State, str]:
    """A run whose job is not over: with several runs in a job each begins when its turn has come."""
    if state is not State.running:
        return state, reason
    began = own.ended if own is not None else batch.created
    if status.get("state") == "running" and _number(status.get("updated")) >= began:
        return State.running, reason
    if own is not None:
        return State.pending, "saved and ended; starts again"
    return (State.running, reason or "starting") if _only(batch) else (State.pending, reason or "its turn comes")


def _only(batch: Batch) -> bool:
    return all(len(slot.runs) == 1 for slot in batch.slots)


def _words(batch: Batch, status: Mapping[str, Any]) -> str:
    """The error in status.json, when it is of this attempt."""
    fresh = _number(status.get("updated")) >= batch.created
    return str(status.get("error") or "") if fresh and status.get("state") == "failed" else ""


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def tells_of_memory(words: str) -> bool:
    """Whether SLURM's last words in a job's log say that it killed the job for its memory; sacct may say FAILED."""
    return re.search(r"slurmstepd.*(memory limit|oom[-_ ]kill)", words, re.IGNORECASE) is not None


def cause_of(state: State) -> State | None:
    """What an ended attempt counts as against its limit; None for one that is live, completed, or was cancelled."""
    if state.live or state in (State.completed, State.cancelled, State.unsubmitted):
        return None
    return state
