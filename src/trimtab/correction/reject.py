"""Rejection: which tokens or rows are left out, by bounds on a statistic, and the veto for single bad tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.correction.band import Band, check_bounds
from trimtab.correction.log_ratio import LogRatio
from trimtab.correction.statistic import (
    Quantity,
    infinite_rows,
    infinite_tokens,
    row_extremes,
    row_value,
    token_value,
)
from trimtab.errors import ConfigError, DataError
from trimtab.spec import Level, OverTokens, Sign, Statistic


@dataclass(frozen=True)
class RejectRule:
    """Keep what has lower <= statistic <= upper, both inclusive; statistics and aggregates: ``statistic.py``.

    ``inverse``: of -d instead of d. ``clamp``: on each token's |d| before the statistic. ``sign``: only rows whose
    advantage has it are looked at, the others are kept. ``over_tokens`` (of a row): sum, mean, max, or every: each
    token's own statistic must lie inside.
    """

    statistic: Statistic
    level: Level
    over_tokens: OverTokens | None = None
    lower: float = -math.inf
    upper: float = math.inf
    inverse: bool = False
    clamp: float | None = None
    sign: Sign = Sign.any

    @classmethod
    def ratio(cls, level: Level, lower: float, upper: float) -> RejectRule:
        """Bounds on numerator/denominator: of a token, on the product of a row's, or on their geometric mean."""
        check_bounds("rs", lower, upper)
        match level:
            case Level.token:
                return cls(Statistic.ratio, Level.token, None, lower, upper)
            case Level.sequence:
                return cls(Statistic.ratio, Level.sequence, OverTokens.sum, lower, upper)
            case Level.geometric:
                return cls(Statistic.ratio, Level.sequence, OverTokens.mean, lower, upper)

    @property
    def quantity(self) -> Quantity:
        return Quantity(self.statistic, self.inverse, self.clamp)

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault is not None:
            over = "" if self.over_tokens is None else f",over_tokens:{self.over_tokens.value}"
            raise ConfigError(
                f"mis.reject: {{statistic:{self.statistic.value},level:{self.level.value}{over},lower:{self.lower:g},"
                f"upper:{self.upper:g}}}: {fault}; for example "
                "mis.reject=[{statistic:k3,level:sequence,over_tokens:mean,upper:0.01}]"
            )

    def _fault(self) -> str | None:
        if self.level is Level.geometric:
            return "level is token or sequence; a geometric mean is statistic:ratio,level:sequence,over_tokens:mean"
        if self.level is Level.token and self.over_tokens is not None:
            return "over_tokens says how the tokens of a sequence become one number; level:token has none"
        if self.level is Level.sequence and self.over_tokens is None:
            return "level:sequence needs over_tokens: sum, mean, max or every"
        if not self.lower <= self.upper:
            return "lower must not exceed upper"
        if math.isinf(self.lower) and math.isinf(self.upper):
            return "it bounds nothing; give lower or upper a number"
        if self.clamp is not None and not 0 < self.clamp < math.inf:
            return f"clamp:{self.clamp:g} must be a positive number of nats, or null for none"
        if self.clamp is not None and self.statistic is Statistic.prob_diff:
            return f"clamp:{self.clamp:g} is on a log-ratio, which prob_diff does not use; leave it out"
        return None


@dataclass(frozen=True)
class Rejection:
    """One rule's decisions at its level (L: M tokens or B rows)."""

    rule: RejectRule
    band: Band

    @property
    def level(self) -> Level:
        return self.rule.level

    @property
    def value_L(self) -> Tensor:
        """The statistic at the rule's level, in the inputs' dtype; of ``every`` the largest of the row's tokens."""
        return self.band.value_L

    @property
    def keep_L(self) -> Tensor:
        return self.band.inside_L


@dataclass(frozen=True)
class Veto:
    """``catastrophic_B``: how many tokens of each row are catastrophic (float64); ``keep_B``: none of them is."""

    catastrophic_B: Tensor
    keep_B: Tensor


def apply_rule(given: LogRatio, rule: RejectRule, advantage_B: Tensor | None = None) -> Rejection:
    """Compare the statistic at the rule's level with its bounds; ``advantage_B`` [B] is needed by a rule with a sign.

    Raises DataError if that is missing or of another shape.
    """
    quantity, unseen_B, lowest_B = rule.quantity, _unseen(given, rule.sign, advantage_B), None
    if rule.level is Level.token:
        value_L, infinite_L, exempt_L = token_value(given, quantity), infinite_tokens(given, quantity), given.missing_M
        if unseen_B is not None:
            unseen_M = given.rows.spread(unseen_B)
            exempt_L = unseen_M if exempt_L is None else unseen_M | exempt_L
    else:
        assert rule.over_tokens is not None  # __post_init__
        infinite_L, exempt_L = infinite_rows(given, quantity), unseen_B
        if rule.over_tokens is OverTokens.every:
            lowest_B, value_L = row_extremes(given, quantity, rule.lower, rule.upper)
        else:
            value_L = row_value(given, quantity, rule.over_tokens)
    return Rejection(rule, Band(value_L, rule.lower, rule.upper, exempt_L, infinite_L, lowest_B))


def apply_veto(given: LogRatio, threshold: float) -> Veto:
    """A row is rejected if any token has d_t < log(threshold), strictly and unclamped, or an infinite d_t."""
    if not 0 < threshold < 1:
        raise ConfigError(
            f"mis.rs_veto_threshold={threshold:g}: it is the ratio numerator/rollout below which a token is "
            "catastrophic and must lie between 0 and 1; for example mis.rs_veto_threshold=1e-4 (to veto the other "
            "tail: mis.reject=[{statistic:ratio,level:sequence,over_tokens:every,upper:1e4}])"
        )
    limit, count_B = math.log(threshold), given.rows.count_B
    if given.infinite_M is None and not given.extremes.low < limit:  # the usual batch, without a pass
        return Veto(catastrophic_B=torch.zeros(count_B.shape, dtype=torch.float64), keep_B=torch.ones_like(count_B) > 0)
    bad_M = given.log_ratio_M < limit
    if given.infinite_M is not None:
        bad_M |= given.infinite_M
    catastrophic_B = given.rows.sum(bad_M)
    return Veto(catastrophic_B, keep_B=catastrophic_B == 0)


def _unseen(given: LogRatio, sign: Sign, advantage_B: Tensor | None) -> Tensor | None:
    """Rows that a rule with this sign does not look at; None if it looks at all."""
    if sign is Sign.any:
        return None
    rows = len(given.rows.count_B)
    if advantage_B is None or advantage_B.shape != (rows,):
        shape = "no advantage_B" if advantage_B is None else f"advantage_B of shape {tuple(advantage_B.shape)}"
        raise DataError(
            f"{shape} was given for {rows} rows; a rejection rule with sign:{sign.value} needs each row's advantage "
            "(mis.reject=[{…,sign:any}] needs none)"
        )
    a_B = advantage_B.detach().cpu()
    match sign:
        case Sign.positive:
            return ~(a_B > 0)
        case Sign.nonpositive:
            return ~(a_B <= 0)
        case Sign.negative:
            return ~(a_B < 0)
        case Sign.nonnegative:
            return ~(a_B >= 0)
