"""Statistics that merge exactly: the whole's statistic is the merge of its parts', in any order.

Counts and extremes are exact, sums are float64. Each class is a handful of numbers, so ranks can
all-reduce them: add ``total``, ``count`` and ``bins``, take the smallest ``low`` and the largest ``high``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab.spec import LOG_RATIO_CLAMP

__all__ = ["EXPONENT_MARGIN", "LOG_RATIO_CLAMP", "Extremes", "Histogram", "Mean", "Spread", "exponent_limit"]

EXPONENT_MARGIN = 10.0
"""Nats between the largest exponent and overflow: room for an advantage and for a sum over tokens."""


def exponent_limit(dtype: torch.dtype, clamp: float | None = None) -> float:
    """Largest log-ratio, nats, that is exponentiated: ``clamp``, and never more than the dtype holds the exp of.

    log(largest number) - EXPONENT_MARGIN: 78.7 in float32, 699.8 in float64. Above it a ratio saturates.
    """
    limit = math.log(torch.finfo(dtype).max) - EXPONENT_MARGIN
    return limit if clamp is None else min(clamp, limit)


@dataclass(frozen=True)
class Mean:
    """A sum and how many values it holds; the mean of nothing is ``empty``."""

    total: float
    count: float
    empty: float = 0.0

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count, self.empty)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else self.empty


@dataclass(frozen=True)
class Extremes:
    """Smallest and largest value seen; both 0 when nothing was."""

    low: float = math.inf
    high: float = -math.inf

    def merge(self, other: Extremes) -> Extremes:
        return Extremes(min(self.low, other.low), max(self.high, other.high))

    @property
    def smallest(self) -> float:
        return self.low if self.low <= self.high else 0.0

    @property
    def largest(self) -> float:
        return self.high if self.low <= self.high else 0.0

    @property
    def magnitude(self) -> float:
        return max(-self.smallest, self.largest)


@dataclass(frozen=True)
class Spread:
    """Sums behind the effective sample size of n weights, as a fraction: (Σw)² / (n Σw²); 0 if all are 0."""

    total: float
    squares: float
    count: int

    def merge(self, other: Spread) -> Spread:
        return Spread(self.total + other.total, self.squares + other.squares, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total**2 / (self.count * self.squares) if self.squares > 0 else 0.0


@dataclass(frozen=True)
class Histogram:
    """Counts of finite numbers' magnitudes, binned by the high 16 bits of their float32.

    Seven bits of mantissa: a quantile is right to a relative 2**-8 (it is the middle of its bin).
    """

    bins: Tensor  # int64 [32768]

    @classmethod
    def of(cls, x: Tensor) -> Histogram:
        """``x``: flat, float32 or float64, of either sign."""
        bits = np.abs(x.numpy()).astype(np.float32, copy=False).view(np.int32) >> 16
        return cls(torch.bincount(torch.from_numpy(bits), minlength=1 << 15))

    def merge(self, other: Histogram) -> Histogram:
        return Histogram(self.bins + other.bins)

    def quantiles(self, *shares: float) -> list[float]:
        """The values below or at which these shares of the magnitudes lie; 0 when there are none."""
        seen = self.bins.numpy().cumsum()
        at = np.searchsorted(seen, [max(1, math.ceil(share * seen[-1])) for share in shares]) * (seen[-1] > 0)
        low, high = ((at << 16 | rest).astype(np.int32).view(np.float32).astype(np.float64) for rest in (0, 0xFFFF))
        values: list[float] = np.where(at > 0, (low + high) / 2, 0.0).tolist()
        return values
