"""Following a sweep to its end: retries by cause, unreachable clusters, what is shown."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.errors import ConfigError, TrimtabError
from trimtab.launch.files import SweepFolder
from trimtab.launch.follow import Screen, by_hand, follow
from trimtab.launch.model import Batch, PlannedRun, Result, RunStatus, Slot, State, Sweep
from trimtab.launch.states import Row
from trimtab.launch.status import Survey
from trimtab.spec.launch import LaunchSpec, RetrySpec, SweepSpec


class Play:
    """A cluster on which each run's attempts end as it is written; ``submit`` submits there."""

    def __init__(self, folder: SweepFolder, script: dict[int, list[str]]) -> None:
        self._folder, self._script = folder, script
        self._books: list[Row] = []
        self._live: list[tuple[Batch, int]] = []
        self.submitted: list[list[str]] = []
        self.cancelled: list[str] = []
        self.away = 0

    def submit(
        self, folder: SweepFolder, spec: SweepSpec, runs: Sequence[PlannedRun], say: Callable[[str], None]
    ) -> list[Batch]:
        self.submitted.append([run.dir for run in runs])
        made = []
        for run in runs:
            attempt = max((n for _, _, n in folder.attempts(run.dir)), default=0) + 1
            batch = folder.new_batch("a", "default", [Slot(((run.dir, attempt),))])
            job = str(len(self._books) + len(self._live) + 1)
            made.append(folder.write_batch(replace(batch, job=job, created=0.0)))
            self._live.append((made[-1], run.seed))
        return made

    def tick(self, seconds: float) -> None:
        """Every live job ends, unless the cluster is away."""
        self.away = max(self.away - 1, 0)
        live, self._live = self._live, []
        for batch, seed in live:
            word = "WAITS" if self.away else self._script[seed].pop(0)
            if word == "WAITS":
                self._live.append((batch, seed))
                continue
            run, attempt = batch.slots[0].runs[0]
            if word in ("COMPLETED", "FAILED"):
                state = State(word.lower())
                self._folder.write_result(run, Result(batch.id, attempt, state, 1.0, 2.0, 0.5, "ValueError: odd"))
            self._books.append(Row(str(batch.job), None, word, name=batch.id))

    def scancel(self, job: str) -> None:
        self.cancelled.append(job)
        self._books += [Row(job, None, "CANCELLED by 0", name=batch.id) for batch, _ in self._live if batch.job == job]
        self._live = [(batch, seed) for batch, seed in self._live if batch.job != job]

    def squeue(self) -> list[Row]:
        if self.away:
            raise TrimtabError("no route to host")
        return [Row(str(batch.job), None, "PENDING", name=batch.id) for batch, _ in self._live]

    def sacct(self, jobs: Sequence[str]) -> list[Row]:
        return [row for row in self._books if row.job in jobs]


def played(
    path: Path, script: dict[int, list[str]], away: int = 0, fail_fast: bool = False, **retries: int
) -> tuple[list[RunStatus], Play, list[Survey]]:
    folder = SweepFolder(path / "s")
    folder.batches.mkdir(parents=True)
    runs = tuple(PlannedRun(f"r{seed}", f"{seed:016x}", seed, ()) for seed in script)
    folder.write_sweep(Sweep("s", runs, len(runs), {}, {}, {}, 0.0))
    play, shown = Play(folder, script), []
    spec = SweepSpec(launch=LaunchSpec(fail_fast=fail_fast, retries=RetrySpec(**retries)))
    play.submit(folder, spec, runs, print)
    play.away = away
    return follow(folder, spec, shown.append, {"a": play}, play.submit, lambda text: None, play.tick), play, shown


def test_runs_are_started_again_by_cause_within_their_limits(tmp_path: Path) -> None:
    script = {0: ["COMPLETED"], 1: ["PREEMPTED", "NODE_FAIL", "TIMEOUT", "COMPLETED"],
              2: ["NODE_FAIL", "NODE_FAIL", "COMPLETED"], 3: ["FAILED"], 4: ["CANCELLED by 0"]}  # fmt: skip
    runs, play, _ = played(tmp_path, script, node_failed=1)
    assert [run.state for run in runs] == [
        State.completed, State.completed, State.node_failed, State.failed, State.cancelled]  # fmt: skip
    assert [run.attempt for run in runs] == [1, 4, 2, 1, 1]
    assert [sorted(runs) for runs in play.submitted[1:]] == [["r1", "r2"], ["r1"], ["r1"]]
    assert dict(runs[1].causes) == {"preempted": 1, "node_failed": 1, "timed_out": 1}


def test_a_cluster_that_goes_away_is_waited_for(tmp_path: Path) -> None:
    runs, play, shown = played(tmp_path, {0: ["COMPLETED"]}, away=3)
    assert runs[0].state is State.completed and len(play.submitted) == 1
    assert [seen.runs[0].state for seen in shown] == [State.unknown, State.unknown, State.unknown, State.completed]
    assert "no route to host" in shown[0].remarks[0]


def test_after_the_first_failure_nothing_is_started_again(tmp_path: Path) -> None:
    runs, play, _ = played(tmp_path, {0: ["FAILED"], 1: ["PREEMPTED"]}, fail_fast=True)
    assert [run.state for run in runs] == [State.failed, State.preempted] and len(play.submitted) == 1


def test_after_the_first_failure_what_waits_is_cancelled(tmp_path: Path) -> None:
    runs, play, _ = played(tmp_path, {0: ["FAILED"], 1: ["WAITS", "NEVER"]}, fail_fast=True)
    assert [run.state for run in runs] == [State.failed, State.cancelled] and play.cancelled == ["2"]


def test_once_the_sweep_was_cancelled_nothing_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tick = Play.tick

    def cancelled(self: Play, seconds: float) -> None:
        self._folder.ask_to_end()
        tick(self, seconds)

    monkeypatch.setattr(Play, "tick", cancelled)
    runs, play, _ = played(tmp_path, {0: ["COMPLETED"], 1: ["PREEMPTED"]})
    assert [run.state for run in runs] == [State.completed, State.preempted] and len(play.submitted) == 1


def test_refused_submissions_are_tried_again_but_wrong_options_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now: Iterator[float] = (float(i) for i in range(0, 100_000, 30))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    refusals: list[Exception] = [TrimtabError("busy"), TrimtabError("busy"), ConfigError("launch.clusters is empty")]
    submit = Play.submit

    def refusing(self: Play, *arguments: object) -> list[Batch]:
        if self.submitted and refusals:
            raise refusals.pop(0)
        return submit(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Play, "submit", refusing)
    with pytest.raises(ConfigError, match="is empty"):
        played(tmp_path, {0: ["NODE_FAIL"]})
    assert refusals == []


def status(state: State, **causes: int) -> RunStatus:
    return RunStatus(PlannedRun(f"{state.value}", "0", 0, ()), state, causes=causes)


def test_what_resume_takes_and_what_it_says() -> None:
    runs = [status(state) for state in State] + [status(State.lost, lost=9)]
    chosen, said = by_hand(runs, RetrySpec(), every=False)
    states = [State.failed, State.preempted, State.timed_out, State.out_of_memory, State.node_failed, State.cancelled]
    assert [run.state for run in chosen] == [*states, State.lost, State.unsubmitted]
    assert said == ["unknown: left alone, it may be running: ",
                    "lost: lost 9 times, launch.retries.lost=3; --all takes it too"]  # fmt: skip
    assert [run.state for run in by_hand(runs, RetrySpec(), every=True)[0]].count(State.lost) == 2


def test_where_there_is_no_terminal_only_changes_are_printed() -> None:
    out = io.StringIO()
    screen = Screen("s", 2, out)
    one, two = status(State.running), status(State.pending)
    for runs, remarks in [([one, two], ["b is away"])] * 3 + [([replace(one, state=State.completed), two], [])]:
        screen(Survey(runs, list(remarks)))
    assert out.getvalue().splitlines() == [
        "note: b is away",
        "[..............................]   0%  s: 2 runs: 1 running, 1 pending",
        "[###############...............]  50%  s: 2 runs: 1 completed, 1 pending"]  # fmt: skip


def test_on_a_terminal_the_table_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    out = Terminal()
    screen = Screen("s", 1000, out)
    runs = [replace(status(State.pending), run=PlannedRun(f"algo_{i:016x}_s0", f"{i:016x}", 0, ()), reason="x\n" * 99)
            for i in range(999)]  # fmt: skip
    runs.append(replace(runs[0], run=PlannedRun("bad", "1", 0, ()), state=State.failed, reason="ValueError: no"))
    screen(Survey(runs, ["a is away"]))
    lines = out.getvalue().replace("\x1b[K", "").replace("\r", "").replace("\x1b[J", "").splitlines()
    assert len(lines) < 24 and max(len(line) for line in lines) <= 80
    assert lines[0] == "s: 1000 runs: 999 pending, 1 failed" and "ValueError: no" in lines[4]
    screen(Survey(runs, []))
    assert f"\x1b[{len(lines)}A" in out.getvalue()
