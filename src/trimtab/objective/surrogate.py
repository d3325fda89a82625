"""The policy term's loss per token: one function for every ``loss.name``."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from trimtab.objective.clip import importance, ppo_clip
from trimtab.objective.dppo import dppo_kl, dppo_tv
from trimtab.objective.ratio import log_ratio
from trimtab.objective.score import cispo, reinforce
from trimtab.objective.sequence import gmpo, vespo
from trimtab.objective.soft import sapo
from trimtab.objective.terms import Surrogate, TokenTerms
from trimtab.spec import LOG_RATIO_CLAMP, LossName, LossSpec, RatioLevel
from trimtab.stat import exponent_limit

__all__ = ["Surrogate", "TokenTerms", "policy_terms"]


def policy_terms(spec: LossSpec, t: TokenTerms, *, clamp: float | None = LOG_RATIO_CLAMP) -> Surrogate:
    """Loss, gradient and flags of each token under ``loss.name``; denominators are applied elsewhere.

    The weight multiplies each token's loss, but for gmpo (geometric mean over the row) and vespo (folded into the
    row's ratio). ``loss.ratio_level`` acts on ppo_clip, importance, cispo and sapo. ``clamp`` bounds the log-ratio that
    is exponentiated, nats. Tokens that don't count have loss 0 and no gradient, whatever stands there.
    """
    t = t.clean()
    out = _every_token(spec, t, clamp)
    if t.all_counted:
        return out
    return Surrogate(
        torch.where(t.counted_N, out.loss_N, 0.0),
        out.clipped_low_N & t.counted_N,
        out.clipped_high_N & t.counted_N,
        out.dual_clipped_N & t.counted_N,
    )


def _every_token(spec: LossSpec, t: TokenTerms, clamp: float | None) -> Surrogate:
    low, high, cap = spec.clip_low, spec.clip_high, spec.ratio_cap
    a_N = t.advantage_N

    def x(level: RatioLevel = spec.ratio_level) -> Tensor:
        return log_ratio(t, level, clamp)

    match spec.name:
        case LossName.ppo_clip:
            out = ppo_clip(x(), a_N, clip_low=low, clip_high=high, dual_clip=spec.dual_clip, ratio_cap=cap)
        case LossName.importance:
            out = importance(x(), a_N)
        case LossName.reinforce:
            out = reinforce(t.current_N, a_N)
        case LossName.cispo:
            out = cispo(x(), t.current_N, a_N, clip_low=low, clip_high=high)
        case LossName.sapo:
            out = sapo(x(), a_N, tau_positive=spec.sapo_tau_positive, tau_negative=spec.sapo_tau_negative)
        case LossName.dppo_tv:
            r = x(RatioLevel.token)
            out = dppo_tv(t.current_N, t.anchor_N, r, a_N, clip_low=low, clip_high=high, ratio_cap=cap)
        case LossName.dppo_kl:
            r = x(RatioLevel.token)
            out = dppo_kl(t.current_N, t.anchor_N, r, a_N, clip_low=low, clip_high=high, ratio_cap=cap)
        case LossName.gmpo:
            return gmpo(t, clip_low=low, clip_high=high, clamp=clamp)
        case LossName.vespo:
            return vespo(t, positive=spec.vespo_positive, negative=spec.vespo_negative)
    return replace(out, loss_N=_weighted(out.loss_N, t.weight_N))


def _weighted(loss_N: Tensor, weight_N: Tensor) -> Tensor:
    """Their product. Where it overflows, because ratio and weight are both huge, the weight gives way: it saturates."""
    product_N = loss_N * weight_N
    if product_N.detach().isfinite().all():
        return product_N
    most_N = math.exp(exponent_limit(loss_N.dtype)) / loss_N.detach().abs().clamp(min=1.0)
    return loss_N * torch.minimum(weight_N, most_N)
