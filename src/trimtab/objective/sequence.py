"""Losses of whole rows: geometric-mean policy optimisation, and a smooth weight of the sequence product."""

from __future__ import annotations

import math
from typing import Sequence

import torch
from torch import Tensor

from trimtab.objective.terms import Surrogate, TokenTerms, exponent, unbounded
from trimtab.spec import LOG_RATIO_CLAMP

WEIGHT_GUARD = 1e-10
"""Added to a weight before its logarithm: a weight may be 0."""

LOG_FLOOR = math.log(1e-8)


def gmpo(t: TokenTerms, *, clip_low: float, clip_high: float, clamp: float | None) -> Surrogate:
    """-A exp(mean over the row of c) W at each counted token, so that aggregate=sequence_mean is the mean over rows.

    c is x = current - anchor, bounded by clip_high from above where A > 0 and by -clip_low from below where A < 0 (the
    pessimistic side; bounds in log space, outside of them a token has no gradient). The row's weight is W = exp(mean
    log(weight + 1e-10)), a geometric mean too; A is the row's mean advantage. ``clamp`` bounds the mean of c. Means
    run over counted tokens. Source: arXiv:2507.20673 (GMPO, equation 6).
    """
    x_N = t.current_N - t.anchor_N
    high, low = (t.advantage_N > 0) & (x_N > clip_high), (t.advantage_N < 0) & (x_N < -clip_low)
    c_N = torch.where(high, clip_high, torch.where(low, -clip_low, x_N))
    log_ratio_B, dtype = t.row_mean(c_N), t.current_N.dtype
    log_weight_B = t.row_mean((t.weight_N + WEIGHT_GUARD).log())
    log_product_B = exponent(exponent(log_ratio_B, clamp, dtype) + log_weight_B, None, dtype)
    loss_B = -t.row_mean(t.advantage_N) * log_product_B.exp()
    return Surrogate(t.at_tokens(loss_B), low, high, torch.zeros_like(low))


def vespo(t: TokenTerms, *, positive: Sequence[float], negative: Sequence[float]) -> Surrogate:
    """-sg(phi(W)) A logp with phi(W) = exp(rate + k log W - rate W), which is 1 at W = 1 and fades on both sides.

    W is the product over the row of current/anchor and of the importance weights: they are folded in here, not
    multiplied with the loss. In logs: each current - anchor within +-20, each log weight and the sum within [log 1e-8,
    20]. (k, rate) is ``positive`` where A >= 0, else ``negative``. Sums run over counted tokens. Source:
    arXiv:2602.10693 (VESPO).
    """
    x_N = (t.current_N.detach() - t.anchor_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    log_w_B = t.row_sum(x_N) + t.row_sum(t.weight_N.log().clamp(LOG_FLOOR, LOG_RATIO_CLAMP))
    log_w_B = log_w_B.clamp(LOG_FLOOR, LOG_RATIO_CLAMP)
    log_w_N, w_N = t.at_tokens(log_w_B), t.at_tokens(log_w_B.exp())
    up_N = t.advantage_N >= 0

    def log_phi(k: float, rate: float) -> Tensor:
        return rate + k * log_w_N - rate * w_N

    phi_N = torch.where(up_N, log_phi(*positive), log_phi(*negative)).exp()
    return unbounded(-phi_N * t.advantage_N * t.current_N)
