"""A sweep as text: counts on top, then one line a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from trimtab.launch.model import PlannedRun, RunStatus, State

BAR = 30
# What a person looks for first when there is no room for all.
ORDER = (State.failed, State.lost, State.unknown, State.out_of_memory, State.node_failed, State.timed_out,
         State.running, State.suspended, State.preempted, State.cancelled, State.pending, State.unsubmitted,
         State.completed)  # fmt: skip
BAD = (
    State.failed,
    State.lost,
    State.unknown,
    State.out_of_memory,
    State.node_failed,
    State.timed_out,
    State.cancelled,
)


def counts(runs: Sequence[RunStatus]) -> dict[State, int]:
    """How many runs are in which state, none left out that has one."""
    found = Counter(run.state for run in runs)
    return {state: found[state] for state in State if found[state]}


def exit_code(runs: Sequence[RunStatus]) -> int:
    """0 when each run is completed or on its way; 1 when one failed, ended otherwise, or its state is not known."""
    if any(run.state in BAD for run in runs):
        return 1
    moving = any(run.state.live for run in runs)
    return 0 if moving or all(run.state is State.completed for run in runs) else 1


def short_names(runs: Sequence[PlannedRun]) -> dict[str, str]:
    """Folder to a name with eight digits of the hash, where that is enough to tell them apart."""
    names = {run.dir: run.dir.replace(run.config_hash, run.config_hash[:8]) for run in runs}
    times = Counter(names.values())
    return {run: name if times[name] == 1 else run for run, name in names.items()}


def progress(runs: Sequence[RunStatus], plain: bool = False) -> str:
    """``[#####.....]  12/40 completed, 3 running …``: a run under way counts by its steps."""
    done = sum(_share(run) for run in runs) / max(len(runs), 1)
    full = int(done * BAR + 1e-9)
    bar = ("#" * full + "." * (BAR - full)) if plain else ("█" * full + "░" * (BAR - full))
    return f"[{bar}] {done:4.0%}"


def _share(run: RunStatus) -> float:
    if run.state is State.completed:
        return 1.0
    return min((run.step or 0) / run.steps, 1.0) if run.steps else 0.0


def headline(name: str, runs: Sequence[RunStatus], combinations: int) -> str:
    """``algos: 12 combinations, 9 distinct: 4 completed, 3 running, 2 pending``."""
    asked = f"{combinations} combinations, {len(runs)} distinct" if combinations != len(runs) else f"{len(runs)} runs"
    return f"{name}: {asked}: " + ", ".join(f"{n} {state.value}" for state, n in counts(runs).items())


def lines(runs: Sequence[RunStatus], width: int | None = None, room: int | None = None) -> Iterator[str]:
    """The table. ``width``: columns to keep within; ``room``: lines at most, the most urgent runs first."""
    names = short_names([run.run for run in runs])
    shown = list(runs)
    if room is not None and len(runs) + 1 > room:
        shown = sorted(runs, key=lambda run: ORDER.index(run.state))[: max(room - 2, 1)]
    score = score_of(runs)
    rows = [("run", "where", "try", "step", score, "state"), *(_cells(run, names[run.run.dir], score) for run in shown)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        text = "  ".join(f"{cell:{size}}" for cell, size in zip(row, [*widths, 0], strict=True)).rstrip()
        yield cut(text, width)
    if len(shown) < len(runs):
        yield f"… and {len(runs) - len(shown)} more: trimtab sweep status"


def score_of(runs: Sequence[RunStatus]) -> str:
    """``reward``; or ``objective``, where a program of the user's own returns one and writes no reward."""
    programs_own = any(run.objective is not None for run in runs) and all(run.reward is None for run in runs)
    return "objective" if programs_own else "reward"


def cut(text: str, width: int | None) -> str:
    """``text`` within ``width`` columns, on one line."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if width is None or len(text) <= width else text[: width - 1] + "…"


def _cells(run: RunStatus, name: str, score: str) -> tuple[str, ...]:
    where = f"{run.cluster}:{run.job}".rstrip(":") if run.cluster else "-"
    step = "-" if run.step is None else f"{run.step}/{run.steps}" if run.steps else str(run.step)
    value = run.objective if score == "objective" else run.reward
    number = "-" if value is None else f"{value:.3f}" if score == "reward" else f"{value:.6g}"
    state = f"{run.state.value}: {run.reason}" if run.reason else run.state.value
    return name, where, str(run.attempt or "-"), step, number, state


def as_object(run: RunStatus) -> dict[str, Any]:
    """One run for ``--json``; ``state``, ``reason``, ``cluster``, ``job`` … beside what was planned."""
    found = asdict(run)
    return {**found.pop("run"), **found, "state": run.state.value}


def as_json(name: str, folder: str, combinations: int, runs: Sequence[RunStatus], remarks: Sequence[str]) -> str:
    """The sweep in one line of JSON."""
    return json.dumps(
        {"sweep": name, "folder": folder, "combinations": combinations, "remarks": list(remarks),
         "counts": {state.value: n for state, n in counts(runs).items()}, "runs": [as_object(run) for run in runs]},
        ensure_ascii=False,
    )  # fmt: skip
