"""A soft gate in place of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.objective.terms import Surrogate, unbounded


def sapo(log_ratio_N: Tensor, advantage_N: Tensor, *, tau_positive: float, tau_negative: float) -> Surrogate:
    """-(4 / tau) sigmoid(tau (r - 1)) A, with r = exp(log_ratio) and tau by the sign of A (A > 0, or not).

    At r = 1 the gradient is -A grad logp, as PPO's; it fades on both sides by 4 s (1 - s), and faster with a larger
    tau. log_ratio_N: current minus anchor, nats, [N]. The weight multiplies the result. Source: arXiv:2511.20347.
    """
    tau = torch.full_like(advantage_N, tau_negative).masked_fill(advantage_N > 0, tau_positive)
    gate = torch.sigmoid(tau * (log_ratio_N.exp() - 1.0)) * (4.0 / tau)
    return unbounded(-gate * advantage_N)
