"""A run's score: the mean of its last values of the metric, fixed beforehand, never the best; and what bars one.

How many values. An evaluation comes each ``evaluation.every`` steps (50 by default: 6 after step 0 in a default run)
and is taken from a few hundred problems: three of them cut its noise by 1.7 and still speak of the end. A metric that
comes with every step is noisier and denser: ten, as in summary.json. Step 0 is before training and never counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.report.model import Comparison, Floats, Run, RunState

EVALUATION, REWARD = "eval/reward", "train/reward"
LAST_EVALUATIONS, LAST_STEPS = 3, 10
NO_ENTROPY = 0.01  # nats
NEAR = 0.98  # of the steps, from which a run counts as one that reached the others' last
LATE = (3, 2, 1)  # last values that are looked at for a fall too late to show in a window
SURE_LATE = 5.0  # fewer values, so their noise's tails count
ENOUGH = 4  # differences from which those of differences tell the noise
SURE = 3.0  # standard errors, on top of what the best of many windows gains by chance


@dataclass(frozen=True)
class Score:
    """``value``: None with the reason in ``why``; ``kind``: that of the Problem it makes."""

    value: float | None
    kind: str = ""
    why: str = ""


def default_last(metric: str) -> int:
    """Values that a score is the mean of."""
    return LAST_EVALUATIONS if metric.startswith("eval/") else LAST_STEPS


def tail(run: Run, metric: str, last: int, at: int | None = None) -> tuple[Floats, int]:
    """The last ``last`` values that were logged after step 0, non-finite ones as NaN; and the step of the last one.

    ``at``: the last step that is looked at; None: the run's.
    """
    column = run.columns.get(metric)
    if column is None:
        return np.zeros(0), 0
    logged = np.isfinite(column)
    if metric in run.broken:
        logged = logged | np.isin(run.step, run.broken[metric])
    logged = logged & (run.step > 0) & (run.step <= (at if at is not None else np.inf))
    steps = run.step[logged]
    return column[logged][-last:], int(steps[-1]) if len(steps) else 0


def tail_mean(run: Run, metric: str, last: int, at: int | None = None) -> float | None:
    """Mean of the finite ones among the last values; None when there is none."""
    values, _ = tail(run, metric, last, at)
    finite = values[np.isfinite(values)]
    return math.fsum(finite) / len(finite) if len(finite) else None


def ended_early(run: Run, goal: int | None) -> bool:
    """Whether its last step is before 98% of ``goal``, though what follows may only not have been logged."""
    if goal is None or not len(run.step):
        return False
    gap = int(np.min(np.diff(run.step), initial=goal)) if len(run.step) > 1 else 1  # each tenth may be logged alone
    return int(run.step[-1]) + gap < goal and int(run.step[-1]) < NEAR * goal


def score(run: Run, metric: str, last: int, at: int | None = None, goal: int | None = None) -> Score:
    """The run's score; none for a run that hasn't ended well, lacks the metric or ended with values not finite.

    ``at``: the step to score it at; none either for a run that ended well before it. ``goal``: the step that it should
    end at; none for a run that ended before it.
    """
    match run.state:
        case RunState.failed | RunState.missing | RunState.running | RunState.preempted:
            return Score(None, run.state.value, unfinished(run))
        case RunState.completed | RunState.unknown:
            pass
    if run.state is RunState.unknown and not len(run.step):
        return Score(None, "nothing logged", "there is its config, but nothing logged that can be read")
    values, step = tail(run, metric, last, at)
    early = f"it ended at step {int(run.step[-1])} of {goal}: it has no score" if ended_early(run, goal) else ""
    if not len(values) and not early:
        return Score(None, "no score", f"it never logged {metric} after step 0")
    bad = int(np.sum(~np.isfinite(values)))
    if bad:
        why = f"{bad} of its last {len(values)} {metric} are not finite (step {step}): it has no score"
        return Score(None, "non-finite", why)
    if early:
        return Score(None, "shorter", early)
    if at is not None and step < NEAR * at:
        return Score(None, "shorter", f"its last {metric} is of step {step}, others reach {at}: it has no score")
    return Score(math.fsum(values) / len(values))


def scores_of(comparison: Comparison) -> dict[int, float | None]:
    """The score of each run that counts, by its identity, as the comparison took it."""
    pairs = (zip(row.setting.runs, row.run_scores, strict=False) for row in comparison.rows)
    return {id(run): value for found in pairs for run, value in found}


def unfinished(run: Run) -> str:
    """Why a run that did not complete has no score."""
    at = f"at step {int(run.step[-1])}" if len(run.step) else "before its first step"
    of = f" of {run.planned}" if run.planned is not None and len(run.step) else ""
    match run.state:
        case RunState.missing:
            return f"expected by its sweep, but there is no such run ({run.error})"
        case RunState.running:
            return f"still running, {at}{of}: it has no score yet"
        case RunState.preempted:
            return f"stopped {at}{of} and not resumed: it has no score"
        case RunState.failed | RunState.completed | RunState.unknown:
            return f"failed {at}{of}: {run.error or 'no reason given'}"


# -- collapse --------------------------------------------------------------------------------------------------------


def window_means(values: Floats, width: int) -> Floats:
    """Means of each ``width`` values that follow each other."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray((sums[width:] - sums[:-width]) / width, dtype=np.float64)


def step_noise(values: Floats) -> float:
    """Standard deviation of one value about a trend: 1.4826 · median |Δᵏx| / √C(2k, k), the smaller of k = 1 and 2."""
    first = np.diff(values)
    found = float(np.median(np.abs(first))) / math.sqrt(2)
    second = float(np.median(np.abs(np.diff(first)))) / math.sqrt(6) if len(first) >= ENOUGH else math.inf
    return 1.4826 * min(found, second)


def fall(values: Floats, last: int, end: int, noise: float, flat: bool) -> int | None:
    """The best window of ``last`` values where the ``end`` last values are a collapse from it, else None."""
    means = window_means(values, last)
    at = int(np.argmax(means))
    now = float(np.mean(values[-end:]))
    best, lost, gain = float(means[at]), float(means[at]) - now, float(means[at] - means[0])
    chance = math.sqrt(2 * math.log(max(len(means), 2)) / last)
    sure = SURE / math.sqrt(last) if end == last else SURE_LATE / math.sqrt(end)
    if lost <= noise * (chance + sure) or (lost <= max(gain, abs(best) / 2) / 2 and not flat):
        return None
    return at


def collapsed(run: Run, metric: str, last: int, lower: bool = False) -> str:
    """What to tell of a run whose ``metric`` rose and fell again; empty when it didn't.

    With ``last`` values a window, *lost* = best window − mean of the last e values, *gain* = best window − first
    window; e is ``last``, then 3, 2 and 1 for what fell at the very end. Collapsed: lost > max(gain, |best| / 2) / 2,
    and lost > s · (√(2 ln windows / last) + 3/√last), s being the noise of one value: what the best of so many windows
    is above the last one by chance, and three standard errors; for e < last five, 5/√e. Where the entropy ended below
    0.01 nats the second is enough.
    """
    column = run.columns.get(metric)
    if column is None:
        return ""
    finite = np.isfinite(column)
    values, steps = column[finite] * (-1.0 if lower else 1.0), run.step[finite]
    if len(values) < last + 2:
        return ""
    entropy = tail_mean(run, "train/entropy", LAST_STEPS)
    flat = entropy is not None and entropy < NO_ENTROPY
    noise, sign = step_noise(values), -1.0 if lower else 1.0
    for end in dict.fromkeys((last, *(e for e in LATE if e < last))):
        if end == last and len(values) < 2 * last:
            continue
        at = fall(values, last, end, noise, flat and end == last)
        if at is not None:
            peak = sign * float(window_means(values, last)[at])
            told = f"{metric} {'rose' if lower else 'fell'} from {peak:.3g} (about step {int(steps[at + last - 1])})"
            told += f" to {sign * float(values[-1]):.3g} (step {int(steps[-1])})"
            told += f" in its last {end} value{'s' * (end > 1)}" if end < last else ""
            return told + (f", entropy to {entropy:.2g} nats" if flat else "")
    return ""


def collapse(run: Run, metric: str, last: int, lower: bool = False) -> str:
    """Looks at the metric and at the training reward, which is denser."""
    looked: Sequence[tuple[str, int, bool]] = [(metric, last, lower)]
    if metric != REWARD:
        looked = [*looked, (REWARD, LAST_STEPS, False)]
    return "; ".join(told for name, width, down in looked if (told := collapsed(run, name, width, down)))
