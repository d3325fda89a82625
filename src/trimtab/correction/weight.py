"""Importance weights: exp of the level's log-ratio, clamped for safety, then bounded by the rule's mode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trimtab.correction.band import Band, band, check_bounds
from trimtab.correction.level import level_log_ratio
from trimtab.correction.log_ratio import LogRatio, finite_weight, moments
from trimtab.correction.rows import room
from trimtab.errors import ConfigError
from trimtab.spec import Level, TisMode
from trimtab.stat import LOG_RATIO_CLAMP, exponent_limit

UNBOUNDED = (TisMode.off, TisMode.unbounded)

METRIC_CLAMP = 80.0
"""Clamps up to here leave the sums of all weights, and of their squares, finite."""


@dataclass(frozen=True)
class WeightRule:
    """How weights are made. ``lower`` is used by clip, mask and zero, ``upper`` by truncate too; None is no bound.

    ``unbounded`` (and ``off``: who wants no weights gives no rule) has no bounds. ``clamp`` is on the level's
    |log-ratio|; without it (None) a log-ratio is bounded only above, by what the dtype can hold (``exponent_limit``).
    A weight is never infinite and never NaN.
    """

    level: Level
    mode: TisMode
    lower: float | None
    upper: float | None
    batch_normalize: bool = False
    clamp: float | None = LOG_RATIO_CLAMP

    @property
    def low(self) -> float:
        """The lower bound in force; 0 if there is none."""
        return 0.0 if self.lower is None or self.mode in (*UNBOUNDED, TisMode.truncate) else self.lower

    @property
    def high(self) -> float:
        """The upper bound in force; inf if there is none."""
        return math.inf if self.upper is None or self.mode in UNBOUNDED else self.upper

    def __post_init__(self) -> None:
        check_bounds("tis", self.low, self.high)
        if self.clamp is not None and not self.clamp > 0:
            raise ConfigError(
                f"mis.log_ratio_clamp={self.clamp:g}: it must be a positive number of nats, or null: only what the "
                "dtype can hold; for example mis.log_ratio_clamp=20"
            )


@dataclass(frozen=True)
class Weights:
    """Weights at the rule's level (L: M tokens or B rows), before batch normalising; all finite.

    ``raw_L`` is before and ``bounded_L`` after bounding; ``band`` tells which ones the bounds concern, ``clamped_L``
    where the clamp, or the dtype's own limit, bites (None: nowhere).
    """

    rule: WeightRule
    given: LogRatio
    raw_L: Tensor
    bounded_L: Tensor
    clamped_L: Tensor | None
    band: Band

    @property
    def keep_L(self) -> Tensor | None:
        """What the weight's own bound keeps; None unless the mode is mask, as other bounds reject nothing."""
        return self.band.inside_L if self.rule.mode is TisMode.mask else None

    @property
    def altered_L(self) -> Tensor | None:
        """Where the weight is not exp of the log-ratio: bounded, zeroed or clamped; None: nowhere."""
        if self.bounded_L is self.band.value_L:
            return None
        altered_L = self.bounded_L != self.band.value_L
        return altered_L | ~self.band.inside_L if self.rule.mode is TisMode.zero else altered_L

    @property
    def summable_L(self) -> Tensor:
        """The bounded weights, a huge one as the largest number of which metrics are made."""
        return self._summable(self.bounded_L)

    @cached_property
    def moments_B(self) -> tuple[Tensor, Tensor]:
        """Row sums of the bounded weights of all valid tokens, and of their squares, float64."""
        return self._moments(self.bounded_L)

    @property
    def bounded_B(self) -> Tensor:
        """Row sums of the bounded weights of all valid tokens, float64."""
        return self.moments_B[0]

    @cached_property
    def raw_B(self) -> Tensor:
        """Row sums of the raw weights of all valid tokens, float64."""
        if self.bounded_L is self.raw_L:
            return self.bounded_B
        if self.rule.level is Level.token and self.raw_L is not self.band.value_L:
            return self.given.rows.sum(self._summable(self.raw_L))
        return self._moments(self.raw_L)[0]

    def _moments(self, x_L: Tensor) -> tuple[Tensor, Tensor]:
        if self.rule.level is not Level.token:
            w_B, count_B = self._summable(x_L).double(), self.given.rows.count_B
            return w_B * count_B, w_B.square() * count_B
        return (
            self.given.ratio_moments_B if x_L is self.given.ratio_M else moments(self.given.rows, self._summable(x_L))
        )

    def _summable(self, x_L: Tensor) -> Tensor:
        finite = self.rule.clamp is not None and self.rule.clamp <= METRIC_CLAMP
        return x_L if finite else finite_weight(x_L)


def weigh(given: LogRatio, rule: WeightRule) -> Weights:
    """w = exp(clamp(log-ratio at the level, ±rule.clamp)), then the mode's bound; without a clamp: see ``WeightRule``.

    truncate: min(w, upper); clip: min(max(w, lower), upper); mask: w, and keep = lower <= w <= upper; zero: w if
    lower <= w <= upper, else 0, and the token stays (IcePop); unbounded: w. A missing token has
    weight 1 at token level.
    """
    at = band(given, rule.level, rule.low, rule.high)
    raw_L, clamped_L = _clamped(given, rule, at.value_L)
    match rule.mode:
        case TisMode.off | TisMode.unbounded | TisMode.mask:
            bounded_L = raw_L
        case TisMode.truncate | TisMode.clip:
            bounded_L = (
                raw_L if _within(given, raw_L, rule) else torch.clamp(raw_L, rule.low, rule.high, out=room(raw_L))
            )
        case TisMode.zero:
            within = at.infinite_L is None and _within(given, at.value_L, rule)  # before the clamp
            bounded_L = raw_L if within else raw_L.where(at.inside_L, 0.0)
    if at.exempt_L is not None and bounded_L is not raw_L:
        bounded_L = bounded_L.where(~at.exempt_L, 1.0)
    return Weights(rule, given, raw_L, bounded_L, clamped_L, at)


def _clamped(given: LogRatio, rule: WeightRule, ratio_L: Tensor) -> tuple[Tensor, Tensor | None]:
    """The ratios with the clamp applied, the very tensor given if it bites nowhere; and where it bites."""
    high = exponent_limit(ratio_L.dtype, rule.clamp)
    low = -math.inf if rule.clamp is None else -rule.clamp
    match rule.level:
        case Level.token:
            bites = given.extremes.low < low or given.extremes.high > high
        case Level.sequence | Level.geometric:
            log_L = level_log_ratio(given, rule.level)
            bites = bool(((log_L < low) | (log_L > high)).any())
    if not bites:
        return ratio_L, None
    # exp is monotone: clamping its value is clamping its argument, and saves an exp; inf and 0 are clamped too
    raw_L, log_L = ratio_L.clamp(math.exp(low), math.exp(high)), level_log_ratio(given, rule.level)
    return raw_L, (log_L < low) | (log_L > high)


def _within(given: LogRatio, x_L: Tensor, rule: WeightRule) -> bool:
    """Whether all of the numbers lie within the bounds, as they often do."""
    if not x_L.numel():
        return True
    low, high = given.ratio_range if x_L is given.ratio_M else map(float, x_L.aminmax())
    return rule.low <= low and high <= rule.high
