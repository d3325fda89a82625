"""verl's metrics of its policy losses, ``actor/*`` (commit 1dda039b)."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from trimtab.peers.rows import TINY, ValidTokens
from trimtab.peers.verl import Metrics
from trimtab.stat import LOG_RATIO_CLAMP

GSPO_CLAMP = 10.0


class VerlLoss(Enum):
    """verl's ``loss_mode``; reinforce is bypass mode's loss of that name."""

    vanilla = "vanilla"
    gspo = "gspo"
    cispo = "cispo"
    sapo = "sapo"
    geo_mean = "geo_mean"
    dppo_tv = "dppo_tv"
    dppo_kl = "dppo_kl"
    reinforce = "reinforce"


def policy_loss(
    current_N: Tensor,
    anchor_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    *,
    loss: VerlLoss,
    advantage_N: Tensor,
    clip_low: float,
    clip_high: float,
    cap: float | None = None,
) -> Metrics:
    """``actor/ppo_kl``, ``pg_clipfrac``, ``pg_clipfrac_lower``: means over valid_N, which rejection has passed.

    x = current - anchor (proximal; bypass: rollout), clamped to +-20 (not for gspo, geo_mean, reinforce);
    ppo_kl = mean -x. clipfrac: vanilla, gspo: the clipped loss is greater; cispo: exp(x) is outside the bounds;
    geo_mean: x is outside [-low, high] with A > 0 (lower: with A < 0); dppo: the divergence mask drops the token.
    lower: vanilla: the loss exceeds cap * |A| with A < 0; dppo: a token is kept with exp(x) > cap.
    ``cap`` is verl's clip_ratio_c; None: 3 for vanilla, 20 for dppo.
    """
    at, x_N = ValidTokens(valid_N, row_N, length_B), current_N - anchor_N
    clamped_N = x_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    low, high = 1 - clip_low, 1 + clip_high
    clipped_N, lower_N = torch.zeros_like(valid_N), torch.zeros_like(valid_N)
    match loss:
        case VerlLoss.vanilla:
            ratio_N = clamped_N.exp()
            clipped_N, lower_N = _clipped(ratio_N, advantage_N, low, high, 3.0 if cap is None else cap)
            x_N = clamped_N
        case VerlLoss.gspo:
            row_B = at.mean_rows_exact(x_N)
            clipped_N, _ = _clipped(at.spread(row_B).clamp(max=GSPO_CLAMP).exp(), advantage_N, low, high, None)
        case VerlLoss.cispo:
            ratio_N, x_N = clamped_N.exp(), clamped_N
            clipped_N = ratio_N != ratio_N.clamp(low, high)
        case VerlLoss.sapo:
            x_N = clamped_N
        case VerlLoss.geo_mean:
            outside_N = x_N != x_N.clamp(-clip_low, clip_high)
            clipped_N, lower_N = outside_N & (advantage_N > 0), outside_N & (advantage_N < 0)
        case VerlLoss.dppo_tv | VerlLoss.dppo_kl:
            clipped_N = ~_within(loss, current_N, anchor_N, advantage_N, clip_low, clip_high)
            lower_N, x_N = (clamped_N.exp() > (20.0 if cap is None else cap)) & ~clipped_N, clamped_N
        case VerlLoss.reinforce:
            return {"actor/ppo_kl": float(at.mean(-x_N))}
    return {
        "actor/pg_clipfrac": float(at.mean(clipped_N.to(x_N.dtype))),
        "actor/ppo_kl": float(at.mean(-x_N)),
        "actor/pg_clipfrac_lower": float(at.mean(lower_N.to(x_N.dtype))),
    }


def _clipped(ratio_N: Tensor, advantage_N: Tensor, low: float, high: float, cap: float | None) -> tuple[Tensor, Tensor]:
    """Where clipping makes the loss greater, and where the dual clip then makes it smaller."""
    free_N, bounded_N = -advantage_N * ratio_N, -advantage_N * ratio_N.clamp(low, high)
    dual_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    if cap is not None:
        dual_N = (torch.maximum(free_N, bounded_N) > -advantage_N * cap) & (advantage_N < 0)
    return bounded_N > free_N, dual_N


def _within(
    loss: VerlLoss, current_N: Tensor, anchor_N: Tensor, advantage_N: Tensor, low: float, high: float
) -> Tensor:
    """dppo's mask: moves against the advantage's sign are free, others up to a divergence of low or high.

    tv: p - q, signed; kl: q log(q/p) + (1 - q) log((1 - q)/(1 - p)), of p = exp(current), q = exp(anchor).
    """
    p_N, q_N = current_N.exp(), anchor_N.exp()
    if loss is VerlLoss.dppo_tv:
        up_N, down_N = p_N - q_N <= high, p_N - q_N >= -low
    else:
        rest_N = ((1 - q_N + TINY) / (1 - p_N + TINY)).log()
        divergence_N = q_N * (anchor_N - current_N) + (1 - q_N) * rest_N
        up_N, down_N = (divergence_N <= high) | (p_N <= q_N), (divergence_N <= low) | (p_N >= q_N)
    return torch.where(advantage_N > 0, up_N, down_N)
