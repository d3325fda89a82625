"""What AReaL logs of its actor loss, token by token, by its names.

Commit 4aef98d8, ``areal/utils/functional/functional.py``. Its loss takes the tokens that its rejection kept as valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.peers.options import member
from trimtab.peers.segments import row_mean
from trimtab.spec import RatioLevel


class Action(Enum):
    """``action`` of ``rejection_sampling``: leave out, or bound the weight."""

    mask = "mask"
    clamp = "clamp"


class Metric(Enum):
    """``metric`` of ``rejection_sampling``."""

    ratio = "ratio"
    kl_k1 = "kl_k1"
    kl_k2 = "kl_k2"
    kl_k3 = "kl_k3"


class Aggregation(Enum):
    """``agg`` of ``rejection_sampling``."""

    sum = "sum"
    mean = "mean"
    max = "max"


class Unit(Enum):
    """``level`` of ``rejection_sampling``."""

    token = "token"
    sequence = "sequence"


@dataclass(frozen=True)
class RejectionSampling:
    """``rejection_sampling``. Raises ConfigError for what AReaL refuses: a clamp of a KL, bounds of a ratio unless
    0 < lower and 1 < upper."""

    level: Unit = Unit.token
    action: Action = Action.mask
    metric: Metric = Metric.ratio
    agg: Aggregation = Aggregation.mean
    upper: float = 5.0
    lower: float | None = None

    def __post_init__(self) -> None:
        if self.metric is not Metric.ratio and self.action is Action.clamp:
            raise ConfigError(
                f"action=clamp with metric={self.metric.value} is refused; allowed: metric=ratio, or action=mask"
            )
        if self.metric is Metric.ratio and not self.upper > 1:
            raise ConfigError(f"upper={self.upper:g} with metric=ratio is refused; allowed: > 1; for example 2.0")
        if self.metric is Metric.ratio and self.lower is not None and not self.lower > 0:
            raise ConfigError(
                f"lower={self.lower:g} with metric=ratio is refused; allowed: > 0, or null; for example 0.5"
            )


def rejection_sampling(given: Mapping[str, Any]) -> RejectionSampling:
    """Of the option's own keys; a missing one has AReaL's default. Raises ConfigError for an unknown choice."""
    default = RejectionSampling()
    return RejectionSampling(
        level=member(Unit, "level", given.get("level", default.level.value)),
        action=member(Action, "action", given.get("action", default.action.value)),
        metric=member(Metric, "metric", given.get("metric", default.metric.value)),
        agg=member(Aggregation, "agg", given.get("agg", default.agg.value)),
        upper=given.get("upper", default.upper),
        lower=given.get("lower"),
    )


@dataclass(frozen=True)
class Options:
    """``importance_sampling_level``, ``eps_clip``, ``eps_clip_higher`` (empty: eps_clip) and ``c_clip`` (> 1)."""

    importance_sampling_level: RatioLevel = RatioLevel.token
    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None


@dataclass(frozen=True)
class Behave:
    """What rejection sampling decided: ``keep_N``, and the weights proximal/rollout before and after their bounds.

    ``raw_weight_N`` None: action mask, which bounds no weight.
    """

    keep_N: Tensor
    weight_N: Tensor
    raw_weight_N: Tensor | None = None


def actor_stats(
    *,
    current_N: Tensor,
    proximal_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    advantage_B: Tensor,
    options: Options,
    behave: Behave | None = None,
) -> dict[str, float | Tensor]:
    """``stat``: tensors of N tokens (what stands at tokens that are not valid follows AReaL's formulas, unused there).

    ``loss`` is weighted, before masking. With ``behave`` (rejection sampling is on) also ``behave_*`` and
    ``filtered_fraction``: tokens left out (mask) or whose weight a bound changed (clamp), of all valid ones.
    """
    kept_N = valid_N if behave is None else valid_N & behave.keep_N
    apart_N, rows = (current_N - proximal_N).detach(), len(length_B)
    advantage_N = advantage_B.to(apart_N.dtype)[row_N]
    match options.importance_sampling_level:
        case RatioLevel.token:
            ratio_N = apart_N.exp()
        case RatioLevel.sequence | RatioLevel.sequence_token:
            ratio_N = row_mean(apart_N, kept_N, row_N, rows).exp()[row_N]
            advantage_N = torch.where(kept_N, row_mean(advantage_N, kept_N, row_N, rows)[row_N], 0.0)
    ratio_N = torch.where(kept_N, ratio_N, 0.0)
    loss_N, clipped_N, dual_N = _clipped(ratio_N, advantage_N, options)
    found: dict[str, float | Tensor] = {
        "loss": loss_N,
        "importance_weight": ratio_N,
        "approx_kl": apart_N,
        "clip_mask": clipped_N & kept_N,
        "dual_clip_mask": dual_N & kept_N,
    }
    if behave is not None:
        weight_N = torch.where(kept_N, behave.weight_N.to(loss_N.dtype), 0.0)
        found["loss"] = loss_N * weight_N
        found |= _behave_stats(behave, weight_N, proximal_N, rollout_N, valid_N, kept_N)
    return found


def _clipped(ratio_N: Tensor, advantage_N: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's loss and where its two bounds take the gradient; the dual bound is c |A| for both signs of A."""
    high = options.eps_clip if options.eps_clip_higher is None else options.eps_clip_higher
    free_N = -advantage_N * ratio_N
    bounded_N = -advantage_N * ratio_N.clamp(1.0 - options.eps_clip, 1.0 + high)
    loss_N, clipped_N = torch.maximum(free_N, bounded_N), free_N < bounded_N
    if options.c_clip is None:
        return loss_N, clipped_N, torch.zeros_like(clipped_N)
    cap_N = options.c_clip * advantage_N.abs()
    return torch.minimum(loss_N, cap_N), clipped_N, cap_N < loss_N


def _behave_stats(
    behave: Behave, weight_N: Tensor, proximal_N: Tensor, rollout_N: Tensor, valid_N: Tensor, kept_N: Tensor
) -> dict[str, float | Tensor]:
    mask_N = (weight_N > 0) & kept_N
    raw_N = behave.raw_weight_N
    touched_N = valid_N & (~kept_N if raw_N is None else raw_N != behave.weight_N)
    return {
        "behave_approx_kl": torch.where(mask_N, (proximal_N - rollout_N).detach(), 0.0),
        "behave_imp_weight": weight_N,
        "behave_mask": mask_N,
        "filtered_fraction": int(touched_N.sum()) / max(int(valid_N.sum()), 1),
    }
