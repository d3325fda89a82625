"""What can be said of a few runs: t intervals, paired differences, Holm's correction, the interquartile mean.

Values of one setting are taken as independent draws over seeds; differences are taken seed by seed, so what a seed does
to both settings alike cancels. Everything is two-sided at ``ALPHA``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trimtab.report.model import Difference, Floats, Interval, Verdict
from trimtab.report.student import quantile, two_sided

ALPHA = 0.05
ROBUST_FROM = 10  # runs from which quartiles, and resampling them, mean something
RESAMPLES = 10_000
EQUAL = 1e-12  # spread, against the size of the values, below which they count as equal: rounding leaves more than 0


def no_spread(values: Sequence[float], scale: float = 0.0) -> bool:
    """Whether all values are equal but for rounding. ``scale``: size of the numbers that they were taken from."""
    return max(values) - min(values) <= EQUAL * max(scale, *(abs(value) for value in values))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and standard error s/√n with s² = Σ(x − mean)² / (n − 1); n ≥ 2."""
    n = len(values)
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, math.sqrt(variance / n)


def t_interval(values: Sequence[float], what: str = "seed", scale: float = 0.0) -> Interval:
    """mean ± t(1 − α/2; n − 1) · s/√n. No bounds, and the reason, for n < 2 and for values without spread."""
    n = len(values)
    if n == 0:
        return Interval(math.nan, None, None, 0, f"no {what} has a value")
    if n == 1:
        return Interval(float(values[0]), None, None, 1, f"one {what} says nothing about the spread")
    mean, error = mean_and_error(values)
    if no_spread(values, scale):
        return Interval(mean, None, None, n, f"all {n} values are equal: no spread to judge by")
    half = quantile(1 - ALPHA, n - 1) * error
    return Interval(mean, mean - half, mean + half, n)


def paired(pairs: Sequence[tuple[int, float]], scale: float = 0.0) -> Difference:
    """t interval and p value of differences by seed; ``p_corrected`` and the verdict are still to come (``corrected``).

    ``scale``: size of the scores whose differences these are, so that a difference by rounding alone is none.

    t = mean / (s/√n), p = P(|T| ≥ |t|) with n − 1 degrees. Without spread: p = 1 when all differences are 0; equal ones
    that aren't 0 have no p value, as runs that differ by exactly the same amount are no independent draws.
    """
    values = [value for _, value in pairs]
    interval = t_interval(values, "pair of seeds", scale)
    p: float | None = None
    if len(values) >= 2:
        mean, error = mean_and_error(values)
        if not no_spread(values, scale):
            p = two_sided(mean / error, len(values) - 1)
        elif max(abs(value) for value in values) <= EQUAL * scale:
            p = 1.0
        else:
            why = f"all {len(values)} differences are equal: such runs are no independent draws"
            interval = Interval(interval.mean, None, None, interval.n, why)
    return Difference(interval, p, None, Verdict.untested, tuple(pairs))


def untested(why: str) -> Difference:
    """No difference, and the reason."""
    return Difference(Interval(math.nan, None, None, 0, why), None, None, Verdict.untested, ())


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the i-th smallest of m times m − i + 1, not below those before it, at most 1."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    corrected, highest = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = highest
    return corrected


def corrected(differences: Sequence[Difference], lower: bool = False) -> list[Difference]:
    """Differences with p corrected over those that have one, and the verdict. ``lower``: smaller values are better.

    Where lost seeds make p larger (``p_lost``), that one is corrected.
    """
    p = [d.p if d.p_lost is None else d.p_lost for d in differences]
    tested = [i for i, value in enumerate(p) if value is not None]
    values = holm([value for value in p if value is not None])
    found = list(differences)
    for i, value in zip(tested, values, strict=True):
        old = differences[i]
        found[i] = replace(old, p_corrected=value, verdict=verdict(old.interval.mean, value, lower))
    return found


def verdict(mean: float, p: float, lower: bool = False) -> Verdict:
    """What a corrected p value says."""
    if p > ALPHA:
        return Verdict.undecided
    return Verdict.better if (mean < 0) is lower else Verdict.worse


def trimmed(values: Floats) -> Floats:
    """Interquartile means along the last axis: the mean without the ⌊n/4⌋ smallest and the ⌊n/4⌋ largest values."""
    n = values.shape[-1]
    cut = n // 4
    return np.asarray(np.sort(values, axis=-1)[..., cut : n - cut].mean(axis=-1), dtype=np.float64)


def interquartile(strata: Sequence[Sequence[float]], random: int = 0) -> Interval | None:
    """Interquartile mean of all runs; 95 % percentile interval, resampled within each stratum. None below 10 runs."""
    n = sum(len(stratum) for stratum in strata)
    if n < ROBUST_FROM:
        return None
    rng = np.random.default_rng(random)
    parts = [np.asarray(stratum, dtype=np.float64) for stratum in strata if len(stratum)]
    drawn = np.concatenate([part[rng.integers(0, len(part), (RESAMPLES, len(part)))] for part in parts], axis=1)
    low, high = np.quantile(trimmed(drawn), [ALPHA / 2, 1 - ALPHA / 2])
    return Interval(float(trimmed(np.concatenate(parts))), float(low), float(high), n)
