"""Retries by cause: each has its own limit."""

from __future__ import annotations

import pytest

from trimtab.launch.model import State
from trimtab.launch.retry import allowed, limit
from trimtab.spec.launch import RetrySpec

SPEC = RetrySpec(preempted=3, timed_out=2, node_failed=1, lost=2, out_of_memory=1, failed=0)
LIMITS = {State.preempted: 3, State.timed_out: 2, State.node_failed: 1, State.lost: 2, State.out_of_memory: 1}


@pytest.mark.parametrize("state", State)
def test_each_cause_may_start_a_run_again_as_often_as_its_limit_says(state: State) -> None:
    if state is State.unsubmitted:
        return
    granted, causes = 0, {state: 1}
    while allowed(causes, SPEC, state):
        granted += 1
        causes[state] += 1
    assert granted == LIMITS.get(state, 0) == limit(SPEC, state)


def test_what_was_never_submitted_may_be() -> None:
    assert allowed({}, RetrySpec(0, 0, 0, 0, 0, 0), State.unsubmitted)


def test_limits_are_apart() -> None:
    causes = {State.preempted: 3, State.timed_out: 2, State.node_failed: 1}
    assert allowed(causes | {State.out_of_memory: 1}, SPEC, State.out_of_memory)
    assert not allowed(causes | {State.preempted: 4}, SPEC, State.preempted)


def test_an_attempt_that_nobody_counted_counts_as_the_first() -> None:
    assert allowed({}, SPEC, State.node_failed)
    assert not allowed({}, RetrySpec(node_failed=0), State.node_failed)


def test_nothing_live_completed_or_cancelled_is_started_again() -> None:
    many = RetrySpec(99, 99, 99, 99, 99, 99)
    quiet = [state for state in State if state.live] + [State.completed, State.cancelled]
    assert [state for state in quiet if allowed({}, many, state)] == []
