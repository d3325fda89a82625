"""Per-token policy losses; masks, weights and denominators are applied elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.stat import LOG_RATIO_CLAMP


@dataclass(frozen=True)
class Surrogate:
    """``loss_N`` with gradient; booleans tell where a bound took the gradient away."""

    loss_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor
    dual_clipped_N: Tensor


def ppo_clip(
    log_ratio_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Surrogate:
    """The clipped surrogate max(-r A, -clip(r, 1 - low, 1 + high) A), with r = exp(log_ratio).

    log_ratio_N: current minus proximal (bypass: minus rollout), nats, clamped to +-20 before exp. With ``dual_clip``
    c > 1 and A < 0 the loss is at most c |A|. Source: arXiv:1707.06347 (PPO), arXiv:1912.09729 (dual clip),
    arXiv:2503.14476 (separate bounds).
    """
    r = log_ratio_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    free = -r * advantage_N
    bounded = -r.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_N
    loss = torch.maximum(free, bounded)
    bites = bounded > free
    low = bites & (r < 1.0 - clip_low)
    high = bites & (r > 1.0 + clip_high)
    dual = torch.zeros_like(low)
    if dual_clip is not None:
        cap = -dual_clip * advantage_N
        dual = (advantage_N < 0) & (loss > cap)
        loss = torch.where(dual, cap, loss)
    return Surrogate(loss, low, high, dual)


def reinforce(logp_N: Tensor, advantage_N: Tensor) -> Surrogate:
    """The score-function loss -A logp; the importance weight current/rollout is applied as a (detached) weight.

    logp_N: current log-probs, nats. Source: Williams 1992.
    """
    none = torch.zeros_like(advantage_N, dtype=torch.bool)
    return Surrogate(-advantage_N * logp_N, none, none, none)
