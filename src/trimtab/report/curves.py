"""A setting's mean and t band over seeds against step, tokens or wall time; fewer points that still show every peak."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trimtab.report.model import Floats, Run, Setting
from trimtab.report.statistics import ALPHA
from trimtab.report.student import quantile

TOKENS, SECONDS = "train/tokens", "time/step"
FOREIGN_SECONDS = "_runtime"  # W&B's own clock, for runs that don't log the time of a step
MOST_COUNTS = 3  # numbers of seeds that are told one by one
GRID = 400  # points of an axis that the runs do not share


class Axis(Enum):
    """What a curve is drawn against."""

    step = "step"
    tokens = "tokens"  # response tokens since the start
    wall = "wall"  # seconds of training, summed over the steps


@dataclass(frozen=True)
class Curve:
    """``n[i]``: seeds with a value at ``x[i]``. ``low`` and ``high``: t interval, NaN where n < 2.

    Where a run ends or begins before others do the mean would jump by who is there; a point without a mean parts the
    line there (``breaks``).
    """

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    n: NDArray[np.int64]


def cumulated(values: Floats) -> Floats:
    """Running sum; what was not logged adds nothing."""
    return np.cumsum(np.where(np.isfinite(values), values, 0.0))


def axis_of(run: Run, axis: Axis | str) -> Floats | None:
    """The run's value of ``axis`` at each of its steps, never falling; None when it logged nothing that says so."""
    match Axis(axis):
        case Axis.step:
            return run.step.astype(np.float64)
        case Axis.tokens:
            column = run.columns.get(TOKENS)
        case Axis.wall:
            if SECONDS in run.columns:
                return cumulated(run.columns[SECONDS])
            column = run.columns.get(FOREIGN_SECONDS)
    if column is None:
        return None
    return np.maximum.accumulate(np.where(np.isfinite(column), column, 0.0))


def points(run: Run, metric: str, axis: Axis | str) -> tuple[Floats, Floats] | None:
    """(x, y) where the metric was logged, y NaN where it was non-finite; None without a finite value."""
    column, along = run.columns.get(metric), axis_of(run, axis)
    if column is None or along is None:
        return None
    logged = np.isfinite(column)
    if not logged.any():
        return None
    if metric in run.broken:
        logged = logged | np.isin(run.step, run.broken[metric])
    x, y = along[logged], column[logged]
    last = np.append(np.diff(x) > 0, True)  # of several values at one x the last
    return x[last], y[last]


def between(x: Floats, y: Floats, grid: Floats) -> Floats:
    """y at ``grid`` by straight lines between neighbours; NaN outside of x, and next to a y that is NaN."""
    found = np.interp(grid, x, y, left=math.nan, right=math.nan)
    exact = np.isin(grid, x)  # a NaN must not spread to the points beside it
    if exact.any() and np.isnan(y).any():
        found[exact] = y[np.searchsorted(x, grid[exact])]
    return np.asarray(found, dtype=np.float64)


def curve(setting: Setting, metric: str, axis: Axis | str = Axis.step) -> Curve:
    """Mean and t interval over the setting's seeds of ``metric`` along ``axis``.

    Against the step the grid is every step at which any run logged the metric, else at most ``GRID`` points over the
    range. A run counts from its first to its last value, never beyond; where some have ended, n is smaller, and the
    line breaks. Runs of one seed (settings that ``--by`` pools) are averaged first. An empty curve when no run has the
    metric.
    """
    found = [(run, at) for run in setting.runs if (at := points(run, metric, axis)) is not None]
    if not found:
        nothing = np.zeros(0)
        return Curve(nothing, nothing, nothing, nothing, np.zeros(0, dtype=np.int64))
    grid = np.unique(np.concatenate([x for _, (x, _) in found]))
    if Axis(axis) is not Axis.step and len(grid) > GRID:
        grid = np.linspace(grid[0], grid[-1], GRID)
    lines = by_seed([(run.seed, between(x, y, grid)) for run, (x, y) in found])
    return parted(band(grid, lines), breaks(grid, lines, Axis(axis)))


def breaks(x: Floats, lines: Sequence[Floats], axis: Axis) -> list[int]:
    """Points before which a line ended, or at which one begins, while another goes on.

    Runs begin at one step but not at one token or second: beginnings within the first 5% of such an axis count as one.
    """
    spans = [(int(at[0]), int(at[-1])) for line in lines if len(at := np.flatnonzero(np.isfinite(line)))]
    first, last = min((a for a, _ in spans), default=0), max((b for _, b in spans), default=0)
    early = first if axis is Axis.step else int(np.searchsorted(x, x[0] + 0.05 * (x[-1] - x[0]), side="right")) - 1
    return sorted({b + 1 for _, b in spans if b < last} | {a for a, _ in spans if a > max(first, early)})


def parted(found: Curve, at: Sequence[int]) -> Curve:
    """``found`` with a point of no value half-way before each of the points ``at``."""
    if not at:
        return found
    middle = [(float(found.x[i - 1]) + float(found.x[i])) / 2 for i in at]
    mean, low, high = (np.insert(line, at, math.nan) for line in (found.mean, found.low, found.high))
    return Curve(np.insert(found.x, at, middle), mean, low, high, np.insert(found.n, at, found.n[list(at)]))


def lonely(y: Floats) -> list[int]:
    """Finite values without a finite neighbour: a line has no length there, so they need a dot."""
    there = np.concatenate([[False], np.isfinite(y), [False]])
    return [int(i) for i in np.flatnonzero(there[1:-1] & ~there[:-2] & ~there[2:])]


def seeds_drawn(found: Curve) -> str:
    """``n = 3``, or ``n = 3, 2, then 1`` where runs end before others; empty for an empty curve."""
    counts = found.n[np.isfinite(found.mean)].tolist()
    apart = [n for i, n in enumerate(counts) if i == 0 or n != counts[i - 1]]
    if len(apart) > MOST_COUNTS:
        return f"n = {max(apart)} to {min(apart)}"
    return f"n = {', '.join(map(str, apart[:-1]))}, then {apart[-1]}" if len(apart) > 1 else "".join(
        f"n = {n}" for n in apart)  # fmt: skip


def by_seed(values: Sequence[tuple[int | None, Floats]]) -> list[Floats]:
    """One line for each seed, the mean of its runs where all have a value; runs without a seed stand for themselves."""
    lines: dict[object, list[Floats]] = {}
    for i, (seed, line) in enumerate(values):
        lines.setdefault(("none", i) if seed is None else seed, []).append(line)
    return [np.mean(parts, axis=0) if len(parts) > 1 else parts[0] for parts in lines.values()]


def band(x: Floats, lines: Sequence[Floats]) -> Curve:
    """mean ± t(1 − α/2; n − 1) · s/√n at each x over the lines that have a value there."""
    table = np.vstack(lines)
    there = np.isfinite(table)
    n = there.sum(axis=0)
    total = np.where(there, table, 0.0).sum(axis=0)
    mean = np.divide(total, n, out=np.full(len(x), math.nan), where=n > 0)
    squares = np.where(there, (table - mean) ** 2, 0.0).sum(axis=0)
    error = np.sqrt(np.divide(squares, n * (n - 1), out=np.full(len(x), math.nan), where=n > 1))
    half = np.asarray([factor(int(count)) for count in n]) * error
    return Curve(x, mean, mean - half, mean + half, n.astype(np.int64))


@lru_cache(maxsize=4096)
def factor(n: int) -> float:
    """t(1 − α/2; n − 1)."""
    return quantile(1 - ALPHA, n - 1) if n > 1 else math.nan


# -- fewer points ----------------------------------------------------------------------------------------------------


def downsample(x: Floats, y: Floats, width: int) -> tuple[Floats, Floats]:
    """At most about 4 points for each of ``width`` stretches of x: the first, lowest, highest and last value of each.

    Drawn at ``width`` pixels the line looks as that of all points, peaks included. A gap (NaN) stays a gap: where a
    stretch holds NaN between points that stay, one is kept.
    """
    chosen = thinned(x, [(y, True, True)], width)
    return x[chosen], y[chosen]


def thin_run(x: Floats, y: Floats, points: int) -> tuple[Floats, Floats]:
    """``downsample`` to about ``points`` points."""
    return downsample(x, y, max(points // 4, 1))


def thin_curve(found: Curve, points: int) -> Curve:
    """About ``points`` points of a curve: of each stretch the ends, the mean's extremes and the band's outermost."""
    chosen = thinned(found.x, [(found.mean, True, True), (found.low, True, False), (found.high, False, True)],
                     max(points // 6, 1))  # fmt: skip
    return Curve(found.x[chosen], found.mean[chosen], found.low[chosen], found.high[chosen], found.n[chosen])


def thinned(x: Floats, lines: Sequence[tuple[Floats, bool, bool]], width: int) -> NDArray[np.int64]:
    """Which points to keep of lines over a common x: (values, keep the lowest, keep the highest) each."""
    if width < 1:
        raise ValueError(f"width={width} must be at least 1")
    if len(x) <= 4 * width:
        return np.arange(len(x))
    span = float(x[-1] - x[0])
    places = (x - x[0]) / span * width if span > 0 else np.zeros(len(x))
    bucket = np.minimum(places.astype(np.int64), width - 1)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    keep: set[int] = set()
    for start, end in pairwise([*starts.tolist(), len(x)]):
        for y, low, high in lines:
            keep |= {start + i for i in extremes(y[start:end], low, high)}
    return np.asarray(sorted(keep), dtype=np.int64)


def extremes(y: Floats, low: bool = True, high: bool = True) -> set[int]:
    """Where the first, lowest, highest and last finite values of ``y`` are, and one NaN of each gap that parts them."""
    finite = np.flatnonzero(np.isfinite(y))
    if not len(finite):
        return {0}
    chosen = {int(finite[0]), int(finite[-1])}
    if low:
        chosen.add(int(finite[np.argmin(y[finite])]))
    if high:
        chosen.add(int(finite[np.argmax(y[finite])]))
    gaps = np.flatnonzero(~np.isfinite(y))
    for before, after in pairwise([-1, *sorted(chosen), len(y)]) if len(gaps) else ():
        chosen |= {int(i) for i in gaps[(gaps > before) & (gaps < after)][:1]}
    return chosen
