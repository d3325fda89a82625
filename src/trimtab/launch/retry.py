"""Whether a run may be started again, by what ended it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.launch.model import State
from trimtab.spec.launch import RetrySpec


def limit(retries: RetrySpec, cause: State) -> int:
    """How often ``cause`` may start a run again; 0 for what is no cause (completed, live, cancelled by somebody)."""
    match cause:
        case State.preempted:
            return retries.preempted
        case State.timed_out:
            return retries.timed_out
        case State.node_failed:
            return retries.node_failed
        case State.lost:
            return retries.lost
        case State.out_of_memory:
            return retries.out_of_memory
        case State.failed:
            return retries.failed
        case State.completed | State.cancelled | State.unsubmitted:
            return 0
        case State.running | State.pending | State.suspended | State.unknown:
            return 0


def allowed(causes: Mapping[State, int], retries: RetrySpec, cause: State) -> bool:
    """Whether an attempt that ended by ``cause`` may be followed by another.

    ``causes``: how many attempts ended for each cause so far, the one at hand included. Each cause has its own limit:
    twenty preemptions don't use up the one retry after an out-of-memory kill. A run that was never submitted may be.
    """
    if cause is State.unsubmitted:
        return True
    return 0 < max(causes.get(cause, 0), 1) <= limit(retries, cause)
