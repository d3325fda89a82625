"""The correction of one batch: a weight and a keep flag for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import torch
from torch import Tensor

from trimtab.correction.log_ratio import LogRatio, log_ratio
from trimtab.correction.normalise import weight_mass
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
    """What ``correct`` decides, and what ``measure`` needs.

    ``weight_N``: finite, 1 where masked out, in the inputs' dtype. ``keep_N``: bool, False where masked out.
    ``factor``: what weights were divided by (1 unless batch-normalised); ``mass``: this part's sum and count for it.
    """

    weight_N: Tensor
    keep_N: Tensor
    given: LogRatio
    weights: Weights | None
    rejections: tuple[Rejection, ...]
    veto: Veto | None
    keep: Keep
    mass: Mean
    factor: float


def correct(
    numerator_logp_N: Tensor,
    rollout_logp_N: Tensor,
    mask_N: Tensor,
    length_B: Tensor,
    *,
    weight: WeightRule | None,
    reject: Sequence[RejectRule] = (),
    veto: float | None = None,
    row_N: Tensor | None = None,
    factor: float | None = None,
) -> Correction:
    """Weights and keep flags from d = numerator - rollout (log-probs in nats, flat tokens, detached).

    numerator_logp_N, rollout_logp_N: float32 or float64 [N]; mask_N: bool [N], what stands where it is False is
    never looked at; length_B: int [B], tokens of each row, empty rows allowed; row_N: int [N], checked if given.
    A NaN rollout log-prob is missing: d = 0, weight 1, kept. Any other NaN or infinite d is catastrophic: rejected
    by each rejection, veto or mask that covers it, saturating otherwise (as -inf if it has no sign). All decisions
    AND together. ``factor``: a part of a batch divides by this, the merged parts' ``mass``, not by its own mean.
    Raises DataError for shapes that disagree and lengths that are no counts, ConfigError for impossible bounds.
    """
    given = log_ratio(numerator_logp_N, rollout_logp_N, mask_N, length_B)
    _check_rows(row_N, length_B)
    weights = None if weight is None else weigh(given, weight)
    rejections = tuple(apply_rule(given, rule) for rule in reject)
    vetoed = None if veto is None else apply_veto(given, veto)
    keep = _together(given, weights, rejections, vetoed)
    mass = Mean(0.0, 0, empty=1.0)
    if weights is not None and weights.rule.batch_normalize:
        mass = weight_mass(weights)
    applied = mass.value if factor is None else factor
    device = numerator_logp_N.device
    return Correction(
        weight_N=given.scatter(_token_weight(given, weights, applied), 1.0).to(device),
        keep_N=given.scatter(_token_keep(given, keep), False).to(device),
        given=given, weights=weights, rejections=rejections, veto=vetoed, keep=keep, mass=mass, factor=applied,
    )  # fmt: skip


def _together(given: LogRatio, weights: Weights | None, rejections: Sequence[Rejection], vetoed: Veto | None) -> Keep:
    row_B, token_M = torch.ones(len(given.rows.count_B), dtype=torch.bool), None
    decided = [(r.level, r.keep_L) for r in rejections]
    if weights is not None and weights.keep_L is not None:
        decided.append((weights.rule.level, weights.keep_L))
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
