"""What a reader must know about runs and settings before believing a table. Nothing is dropped in silence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from trimtab.report.model import Problem, Row, Run, RunState
from trimtab.report.score import Score, collapse, score, tail

NAMED = 3  # metrics named in one line
SKIPPED = "train/nonfinite_steps"


def of_run(run: Run, scored: Score, metric: str, last: int, lower: bool) -> Iterator[Problem]:
    """What is wrong with one run: why it has no score, collapse, values that are not finite, damaged files."""
    if scored.value is None:
        yield Problem(scored.kind, run.name, scored.why)
    told = collapse(run, metric, last, lower)
    if told:
        counts = "its score counts" if scored.value is not None else "it has no score"
        yield Problem("collapsed", run.name, f"{told}; {counts}")
    yield from nonfinite(run, scored, metric)
    if run.state is RunState.unknown and scored.value is not None:
        yield Problem("unknown end", run.name, "nothing says whether it came to its end; its score counts")
    if run.seed is None:
        yield Problem("no seed", run.name, "its config names no seed: it counts, but cannot be paired with other runs")
    for remark in run.remarks:
        yield Problem("damaged", run.name, remark)


def nonfinite(run: Run, scored: Score, metric: str) -> Iterator[Problem]:
    """Values of any metric that are NaN or infinite, and updates that training left out for such a loss or gradient."""
    told = metric if scored.kind == "non-finite" else ""
    names = sorted((name for name in run.nonfinite if name != told), key=lambda name: -run.nonfinite[name])
    if names:
        parts = [f"{name} at {run.nonfinite[name]} steps, first {min(run.broken[name])}" for name in names[:NAMED]]
        more = f" and {len(names) - NAMED} metrics more" if len(names) > NAMED else ""
        counts = "; its score counts" if scored.value is not None else ""
        yield Problem("non-finite", run.name, f"not finite: {'; '.join(parts)}{more}{counts}")
    column = run.columns.get(SKIPPED)
    skipped = column[np.isfinite(column)] if column is not None else np.zeros(0)
    if len(skipped) and skipped[-1] > 0:
        yield Problem("non-finite", run.name, f"{int(skipped[-1])} updates were left out: loss or gradient not finite")


def short_runs(runs: Sequence[Run], metric: str, last: int) -> Iterator[Problem]:
    """Runs whose score speaks of an earlier step than that of others, or is the mean of fewer values than asked for."""
    ends = {id(run): tail(run, metric, last) for run in runs if score(run, metric, last).value is not None}
    longest = max((step for _, step in ends.values()), default=0)
    for run in runs:
        values, step = ends.get(id(run), (None, longest))
        if step < longest:
            yield Problem("shorter", run.name,
                          f"its last {metric} is of step {step}, the longest run's of {longest}; "
                          "its score counts")  # fmt: skip
        if values is not None and len(values) < last:
            yield Problem("few values", run.name, f"it has {len(values)} values of {metric} after step 0, not {last}; "
                          "its score is their mean")  # fmt: skip


def superseded(pairs: Sequence[tuple[Run, Run]]) -> Iterator[Problem]:
    """Runs that were done again."""
    for run, by in pairs:
        yield Problem("superseded", run.name, f"same setting and seed ({run.seed}) as {by.name}, which counts instead")


def of_setting(row: Row, is_baseline: bool) -> Iterator[Problem]:
    """Seeds without a score, and what that does to the comparison."""
    if row.expected <= len(row.scores):
        return
    text = f"{len(row.scores)} of {row.expected} seeds have a score"
    absent = row.expected - len({run.seed for run in row.setting.runs})
    if absent > 0:
        text += f" (of {absent} there is no run at all)"
    if row.scores:
        text += ": the mean is over those that came through, which may flatter it"
        if is_baseline:
            text += "; every difference is over its seeds only"
        elif row.difference.pairs:
            text += f"; pairs of seeds in its difference: {len(row.difference.pairs)}"
    yield Problem("incomplete", row.setting.label, text)
