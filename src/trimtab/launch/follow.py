"""``wait=true`` and ``trimtab sweep watch``: a sweep followed to its end, runs started again by what ended them."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TextIO

from trimtab.errors import ConfigError, TrimtabError
from trimtab.launch import table
from trimtab.launch.cancel import Choice, Ends, cancel
from trimtab.launch.files import SweepFolder
from trimtab.launch.held import Releases, let_go
from trimtab.launch.model import Batch, PlannedRun, RunStatus, State
from trimtab.launch.retry import allowed, limit
from trimtab.launch.status import Client, Survey, note_cause, survey
from trimtab.spec.launch import RetrySpec, SweepSpec

Show = Callable[[Survey], None]
Submit = Callable[[SweepFolder, SweepSpec, Sequence[PlannedRun], Callable[[str], None]], Sequence[Batch]]


class Follows(Client, Ends, Releases, Protocol):
    """What following needs of a cluster."""


SOON, LATE = 2.0, 15.0  # seconds between two looks: at first, and once nothing has changed for long
PATIENCE = 10.0  # seconds after which a silent cluster is said, and asked again at the next look
AGAIN = 60.0  # seconds after a submission that no cluster took
PLAIN_SECONDS = 60.0  # between two lines where there is no terminal


def due(runs: Sequence[RunStatus], retries: RetrySpec) -> list[RunStatus]:
    """The runs that may be started again without anybody asking."""
    return [run for run in runs if not run.state.live and _may(run, retries)]


def _may(run: RunStatus, retries: RetrySpec) -> bool:
    return allowed({State(cause): n for cause, n in run.causes.items()}, retries, run.state)


def by_hand(runs: Sequence[RunStatus], retries: RetrySpec, every: bool) -> tuple[list[RunStatus], list[str]]:
    """The runs that ``trimtab sweep resume`` submits, and a word on each that it leaves out.

    A person asks, so failed and cancelled runs go too; what used up its retries only with ``every``.
    """
    chosen, said = [], []
    for run in runs:
        if run.state is State.completed:
            continue
        if run.state.live:
            if run.state is State.unknown:
                said.append(f"{run.run.dir}: left alone, it may be running: {run.reason}")
        elif every or run.state in (State.failed, State.cancelled) or _may(run, retries):
            chosen.append(run)
        else:
            most = limit(retries, run.state)
            said.append(f"{run.run.dir}: {run.state.value} {run.causes.get(run.state.value, 0)} times, "
                        f"launch.retries.{run.state.value}={most}; --all takes it too")  # fmt: skip
    return chosen, said


def resubmit(
    folder: SweepFolder, spec: SweepSpec, runs: Sequence[RunStatus], submit: Submit, say: Callable[[str], None]
) -> Sequence[Batch]:
    """Note why the runs ended, then submit them again."""
    for run in runs:
        if run.attempt:
            note_cause(folder, run)
    return submit(folder, spec, [run.run for run in runs], say)


def follow(
    folder: SweepFolder,
    spec: SweepSpec,
    show: Show,
    clusters: Mapping[str, Follows] | None = None,
    submit: Submit | None = None,
    say: Callable[[str], None] = print,
    pause: Callable[[float], None] = time.sleep,
) -> list[RunStatus]:
    """Look until nothing is live, and start again what its retries allow; the statuses in the end.

    A cluster that cannot be reached is said by ``show``; its runs stay unknown and are waited for, the others go on.
    With ``launch.fail_fast`` the first failure cancels what waits, and nothing is started again; nor is it once the
    sweep as a whole was cancelled.
    """
    clusters = clusters if clusters is not None else clusters_of(spec)
    submit = submit if submit is not None else submitter()
    wait, not_before, over, asked = SOON, 0.0, False, folder.asked_to_end()
    before: list[tuple[State, int | None]] | None = None
    released: Counter[str] = Counter()
    while True:
        seen = survey(folder, clusters)
        show(seen)
        let_go(seen.runs, clusters, say, released)
        if folder.asked_to_end() != asked:
            over = True
        if spec.launch.fail_fast and not over and any(run.state is State.failed for run in seen.runs):
            over = True
            _stop(folder, seen, clusters, say)
            continue
        again = [] if over else due(seen.runs, spec.launch.retries)
        now = [(run.state, run.step) for run in seen.runs]
        if before is not None and [state.live for state, _ in now] != [state.live for state, _ in before]:
            not_before = 0.0  # something has ended: there may be room
        if again and time.monotonic() >= not_before:
            try:
                if any(not batch.refused for batch in resubmit(folder, spec, again, submit, say)):
                    before = None
                    continue
                not_before = time.monotonic() + AGAIN
            except ConfigError:
                raise
            except TrimtabError as error:
                say(f"{len(again)} runs could not be submitted again: {error}; next try in {AGAIN:.0f} s")
                not_before = time.monotonic() + AGAIN
        if not again and not any(run.state.live for run in seen.runs):
            return seen.runs
        wait = SOON if now != before else min(wait * 1.5, LATE)
        before = now
        pause(wait)


def _stop(folder: SweepFolder, seen: Survey, clusters: Mapping[str, Follows], say: Callable[[str], None]) -> None:
    outcome = cancel(folder, Choice(seen.runs, pending=True), clusters)
    say(f"a run failed: {len(outcome.ended)} waiting jobs cancelled (launch.fail_fast)")
    for line in outcome.failed:
        say(line)


def clusters_of(spec: SweepSpec, patience: float = PATIENCE) -> dict[str, Any]:
    """The sweep's clusters by name; none for a local sweep. ``patience``: seconds that one is waited for."""
    if not spec.launch.clusters:
        return {}
    from trimtab.launch.clusters import Cluster

    return {name: Cluster(name, cluster, patience) for name, cluster in spec.launch.clusters.items()}


def submitter() -> Submit:
    """What submits to SLURM; it loads submitit, which reading states need not."""
    from trimtab.launch.submit import submit

    made: Submit = submit
    return made


def watch(folder: SweepFolder, clusters: Mapping[str, Client], show: Show, every: float) -> list[RunStatus]:
    """Look until nothing is live; nothing is submitted."""
    for seen in _looks(folder, clusters, every):
        show(seen)
        if not any(run.state.live for run in seen.runs):
            break
    return seen.runs


def _looks(folder: SweepFolder, clusters: Mapping[str, Client], every: float) -> Iterator[Survey]:
    while True:
        yield survey(folder, clusters)
        time.sleep(every)


class Screen:
    """Shows a sweep: on a terminal the table in place, elsewhere a line when the counts change."""

    def __init__(self, name: str, combinations: int, out: TextIO | None = None) -> None:
        self._name, self._combinations = name, combinations
        self._out = out if out is not None else sys.stdout
        self._counts: dict[State, int] | None = None
        self._told: tuple[str, ...] = ()
        self._printed = 0.0
        self._height = 0

    def __call__(self, seen: Survey) -> None:
        if self._out.isatty():
            self._draw(seen)
        else:
            self._print(seen)

    def _draw(self, seen: Survey) -> None:
        size = shutil.get_terminal_size()
        text = [*self.top(seen), *table.lines(seen.runs, size.columns, size.lines - 4 - len(seen.notes))]
        up = f"\x1b[{self._height}A" if self._height else ""
        self._out.write(up + "".join(f"\r\x1b[K{table.cut(line, size.columns)}\n" for line in text) + "\x1b[J")
        self._out.flush()
        self._height = len(text)

    def top(self, seen: Survey) -> list[str]:
        """Counts, bar, and what could not be found out."""
        plain = not (self._out.encoding or "").lower().startswith("utf")
        return [table.headline(self._name, seen.runs, self._combinations), table.progress(seen.runs, plain),
                *(f"note: {note}" for note in seen.notes)]  # fmt: skip

    def _print(self, seen: Survey) -> None:
        now, counts = time.monotonic(), table.counts(seen.runs)
        if tuple(seen.notes) != self._told:
            self._told = tuple(seen.notes)
            self._out.writelines(f"note: {note}\n" for note in seen.notes)
        if counts != self._counts or now - self._printed >= PLAIN_SECONDS:
            self._counts, self._printed = counts, now
            bar = table.progress(seen.runs, plain=True)
            self._out.write(f"{bar}  {table.headline(self._name, seen.runs, self._combinations)}\n")
        self._out.flush()
