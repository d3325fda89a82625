"""Intervals by resampling whole responses: tokens of one response are not independent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS = 1000
LEVEL = 0.95

_HUGE = 1e300  # stands for infinity in sums: none of it must stay none, and 0 times infinity is not a number

Sums = Mapping[str, Tensor]
Formula = Callable[[Sums], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval; ``low`` and ``high`` are NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def bounded(self) -> bool:
        return not (math.isnan(self.low) or math.isnan(self.high))


@dataclass(frozen=True)
class Resamples:
    """``counts_RB[r, b]``: how often response b is in resample r; float64. None drawn: fewer than two responses."""

    counts_RB: Tensor

    @classmethod
    def of(cls, rows: int, seed: int, draws: int = DRAWS) -> Resamples:
        """``draws`` resamples of ``rows`` responses with replacement, a function of the seed."""
        if rows < 2:
            return cls(torch.zeros(0, rows, dtype=torch.float64))
        chosen = torch.randint(rows, (draws, rows), generator=torch.Generator().manual_seed(seed))
        counts = torch.zeros(draws, rows, dtype=torch.float64)
        return cls(counts.scatter_add_(1, chosen, torch.ones(draws, rows, dtype=torch.float64)))

    def estimates(self, sums_B: Sums, formula: Formula) -> dict[str, Estimate]:
        """Figures that are functions of sums over responses. ``sums_B``: each response's part of each sum, float64."""
        names = list(sums_B)
        sums_B = {name: sums_B[name].clamp(-_HUGE, _HUGE) for name in names}
        whole = _told(formula({name: sums_B[name].sum() for name in names}))
        if not self.counts_RB.numel():
            return {name: Estimate(float(value)) for name, value in whole.items()}
        drawn_RK = self.counts_RB @ torch.stack([sums_B[name] for name in names], dim=1)
        resampled = _told(formula({name: drawn_RK[:, k] for k, name in enumerate(names)}))
        return {name: Estimate(float(value), *interval(resampled[name])) for name, value in whole.items()}

    def quantiles(self, value_N: Tensor, row_N: Tensor, shares: Mapping[str, float]) -> dict[str, Estimate]:
        """Quantiles of ``value_N``: the smallest value at or below which at least the share of values lies."""
        if not value_N.numel():
            return {name: Estimate(math.nan) for name in shares}
        order = value_N.argsort()
        sorted_N, row_N = value_N[order], row_N[order]
        whole = _weighted(sorted_N, torch.ones_like(sorted_N), shares)
        drawn = [_weighted(sorted_N, counts_B[row_N], shares) for counts_B in self.counts_RB]
        found = {}
        for name in shares:
            some = torch.tensor([draw[name] for draw in drawn], dtype=torch.float64)
            found[name] = Estimate(whole[name], *interval(some))
        return found


def interval(drawn_R: Tensor) -> tuple[float, float]:
    """Percentile interval of resampled figures; those that a resample could not give are left out."""
    good = drawn_R[~drawn_R.isnan()]
    if good.numel() < 2:
        return math.nan, math.nan
    ordered = good.sort().values  # not torch.quantile: it makes NaN between infinities
    tail = (1 - LEVEL) / 2
    last = len(ordered) - 1
    return float(ordered[math.floor(tail * last)]), float(ordered[math.ceil((1 - tail) * last)])


def _told(figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.where(x.abs() > _HUGE * 1e-10, x.sign() * math.inf, x) for name, x in figures.items()}


def _weighted(sorted_N: Tensor, weight_N: Tensor, shares: Mapping[str, float]) -> dict[str, float]:
    seen = weight_N.cumsum(0)
    total = float(seen[-1])
    if total == 0:
        return dict.fromkeys(shares, math.nan)
    # Half a count of tolerance: a share times a whole number of tokens must not miss it by rounding.
    at = {name: int(torch.searchsorted(seen, max(math.ceil(share * total - 1e-9), 1) - 0.5)) for name, share in
          shares.items()}  # fmt: skip
    return {name: float(sorted_N[min(i, len(sorted_N) - 1)]) for name, i in at.items()}
