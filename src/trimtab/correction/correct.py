"""The correction of one batch: a weight and a keep flag for each token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Sequence

import torch
from torch import Tensor

from trimtab.correction.log_ratio import LogRatio, log_ratio
from trimtab.correction.m2 import SecondMoment, apply_m2
from trimtab.correction.normalise import divisor, weight_mass
from trimtab.correction.reject import Rejection, RejectRule, Veto, apply_rule, apply_veto
from trimtab.correction.rows import room
from trimtab.correction.weight import WeightRule, Weights, weigh
from trimtab.errors import DataError
from trimtab.spec import Level
from trimtab.stat import Mean


@dataclass(frozen=True)
class Keep:
    """What all decisions together keep: rows, and single tokens of kept rows (None: all of them)."""

    row_B: Tensor
    token_M: Tensor | None


@dataclass(frozen=True)
class Correction:
    """What ``correct`` decides, and what ``measure`` and ``summarise`` need.

    ``factor``: what weights are divided by (1 unless batch-normalised); ``mass``: this part's sum and count for it.
    """

    given: LogRatio
    weights: Weights | None
    rejections: tuple[Rejection, ...]
    veto: Veto | None
    m2: SecondMoment | None
    keep: Keep
    mass: Mean
    factor: float

    @cached_property
    def weight_N(self) -> Tensor:
        """1 where masked out, always finite; in the inputs' dtype, on their device."""
        return self.given.scatter(_token_weight(self.given, self.weights, self.factor), 1.0).to(self.given.device)

    @cached_property
    def keep_N(self) -> Tensor:
        """Bool, False where masked out."""
        return self.given.scatter(_token_keep(self.given, self.keep), False).to(self.given.device)


def correct(
    numerator_logp_N: Tensor,
    rollout_logp_N: Tensor,
    mask_N: Tensor,
    length_B: Tensor,
    *,
    weight: WeightRule | None,
    reject: Sequence[RejectRule] = (),
    veto: float | None = None,
    m2: float | None = None,
    advantage_B: Tensor | None = None,
    row_N: Tensor | None = None,
    factor: float | None = None,
) -> Correction:
    """Weights and keep flags from d = numerator - rollout (log-probs in nats, flat tokens, detached).

    numerator_logp_N, rollout_logp_N: float32 or float64 [N]; mask_N: bool [N], what stands where it is False is
    never looked at; length_B: int [B], tokens of each row, empty rows allowed; row_N: int [N], checked if given;
    advantage_B: [B], needed by rules with a sign. A NaN rollout log-prob is missing: d = 0, weight 1, kept. Any other
    NaN or infinite d is catastrophic: rejected by each rejection, veto or mask that covers it, saturating otherwise
    (as -inf if it has no sign). All decisions AND together. ``m2``: see ``apply_m2``; it is over the whole call.
    ``factor``: a part of a batch divides by this, the merged parts' ``mass``, not by its own mean.
    Raises DataError for shapes that disagree and lengths that are no counts, ConfigError for impossible bounds.
    """
    given = log_ratio(numerator_logp_N, rollout_logp_N, mask_N, length_B)
    _check_rows(row_N, length_B)
    return correct_given(
        given, weight=weight, reject=reject, veto=veto, m2=m2, advantage_B=advantage_B, factor=factor
    )  # fmt: skip


def correct_given(
    given: LogRatio,
    *,
    weight: WeightRule | None,
    reject: Sequence[RejectRule] = (),
    veto: float | None = None,
    m2: float | None = None,
    advantage_B: Tensor | None = None,
    factor: float | None = None,
) -> Correction:
    """``correct`` of a ``log_ratio`` that several corrections share: what they have in common is computed once."""
    weights = None if weight is None else weigh(given, weight)
    rejections = tuple(apply_rule(given, rule, advantage_B) for rule in reject)
    vetoed = None if veto is None else apply_veto(given, veto)
    moment = None if m2 is None else apply_m2(given, m2)
    mass = Mean(0.0, 0, empty=1.0)
    if weights is not None and weights.rule.batch_normalize:
        mass = weight_mass(weights)
    return Correction(
        given=given,
        weights=weights,
        rejections=rejections,
        veto=vetoed,
        m2=moment,
        keep=_together(given, weights, rejections, vetoed, moment),
        mass=mass,
        factor=divisor(mass.value if factor is None else factor),
    )


def _together(
    given: LogRatio,
    weights: Weights | None,
    rejections: Sequence[Rejection],
    vetoed: Veto | None,
    moment: SecondMoment | None,
) -> Keep:
    row_B, token_M = torch.ones(len(given.rows.count_B), dtype=torch.bool), None
    decided = [(r.level, r.keep_L) for r in rejections]
    if weights is not None and weights.keep_L is not None:
        decided.append((weights.rule.level, weights.keep_L))
    if moment is not None and moment.keep_M is not None:
        decided.append((Level.token, moment.keep_M))
    for level, keep_L in decided:
        match level:
            case Level.token:
                token_M = keep_L if token_M is None else token_M & keep_L
            case Level.sequence | Level.geometric:
                row_B = row_B & keep_L
    return Keep(row_B if vetoed is None else row_B & vetoed.keep_B, token_M)


def _token_weight(given: LogRatio, weights: Weights | None, factor: float) -> Tensor:
    if weights is None:
        return torch.ones_like(given.log_ratio_M)
    scaled_L = weights.bounded_L
    if factor != 1:
        scaled_L = torch.div(scaled_L, factor, out=room(scaled_L))
    return scaled_L if weights.rule.level is Level.token else given.rows.spread(scaled_L)


def _token_keep(given: LogRatio, keep: Keep) -> Tensor:
    keep_M = given.rows.spread(keep.row_B)
    return keep_M if keep.token_M is None else keep_M & keep.token_M


def _check_rows(row_N: Tensor | None, length_B: Tensor) -> None:
    """O(B): first and last token of each row."""
    if row_N is None:
        return
    rows = torch.arange(len(length_B), device=length_B.device)[length_B > 0]
    ends = length_B.cumsum(0)[length_B > 0]
    if row_N.numel() != int(length_B.sum()) or any(
        not torch.equal(row_N[at].to(rows), rows) for at in (ends - length_B[length_B > 0], ends - 1)
    ):
        raise DataError("row_N must give the row number of each token, in order, as length_B does")
