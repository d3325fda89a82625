"""Losses whose gradient flows through the ratio: PPO's clipped surrogate and the plain importance-weighted one."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.objective.terms import Surrogate, unbounded


def ppo_clip(
    log_ratio_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> Surrogate:
    """The clipped surrogate max(-r A, -clip(r, 1 - low, 1 + high) A), with r = exp(log_ratio).

    log_ratio_N: current minus anchor, nats, [N] (see ``ratio.log_ratio``). With ``ratio_cap`` the free branch is
    -min(r, cap) A: for A < 0 the loss stops at cap |A| and the gradient with it (two-sided clipping). With
    ``dual_clip`` c > 1 and A < 0 the loss is at most c |A|. The weight multiplies the result. Source: arXiv:1707.06347
    (PPO), arXiv:1912.09729 (dual clip), arXiv:2505.07291 (two-sided).

    Options make other methods of it. DAPO: clip_high > clip_low, aggregate=token_mean (arXiv:2503.14476). Dr. GRPO:
    aggregate=sequence_sum, advantages without the standard deviation (arXiv:2503.20783). GSPO: ratio_level=sequence,
    aggregate=sequence_mean (arXiv:2507.18071). LUSPO: ratio_level=sequence, aggregate=sequence_sum with sum_constant=1,
    since the row's loss at each of its tokens sums to length times that loss (arXiv:2602.05261).
    """
    r = log_ratio_N.exp()
    free = -(r if ratio_cap is None else r.clamp(max=ratio_cap)) * advantage_N
    bounded = -r.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_N
    loss = torch.maximum(free, bounded)
    bites = bounded > free
    low = bites & (r < 1.0 - clip_low)
    high = bites & (r > 1.0 + clip_high)
    dual = torch.zeros_like(low)
    if ratio_cap is not None:
        dual = (advantage_N < 0) & (r > ratio_cap)
    if dual_clip is not None:
        most = -dual_clip * advantage_N
        over = (advantage_N < 0) & (loss > most)
        loss, dual = torch.where(over, most, loss), dual | over
    return Surrogate(loss, low, high, dual)


def importance(log_ratio_N: Tensor, advantage_N: Tensor) -> Surrogate:
    """-r A with r = exp(log_ratio), nothing clipped; the gradient -r A grad logp flows through r.

    log_ratio_N: current minus anchor, nats, [N]. The weight multiplies the result. On its own it is the surrogate that
    PPO clips; with rejection of tokens by probability difference it is DPPO in prime-rl's form. Source:
    arXiv:1502.05477 (equation 14), arXiv:2602.04879.
    """
    return unbounded(-log_ratio_N.exp() * advantage_N)
