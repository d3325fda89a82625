"""What SLURM's words mean for a run, alone and together with results of this attempt and of older ones."""

from __future__ import annotations

import itertools

import pytest

from trimtab.launch.model import Batch, Result, Slot, State
from trimtab.launch.states import Books, Row, cause_of, job_state, run_state, state_of, tells_of_memory

# Every state and flag of squeue(1) and sacct(1), 22.05 to 25.05, with its short form where there is one.
WORDS = {
    "BOOT_FAIL BF": State.node_failed,
    "CANCELLED CA": State.cancelled,
    "COMPLETED CD": State.completed,
    "CONFIGURING CF": State.pending,
    "COMPLETING CG": State.running,
    "DEADLINE DL": State.timed_out,
    "EXPEDITING": State.running,
    "FAILED F": State.failed,
    "LAUNCH_FAILED": State.node_failed,
    "NODE_FAIL NF": State.node_failed,
    "OUT_OF_MEMORY OOM": State.out_of_memory,
    "PENDING PD": State.pending,
    "POWER_UP_NODE": State.pending,
    "PREEMPTED PR": State.preempted,
    "RECONFIG_FAIL": State.node_failed,
    "RUNNING R": State.running,
    "RESV_DEL_HOLD RD": State.pending,
    "REQUEUE_FED RF": State.pending,
    "REQUEUE_HOLD RH": State.pending,
    "REQUEUED RQ": State.pending,
    "RESIZING RS": State.running,
    "REVOKED RV": State.cancelled,
    "SIGNALING SI": State.running,
    "SPECIAL_EXIT SE": State.pending,
    "STAGE_OUT SO": State.running,
    "STOPPED ST": State.suspended,
    "SUSPENDED S": State.suspended,
    "TIMEOUT TO": State.timed_out,
    "UPDATE_DB": State.running,
    # as they are really written
    "CANCELLED+": State.cancelled,
    "OUT_OF_ME+": State.out_of_memory,
    "REQUEUE+": State.pending,
    "RE+": State.unknown,  # several fit
    # what nobody has heard of
    "UNKNOWN": State.unknown,
    "HIBERNATING": State.unknown,
    "42": State.unknown,
}
CASES = [(word, state) for words, state in WORDS.items() for word in words.split()]
CASES += [("CANCELLED by 1000", State.cancelled), ("running", State.running), ("", State.unknown)]
CASES += [
    ("RUNNING,COMPLETING", State.running),
    ("PREEMPTED,REQUEUED", State.pending),
    ("FAILED HIBERNATING", State.unknown),
]


@pytest.mark.parametrize(("word", "state"), CASES)
def test_words(word: str, state: State) -> None:
    assert state_of(word) is state


ONE = Batch("0002-abcd1234", "a", "default", (Slot((("r", 2),)),), created=1000.0, job="7")
PACK = Batch("0002-abcd1234", "a", "default", (Slot((("r", 2), ("s", 1))),), created=1000.0, job="7")
LIVE = ["PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD",
        "SPECIAL_EXIT", "SIGNALING", "STAGE_OUT", "RESIZING", "HIBERNATING"]  # fmt: skip
OVER = ["COMPLETED", "FAILED", "TIMEOUT", "DEADLINE", "PREEMPTED", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL",
        "CANCELLED by 0", "REVOKED"]  # fmt: skip


def row(word: str, reason: str = "None") -> Row:
    return Row("7", None, word, reason, name="trimtab-0002-abcd1234")


def result(state: State, batch: str = ONE.id, attempt: int = 2, **more: object) -> Result:
    return Result(batch, attempt, state, 1001.0, 1050.0, **more)  # type: ignore[arg-type]


# -- the job ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queued", "kept"), list(itertools.product(LIVE, [None, *LIVE, *OVER])))
def test_what_the_queue_lists_has_not_ended_whatever_the_books_say(queued: str, kept: str | None) -> None:
    state, _ = job_state(Books(row(queued), row(kept) if kept else None))
    assert state.live and state is state_of(queued)


@pytest.mark.parametrize("kept", OVER)
def test_what_has_left_the_queue_ended_as_the_books_say(kept: str) -> None:
    assert job_state(Books(None, row(kept))) == (state_of(kept), kept)


@pytest.mark.parametrize("kept", [None, *LIVE])
def test_a_job_that_vanished_is_lost_and_not_completed_but_only_after_a_while(kept: str | None) -> None:
    known = row(kept) if kept else None
    assert job_state(Books(None, known))[0] is State.lost
    assert job_state(Books(None, known, fresh=True))[0] is State.pending
    assert job_state(Books(None, known, reachable=False))[0] is State.unknown


@pytest.mark.parametrize("kept", OVER)
def test_with_the_controller_away_only_an_end_that_no_requeue_follows_is_believed(kept: str) -> None:
    state, _ = job_state(Books(None, row(kept), reachable=False))
    requeues = state_of(kept) in (State.preempted, State.node_failed)
    assert state is (State.unknown if requeues else state_of(kept))


def test_reasons() -> None:
    assert job_state(Books(row("PENDING", "Resources"))) == (State.pending, "Resources")
    assert job_state(Books(row("PENDING", "BeginTime"))) == (State.pending, "BeginTime")
    assert job_state(Books(row("PENDING", "JobHeldUser"))) == (State.pending, "JobHeldUser")
    assert job_state(Books(row("RUNNING"))) == (State.running, "")
    assert job_state(Books(row("REQUEUE_HOLD", "job requeued in held state"))) == (
        State.pending, "REQUEUE_HOLD, job requeued in held state")  # fmt: skip
    assert job_state(Books(row("HIBERNATING"))) == (State.unknown, "HIBERNATING")
    assert job_state(Books(None, row("RUNNING")))[1] == "not in the queue; sacct's last word is RUNNING"
    assert job_state(Books(None, None, books=False))[1] == "not in the queue; sacct does not answer"


def test_a_number_that_was_used_before_is_another_job() -> None:
    array = Batch("0003-ffff0000", "a", "default", (Slot((("r", 1),)), Slot((("s", 1),))), 0.0, job="7", array=True)
    assert Row("7", 1, "RUNNING", comment="0003-ffff0000").is_of(array, 1)
    assert not Row("7", 0, "RUNNING", comment="0003-ffff0000").is_of(array, 1)
    assert not Row("7", 1, "RUNNING", name="somebody's", comment="").is_of(array, 1)
    assert not Row("8", 1, "RUNNING", name="0003-ffff0000").is_of(array, 1)
    lost = Batch("0004-00000000", "a", "default", (Slot((("r", 1),)),), 0.0)
    assert Row("12", None, "RUNNING", name="0004-00000000").is_of(lost, 0)  # its submitter died: found by its name


# -- the run ---------------------------------------------------------------------------------------------------------

OLD = [result(state, "0001-00000000", 1) for state in (State.completed, State.failed, State.preempted)]
OLD += [result(State.completed, "0001-00000000", 2), result(State.completed, ONE.id, 1)]


@pytest.mark.parametrize(("word", "old"), list(itertools.product([*LIVE, *OVER, None], OLD)))
def test_a_result_of_an_older_attempt_counts_for_nothing(word: str | None, old: Result) -> None:
    queued = row(word) if word in LIVE else None
    job = job_state(Books(queued, row(word) if word and not queued else None))
    assert run_state(ONE, 2, job, old, {}) == run_state(ONE, 2, job, None, {})
    assert run_state(ONE, 2, job, old, {})[0] is not State.completed


@pytest.mark.parametrize("word", [*LIVE, *OVER, None])
def test_a_result_of_this_attempt_says_how_it_ended(word: str | None) -> None:
    queued = row(word) if word in LIVE else None
    job = job_state(Books(queued, row(word) if word and not queued else None))
    assert run_state(ONE, 2, job, result(State.completed), {}) == (State.completed, "")
    failed = result(State.failed, error="ValueError: no")
    assert run_state(ONE, 2, job, failed, {}) == (State.failed, "ValueError: no")


def test_what_was_completed_before_the_newest_submission_is() -> None:
    before = Result("0001-00000000", 1, State.completed, 800.0, 999.0)
    assert run_state(ONE, 2, (State.pending, "Resources"), before, {}) == (State.completed, "")
    assert run_state(ONE, 2, (State.failed, "FAILED"), before, {}) == (State.completed, "")


@pytest.mark.parametrize("state", [State.failed, State.out_of_memory, State.cancelled])
def test_a_run_that_its_job_does_not_start_again_is_over_though_the_job_goes_on(state: State) -> None:
    assert run_state(PACK, 2, (State.running, ""), result(state, error="x"), {}) == (state, "x")


@pytest.mark.parametrize("word", LIVE)
def test_saved_and_in_the_queue_again_is_live(word: str) -> None:
    state, _ = run_state(ONE, 2, job_state(Books(row(word))), result(State.preempted), {})
    assert state.live


@pytest.mark.parametrize(("word", "state"), [
    ("COMPLETED", State.preempted), ("FAILED", State.preempted), ("PREEMPTED", State.preempted),
    ("TIMEOUT", State.timed_out), ("NODE_FAIL", State.node_failed), ("OUT_OF_MEMORY", State.out_of_memory),
    ("CANCELLED by 0", State.cancelled), (None, State.preempted)])  # fmt: skip
def test_saved_and_ended_why(word: str | None, state: State) -> None:
    job = job_state(Books(None, row(word) if word else None))
    assert run_state(ONE, 2, job, result(State.preempted), {})[0] is state


def test_the_run_itself_tells_time_limits_and_cancels() -> None:
    gone = job_state(Books(None, row("FAILED")))
    assert run_state(ONE, 2, gone, result(State.timed_out), {})[0] is State.timed_out
    assert run_state(ONE, 2, gone, result(State.cancelled), {})[0] is State.cancelled


@pytest.mark.parametrize("word", OVER)
def test_no_result_is_no_success(word: str) -> None:
    state, reason = run_state(ONE, 2, job_state(Books(None, row(word))), None, {"state": "completed", "updated": 1e9})
    assert state is (State.lost if word in ("COMPLETED", "FAILED") else state_of(word)) and reason


def test_the_first_line_of_an_error_without_a_result() -> None:
    job = job_state(Books(None, row("FAILED")))
    wrong = {"state": "failed", "error": "RuntimeError: x", "updated": 1010.0}
    assert run_state(ONE, 2, job, None, wrong) == (State.failed, "RuntimeError: x")
    assert "RuntimeError" not in run_state(ONE, 2, job, None, wrong | {"updated": 999.0})[1]  # an older attempt's


def test_runs_that_share_a_job_begin_when_their_turn_comes() -> None:
    job = (State.running, "")
    assert run_state(PACK, 2, job, None, {})[0] is State.pending
    assert run_state(PACK, 2, job, None, {"state": "running", "updated": 1010.0})[0] is State.running
    assert run_state(PACK, 2, job, None, {"state": "running", "updated": 900.0})[0] is State.pending
    assert run_state(ONE, 2, job, None, {})[0] is State.running
    assert run_state(ONE, 2, job, result(State.preempted), {"state": "preempted", "updated": 1050.0}) == (
        State.pending, "saved and ended; starts again")  # fmt: skip


def test_causes() -> None:
    none = {State.completed, State.cancelled, State.unsubmitted}
    assert {state for state in State if cause_of(state) is None} == none | {s for s in State if s.live}


@pytest.mark.parametrize("reason", ["FAILED, exit code 0:9", "FAILED, exit code 1:0"])
def test_a_job_that_ended_without_a_word_of_the_run_is_lost_and_so_started_again(reason: str) -> None:
    state, why = run_state(ONE, 2, (State.failed, reason), None, {})
    assert state is State.lost and reason in why and cause_of(state) is State.lost


@pytest.mark.parametrize(
    ("words", "memory"),
    [
        ("slurmstepd-alpha-1: error: Exceeded job memory limit", True),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=63.batch. Some of the step tasks …", True),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in step 63.batch cgroup.", True),
        ("slurmstepd: error: *** JOB 63 ON a CANCELLED AT 2026-12-01T05:01:05 DUE TO TIME LIMIT ***", False),
        ("RuntimeError: the memory limit is a word of the run's own", False),
        ("", False),
    ],
)
def test_a_job_that_slurm_killed_for_its_memory_says_so_in_its_log_alone(words: str, memory: bool) -> None:
    assert tells_of_memory(words) is memory
