"""Rejection: which tokens or rows are left out, by bounds on the raw ratio, and the veto for single bad tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.correction.band import Band, band, check_bounds
from trimtab.correction.log_ratio import LogRatio
from trimtab.errors import ConfigError
from trimtab.spec import Level


@dataclass(frozen=True)
class RejectRule:
    """Keep what has lower <= numerator/rollout <= upper at ``level``, both inclusive."""

    level: Level
    lower: float
    upper: float

    def __post_init__(self) -> None:
        check_bounds("rs", self.lower, self.upper)


@dataclass(frozen=True)
class Rejection:
    """One rule's decisions at its level (L: M tokens or B rows)."""

    level: Level
    band: Band

    @property
    def keep_L(self) -> Tensor:
        return self.band.inside_L


@dataclass(frozen=True)
class Veto:
    """``catastrophic_B``: how many tokens of each row are catastrophic (float64); ``keep_B``: none of them is."""

    catastrophic_B: Tensor
    keep_B: Tensor


def apply_rule(given: LogRatio, rule: RejectRule) -> Rejection:
    """Compare the unclamped ratio of the rule's level with its bounds."""
    return Rejection(rule.level, band(given, rule.level, rule.lower, rule.upper))


def apply_veto(given: LogRatio, threshold: float) -> Veto:
    """A row is rejected if any token has d_t < log(threshold), strictly and unclamped, or an infinite d_t."""
    if not 0 < threshold < 1:
        raise ConfigError(
            f"mis.rs_veto_threshold={threshold:g}: it is the ratio numerator/rollout below which a token is "
            "catastrophic and must lie between 0 and 1; for example mis.rs_veto_threshold=1e-4"
        )
    limit, count_B = math.log(threshold), given.rows.count_B
    if given.infinite_M is None and not given.extremes.low < limit:  # the usual batch, without a pass
        return Veto(catastrophic_B=torch.zeros(count_B.shape, dtype=torch.float64), keep_B=torch.ones_like(count_B) > 0)
    bad_M = given.log_ratio_M < limit
    if given.infinite_M is not None:
        bad_M |= given.infinite_M
    catastrophic_B = given.rows.sum(bad_M)
    return Veto(catastrophic_B, keep_B=catastrophic_B == 0)
