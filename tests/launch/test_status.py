"""Statuses from recorded answers of squeue and sacct, and from what lies in a sweep's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.errors import TrimtabError
from trimtab.launch.attempts import Claim, record
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Batch, PlannedRun, Result, RunStatus, Slot, State, Sweep
from trimtab.launch.states import Row
from trimtab.launch.status import note_cause, survey


class Recorded:
    """A cluster that answers what it is given; an error instead of rows is raised."""

    def __init__(self, queue: Sequence[Row] | TrimtabError = (), books: Sequence[Row] | TrimtabError = ()) -> None:
        self.queue, self.books, self.asked = queue, books, 0

    def squeue(self) -> Sequence[Row]:
        self.asked += 1
        return answer(self.queue)

    def sacct(self, jobs: Sequence[str]) -> Sequence[Row]:
        return [row for row in answer(self.books) if row.job in jobs]


def answer(rows: Sequence[Row] | TrimtabError) -> Sequence[Row]:
    if isinstance(rows, TrimtabError):
        raise rows
    return rows


def made(path: Path, count: int) -> SweepFolder:
    folder = SweepFolder(path)
    path.mkdir(parents=True)
    folder.batches.mkdir()
    runs = tuple(PlannedRun(f"algo_{i:016x}_s0", f"{i:016x}", 0, (f"algo={i}", "seed=0")) for i in range(count))
    folder.write_sweep(Sweep("s", runs, count, {}, {}, {}, 0.0))
    return folder


def sent(folder: SweepFolder, cluster: str, job: str | None, *runs: int, attempt: int = 1, age: float = 1000.0,
         array: bool = False) -> Batch:  # fmt: skip
    """A batch of one slot for each run."""
    batch = folder.new_batch(cluster, "default", [Slot(((f"algo_{i:016x}_s0", attempt),)) for i in runs])
    return folder.write_batch(replace(batch, job=job, array=array, created=time.time() - age))


def row(batch: Batch, word: str, index: int | None = None, reason: str = "None") -> Row:
    return Row(batch.job or "99", index, word, reason, name=f"trimtab-{batch.id}")


def look(folder: SweepFolder, **clusters: Recorded) -> list[RunStatus]:
    return survey(folder, clusters, patience=0.0).runs


def completed(batch: Batch, attempt: int = 1, **more: float) -> Result:
    return Result(batch.id, attempt, State.completed, time.time() - 5, time.time(), **more)


def test_equal_numbers_on_two_clusters_and_of_another_user_are_different_jobs(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 3)
    one, two, three = sent(folder, "a", "7", 0), sent(folder, "b", "7", 1), sent(folder, "b", "8", 2)
    a = Recorded([row(one, "RUNNING")])
    b = Recorded([Row("8", None, "RUNNING", name="other")], [row(two, "TIMEOUT"), row(three, "NODE_FAIL")])
    runs = look(folder, a=a, b=b)
    assert [(run.state, run.cluster, run.job) for run in runs] == [
        (State.running, "a", "7"), (State.timed_out, "b", "7"), (State.node_failed, "b", "8")]  # fmt: skip
    assert (a.asked, b.asked) == (1, 1)


def test_elements_of_an_array(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 4)
    batch = sent(folder, "a", "4", 0, 1, 2, 3, array=True)
    queue = [row(batch, "PENDING", 0, "JobArrayTaskLimit"), row(batch, "PENDING", 1, "job requeued in held state")]
    runs = look(folder, a=Recorded([*queue, row(batch, "RUNNING", 2)], [row(batch, "CANCELLED by 0", 3)]))
    assert [(run.job, run.state, run.reason) for run in runs] == [
        ("4_0", State.pending, "JobArrayTaskLimit"), ("4_1", State.pending, "job requeued in held state"),
        ("4_2", State.running, "starting"), ("4_3", State.cancelled, "CANCELLED by 0")]  # fmt: skip


def test_an_unreachable_cluster_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 3)
    one, two, _ = sent(folder, "a", "1", 0), sent(folder, "b", "1", 1), sent(folder, "gone", "1", 2)
    folder.write_result(two.slots[0].runs[0][0], completed(two, objective=0.5))
    away = TrimtabError("connection refused\nand more")
    seen = survey(folder, {"a": Recorded([row(one, "PENDING")]), "b": Recorded(away, away)}, patience=0.0)
    assert [run.state for run in seen.runs] == [State.pending, State.completed, State.unknown]
    assert seen.runs[1].objective == 0.5
    assert seen.remarks == ["b cannot be reached: connection refused; its jobs stay unknown",
                            "b: sacct does not answer: connection refused",
                            "gone: not among launch.clusters; its jobs stay unknown"]  # fmt: skip


def test_vanished_is_lost_once_two_looks_agree_and_never_while_young(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 2)
    sent(folder, "a", "1", 0)
    sent(folder, "a", "2", 1, age=5.0)
    cluster = Recorded()
    assert [run.state for run in look(folder, a=cluster)] == [State.lost, State.pending]
    assert cluster.asked == 2


def test_a_batch_whose_submitter_died_is_found_by_its_name(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 3)
    found, _, young = sent(folder, "a", None, 0), sent(folder, "a", None, 1), sent(folder, "a", None, 2, age=1.0)
    runs = look(folder, a=Recorded([row(found, "RUNNING")]))
    assert [run.state for run in runs] == [State.running, State.unsubmitted, State.pending] and young.job is None


def test_the_newest_attempt_counts_and_older_results_do_not(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 1)
    old, new = sent(folder, "a", "1", 0), sent(folder, "b", "1", 0, attempt=2)
    run = old.slots[0].runs[0][0]
    folder.write_result(run, completed(old))
    [status] = look(folder, a=Recorded(), b=Recorded([row(new, "RUNNING")]))
    assert (status.state, status.attempt, status.cluster, status.objective) == (State.running, 2, "b", None)
    folder.write_result(run, completed(new, 2, objective=1.0))
    [status] = look(folder, a=Recorded(), b=Recorded())
    assert (status.state, status.objective) == (State.completed, 1.0)


def test_a_refused_batch_is_no_attempt(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 1)
    folder.write_batch(replace(sent(folder, "a", None, 0), refused="no such partition"))
    assert [(run.state, run.attempt) for run in look(folder, a=Recorded())] == [(State.unsubmitted, 0)]


def test_causes_are_counted_over_attempts_and_restarts(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 1)
    first, second = sent(folder, "a", "1", 0), sent(folder, "b", "1", 0, attempt=2)
    a = Recorded([], [row(first, "REQUEUED"), row(first, "NODE_FAIL"), row(first, "TIMEOUT")])
    [status] = look(folder, a=a, b=Recorded([row(second, "PENDING", reason="BeginTime")], [row(second, "NODE_FAIL")]))
    assert (status.state, dict(status.causes)) == (State.pending, {"node_failed": 2, "preempted": 1, "timed_out": 1})


def test_a_run_s_own_word_on_why_it_stopped_is_not_counted_twice(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 1)
    batch = sent(folder, "a", "1", 0)
    run = batch.slots[0].runs[0][0]
    for state in (State.timed_out, State.preempted):
        record(folder, run, replace(completed(batch), state=state))
    [status] = look(folder, a=Recorded([], [row(batch, "REQUEUED"), row(batch, "FAILED")]))
    assert (status.state, dict(status.causes)) == (State.preempted, {"timed_out": 1, "preempted": 1})


def test_what_the_books_forget_was_noted(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 1)
    sent(folder, "a", "1", 0)
    [status] = look(folder, a=Recorded())
    assert dict(status.causes) == {"lost": 1}
    note_cause(folder, status)
    again = sent(folder, "a", "2", 0, attempt=2)
    [status] = look(folder, a=Recorded([row(again, "RUNNING")], TrimtabError("accounting is off")))
    assert (status.state, dict(status.causes)) == (State.running, {"lost": 1})


def test_batches_past_9999_come_after_those_before(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 1)
    run = folder.sweep().runs[0].dir
    old = folder.write_batch(Batch("9999-ffffffff", "a", "default", (Slot(((run, 1),)),), 0.0, job="1"))
    new = sent(folder, "a", "2", 0, attempt=1)  # the same attempt: the later one counts
    newest = sent(folder, "a", "3", 0, attempt=2)
    assert [new.id[:6], newest.id[:6]] == ["10000-", "10001-"]
    assert [batch.id for batch in folder.all_batches()] == [old.id, new.id, newest.id]
    assert Claim(folder, old.id, 0).stale(run) is False  # no start of it has taken the slot
    claims = [Claim(folder, batch.id, 0) for batch in (old, new, newest)]
    for claim in claims:
        claim.take()
    assert [claim.stale(run) for claim in claims] == [True, True, False]
    folder.write_result(run, Result(old.id, 1, State.completed, 1.0, 2.0, 0.5))
    [status] = look(folder, a=Recorded([row(newest, "PENDING")]))
    assert status.state is State.completed  # before the newest submission


def test_progress_and_damage(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 2)
    batch = sent(folder, "a", "1", 0, 1, array=True)
    for ((name, _),) in (slot.runs for slot in batch.slots):
        folder.run(name).mkdir()
    status = {"state": "running", "updated": time.time(), "step": 3, "steps": 9, "reward": 0.25}
    (folder.run(folder.sweep().runs[0].dir) / "status.json").write_text(json.dumps(status))
    for name in ("status.json", "result.json", "attempts.jsonl", "ended.json"):
        (folder.run(folder.sweep().runs[1].dir) / name).write_text('{"state": "compl')
    first, second = look(folder, a=Recorded([row(batch, "RUNNING", 0), row(batch, "RUNNING", 1)]))
    assert (first.state, first.step, first.steps, first.reward) == (State.running, 3, 9, 0.25)
    assert (second.state, second.step) == (State.running, None)


def test_a_local_process_is_known_by_its_command_line(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 3)
    mine = sent(folder, "local", None, 0)
    with subprocess.Popen([sys.executable, "-c", "input()", mine.id], stdin=subprocess.PIPE) as process:
        folder.write_batch(replace(mine, job=str(process.pid)))
        sent(folder, "local", str(os.getpid()), 1)  # a number that somebody else has now
        states = [run.state for run in look(folder)]
        assert states == [State.running, State.lost, State.unsubmitted]
        process.communicate(b"\n")
    assert look(folder)[0].state is State.lost


def test_a_local_run_of_another_machine_is_not_taken_for_dead(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", 1)
    batch = sent(folder, "local", "999999", 0)
    run = folder.run(batch.slots[0].runs[0][0])
    run.mkdir()
    (run / "status.json").write_text(json.dumps({"state": "running", "host": "elsewhere", "updated": time.time()}))
    [status] = look(folder)
    assert (status.state, status.reason) == (State.unknown, "runs on elsewhere; look there")


@pytest.mark.parametrize("count", [1000])
def test_a_thousand_runs(tmp_path: Path, count: int) -> None:
    folder = made(tmp_path / "s", count)
    batches = [sent(folder, "a", str(i), i) for i in range(count)]
    began = time.monotonic()
    runs = look(folder, a=Recorded([row(batch, "RUNNING") for batch in batches]))
    assert {run.state for run in runs} == {State.running}
    assert time.monotonic() - began < 10
