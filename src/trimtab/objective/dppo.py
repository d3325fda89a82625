"""Divergence PPO: the trust region bounds a divergence of the token's probabilities, not their ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.objective.terms import Surrogate

PROBABILITY_GUARD = 1e-8
"""Added to 1 - p inside the logarithm: p may round to 1."""


def dppo_tv(
    current_N: Tensor,
    anchor_N: Tensor,
    log_ratio_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ratio_cap: float | None,
) -> Surrogate:
    """Score-function loss of the tokens whose probability has not moved too far the way its advantage pulls it.

    Keep when p - q <= clip_high if A > 0, and when p - q >= -clip_low otherwise, with p = exp(current), q =
    exp(anchor): the total variation of (token, every other token), signed. See ``_masked`` for the loss. Source:
    arXiv:2602.04879 (DPPO-Binary-TV).
    """
    moved = current_N.detach().exp() - anchor_N.exp()
    keep = torch.where(advantage_N > 0, moved <= clip_high, moved >= -clip_low)
    return _masked(keep, current_N, log_ratio_N, advantage_N, ratio_cap)


def dppo_kl(
    current_N: Tensor,
    anchor_N: Tensor,
    log_ratio_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ratio_cap: float | None,
) -> Surrogate:
    """As ``dppo_tv``, bounding the KL divergence of anchor to current over (token, every other token).

    KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p)). A token beyond the bound (clip_high if A > 0, else clip_low)
    stays when its update would bring it back: p <= q with A > 0, p >= q otherwise. Source: arXiv:2602.04879
    (DPPO-Binary-KL).
    """
    p, q = current_N.detach().exp(), anchor_N.exp()
    rest = ((1.0 - q + PROBABILITY_GUARD) / (1.0 - p + PROBABILITY_GUARD)).log()
    kl = q * (anchor_N - current_N.detach()) + (1.0 - q) * rest
    keep = torch.where(advantage_N > 0, (kl <= clip_high) | (p <= q), (kl <= clip_low) | (p >= q))
    return _masked(keep, current_N, log_ratio_N, advantage_N, ratio_cap)


def _masked(
    keep_N: Tensor, current_N: Tensor, log_ratio_N: Tensor, advantage_N: Tensor, ratio_cap: float | None
) -> Surrogate:
    """-sg(min(r, cap)) A logp where kept, 0 elsewhere; the weight multiplies it.

    Flags: tokens left out with A <= 0 (low) and A > 0 (high); kept ones whose ratio the cap cut (dual).
    """
    r = log_ratio_N.detach().exp()
    capped = r if ratio_cap is None else r.clamp(max=ratio_cap)
    loss = torch.where(keep_N, -capped * advantage_N * current_N, 0.0)
    up = advantage_N > 0
    return Surrogate(loss, ~keep_N & ~up, ~keep_N & up, keep_N & (r > capped))
