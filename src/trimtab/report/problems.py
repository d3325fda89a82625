"""What a reader must know about runs and settings before believing a table. Nothing is dropped in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from trimtab.report.model import Problem, Row, Run, RunState
from trimtab.report.score import Score, collapse, tail
from trimtab.report.scored import Scored, shared
from trimtab.track.alarms import PREFIX as ALARM

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
    yield from alarms(run)
    if run.state is RunState.unknown and scored.value is not None:
        yield Problem("unknown end", run.name, "nothing says whether it came to its end; its score counts")
    if run.seed is None:
        yield Problem("no seed", run.name, "its config names no seed: it counts, but cannot be paired with other runs")
    for remark in run.remarks:
        yield Problem("damaged", run.name, remark)


def alarms(run: Run) -> Iterator[Problem]:
    """Alarms that training raised; a gap that was put in on purpose raises them too."""
    raised = []
    for name in sorted(run.columns):
        steps = run.step[np.isfinite(run.columns[name])]
        if name.startswith(ALARM) and len(steps):
            raised.append(f"{name.removeprefix(ALARM)} at {len(steps)} steps, first {steps[0]}")
    if raised:
        meant = f"; its gap is on purpose ({run.injected})" if run.injected else ""
        yield Problem("alarm", run.name, f"training raised {'; '.join(raised)}{meant}; its score counts")


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


def short_run(run: Run, scored: Score, metric: str, last: int, at: int | None) -> Iterator[Problem]:
    """A score that speaks of a slightly earlier step than others, or is the mean of fewer values than asked for."""
    if scored.value is None:
        return
    values, step = tail(run, metric, last, at)
    full, _ = tail(run, metric, last)
    if at is not None and len(full) and tail(run, metric, 1)[1] < at:
        yield Problem("shorter", run.name, f"its last {metric} is of step {step}, others reach {at}; its score counts")
    if len(values) < last:
        upto = f" up to step {at}" if len(full) > len(values) else ""
        yield Problem("few values", run.name, f"it has {len(values)} values of {metric} after step 0{upto}, not "
                      f"{last}; its score is their mean")  # fmt: skip


def longer(beyond: Mapping[str, int], at: Mapping[str, int | None]) -> Iterator[Problem]:
    """Settings whose runs go on after the step that all are scored at."""
    for label, step in beyond.items():
        yield Problem("longer", label, f"its runs go on to step {step}: scored at step {at[label]}, the last that "
                      "every setting reaches; what comes after takes no part")  # fmt: skip


def unequal(own: Scored, base: Scored) -> Iterator[Problem]:
    """Pooled settings that only one of a setting and the baseline has: their means are not of the same."""
    both = shared(own, base)
    mine, theirs = sorted(own.variants - both), sorted(base.variants - both)
    if not mine and not theirs:
        return
    parts = [f"{who}: {_some(names)}" for who, names in (("only it has", mine), ("only the baseline has", theirs))
             if names]  # fmt: skip
    over = f"the difference is over {_some(sorted(both))}" if both else "nothing can be paired, so it is untested"
    yield Problem("unequal", own.setting.label, f"pooled over unequal settings, so its mean and rank are not of the "
                  f"same as the baseline's ({'; '.join(parts)}); {over}")  # fmt: skip


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def superseded(pairs: Sequence[tuple[Run, Run]]) -> Iterator[Problem]:
    """Runs that were done again; where the earlier one counts, why."""
    for run, by in pairs:
        text = f"same setting and seed ({run.seed}) as {by.name}, which counts instead"
        later = (run.attempt, run.updated) > (by.attempt, by.updated) and run.state is not RunState.missing
        if later and by.state is RunState.completed and run.state is not by.state:
            text += f": that one completed, this later one did not ({run.state.value})"
        elif later:
            text += ": that one has more steps, though this one is later"
        yield Problem("superseded", run.name, text)


def of_setting(row: Row, is_baseline: bool) -> Iterator[Problem]:
    """Seeds without a score, and what that does to the comparison."""
    if row.expected <= len(row.scores):
        return
    text = f"{len(row.scores)} of {row.expected} seeds have a score ({row.lost})"
    if row.scores:
        text += ": the mean is over those that came through, which may flatter it"
        if is_baseline:
            text += "; every difference is over its seeds only"
        elif row.difference.pairs:
            text += f"; pairs of seeds in its difference: {len(row.difference.pairs)}"
    yield Problem("incomplete", row.setting.label, text)
