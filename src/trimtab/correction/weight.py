"""Importance weights: exp of the level's log-ratio, clamped for safety, then bounded by the rule's mode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trimtab.correction.band import Band, band, check_bounds
from trimtab.correction.level import level_log_ratio
from trimtab.correction.log_ratio import LogRatio
from trimtab.correction.rows import Rows, room
from trimtab.spec import Level, TisMode
from trimtab.stat import LOG_RATIO_CLAMP


@dataclass(frozen=True)
class WeightRule:
    """How weights are made. ``lower`` is used by clip and mask, ``upper`` by truncate too; None is no bound.

    ``off`` means: not bounded (but for the safety clamp).
    """

    level: Level
    mode: TisMode
    lower: float | None
    upper: float | None
    batch_normalize: bool = False

    @property
    def low(self) -> float:
        """The lower bound in force; 0 if there is none."""
        return 0.0 if self.lower is None or self.mode in (TisMode.off, TisMode.truncate) else self.lower

    @property
    def high(self) -> float:
        """The upper bound in force; inf if there is none."""
        return math.inf if self.upper is None or self.mode is TisMode.off else self.upper

    def __post_init__(self) -> None:
        check_bounds("tis", self.low, self.high)


@dataclass(frozen=True)
class Weights:
    """Weights at the rule's level (L: M tokens or B rows), before batch normalising; all finite.

    ``raw_L`` is before and ``bounded_L`` after bounding; ``band`` tells which ones the bounds concern, ``clamped_L``
    where the safety clamp bites (None: nowhere).
    """

    rule: WeightRule
    rows: Rows
    raw_L: Tensor
    bounded_L: Tensor
    clamped_L: Tensor | None
    band: Band

    @property
    def keep_L(self) -> Tensor | None:
        """What the weight's own bound keeps; None unless the mode is mask, as other bounds reject nothing."""
        return self.band.inside_L if self.rule.mode is TisMode.mask else None

    @cached_property
    def bounded_B(self) -> Tensor:
        """Row sums of the bounded weights of all valid tokens, float64."""
        return self._sum(self.bounded_L)

    @cached_property
    def raw_B(self) -> Tensor:
        """Row sums of the raw weights of all valid tokens, float64."""
        return self.bounded_B if self.bounded_L is self.raw_L else self._sum(self.raw_L)

    def _sum(self, x_L: Tensor) -> Tensor:
        return self.rows.sum(x_L) if self.rule.level is Level.token else x_L.double() * self.rows.count_B


def weigh(given: LogRatio, rule: WeightRule) -> Weights:
    """w = exp(clamp(log-ratio at the level, ±LOG_RATIO_CLAMP)), then the mode's bound.

    truncate: min(w, upper); clip: min(max(w, lower), upper); mask: w, and keep = lower <= w <= upper; off: w.
    A missing token has weight 1 at token level.
    """
    at = band(given, rule.level, rule.low, rule.high)
    log_ratio_L = level_log_ratio(given, rule.level)
    raw_L, clamped_L = at.ratio_L, None
    if _beyond_clamp(given, rule.level, log_ratio_L):
        # exp is monotone: clamping its value is clamping its argument, and saves an exp; inf and 0 are clamped too
        raw_L = at.ratio_L.clamp(math.exp(-LOG_RATIO_CLAMP), math.exp(LOG_RATIO_CLAMP))
        clamped_L = log_ratio_L.abs() > LOG_RATIO_CLAMP
    match rule.mode:
        case TisMode.off | TisMode.mask:
            bounded_L = raw_L
        case TisMode.truncate | TisMode.clip:
            bounded_L = _bounded(raw_L, rule.low, rule.high)
    if at.missing_L is not None:
        bounded_L = bounded_L.where(~at.missing_L, 1.0)
    return Weights(rule, given.rows, raw_L, bounded_L, clamped_L, at)


def _bounded(raw_L: Tensor, low: float, high: float) -> Tensor:
    """The very tensor given if all of it lies within the bounds, as it often does."""
    if not raw_L.numel():
        return raw_L
    smallest, largest = raw_L.aminmax()
    if low <= float(smallest) and float(largest) <= high:
        return raw_L
    return torch.clamp(raw_L, low, high, out=room(raw_L))


def _beyond_clamp(given: LogRatio, level: Level, log_ratio_L: Tensor) -> bool:
    match level:
        case Level.token:
            return given.extremes.magnitude > LOG_RATIO_CLAMP
        case Level.sequence | Level.geometric:
            return bool((log_ratio_L.abs() > LOG_RATIO_CLAMP).any())
