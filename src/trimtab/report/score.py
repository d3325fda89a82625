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

from trimtab.report.model import Floats, Run, RunState

EVALUATION, REWARD = "eval/reward", "train/reward"
LAST_EVALUATIONS, LAST_STEPS = 3, 10
NO_ENTROPY = 0.01  # nats
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


def tail(run: Run, metric: str, last: int) -> tuple[Floats, int]:
    """The last ``last`` values that were logged after step 0, non-finite ones as NaN; and the step of the last one."""
    column = run.columns.get(metric)
    if column is None:
        return np.zeros(0), 0
    logged = np.isfinite(column)
    if metric in run.broken:
        logged = logged | np.isin(run.step, run.broken[metric])
    logged = logged & (run.step > 0)
    steps = run.step[logged]
    return column[logged][-last:], int(steps[-1]) if len(steps) else 0


def tail_mean(run: Run, metric: str, last: int) -> float | None:
    """Mean of the finite ones among the last values; None when there is none."""
    values, _ = tail(run, metric, last)
    finite = values[np.isfinite(values)]
    return math.fsum(finite) / len(finite) if len(finite) else None


def score(run: Run, metric: str, last: int) -> Score:
    """The run's score; none for a run that hasn't ended well, lacks the metric or ended with values not finite."""
    match run.state:
        case RunState.failed | RunState.missing | RunState.running | RunState.preempted:
            return Score(None, run.state.value, unfinished(run))
        case RunState.completed | RunState.unknown:
            pass
    values, step = tail(run, metric, last)
    if not len(values):
        return Score(None, "no score", f"it never logged {metric} after step 0")
    bad = int(np.sum(~np.isfinite(values)))
    if bad:
        return Score(None, "non-finite", f"{bad} of its last {len(values)} {metric} are not finite (step {step})")
    return Score(math.fsum(values) / len(values))


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
    """Standard deviation of one value about a slow trend: 1.4826 · median |xᵢ₊₁ − xᵢ| / √2."""
    return 1.4826 * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)


def collapsed(run: Run, metric: str, last: int, lower: bool = False) -> str:
    """What to tell of a run whose ``metric`` rose and fell again; empty when it didn't.

    With ``last`` values a window, *lost* = best window − last window, *gain* = best window − first window. Collapsed:
    lost > max(gain, |best| / 2) / 2, and lost > s/√last · (√(2 ln windows) + 3), s being the noise of one value: what
    the best of so many windows is above the last one by chance, and three standard errors. Where the entropy ended
    below 0.01 nats the second is enough.
    """
    column = run.columns.get(metric)
    if column is None:
        return ""
    finite = np.isfinite(column)
    values, steps = column[finite] * (-1.0 if lower else 1.0), run.step[finite]
    if len(values) < 2 * last:
        return ""
    means = window_means(values, last)
    at = int(np.argmax(means))
    best, lost, gain = float(means[at]), float(means[at] - means[-1]), float(means[at] - means[0])
    if lost <= step_noise(values) / math.sqrt(last) * (math.sqrt(2 * math.log(max(len(means), 2))) + SURE):
        return ""
    entropy = tail_mean(run, "train/entropy", LAST_STEPS)
    flat = entropy is not None and entropy < NO_ENTROPY
    if lost <= max(gain, abs(best) / 2) / 2 and not flat:
        return ""
    sign = -1.0 if lower else 1.0
    peak, end = sign * best, sign * float(means[-1])
    told = (
        f"{metric} {'rose' if lower else 'fell'} from {peak:.3g} (about step {int(steps[at + last - 1])}) to {end:.3g}"
    )
    return told + (f", entropy to {entropy:.2g} nats" if flat else "")


def collapse(run: Run, metric: str, last: int, lower: bool = False) -> str:
    """Looks at the metric and at the training reward, which is denser."""
    looked: Sequence[tuple[str, int, bool]] = [(metric, last, lower)]
    if metric != REWARD:
        looked = [*looked, (REWARD, LAST_STEPS, False)]
    return "; ".join(told for name, width, down in looked if (told := collapsed(run, name, width, down)))
