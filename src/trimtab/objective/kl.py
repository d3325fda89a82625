"""KL divergence of the current policy to the reference: value and gradient are separate choices."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.spec import KlEstimator
from trimtab.stat import LOG_RATIO_CLAMP


def kl_estimate(log_ratio_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate of KL(current || reference) at tokens sampled from current; x = current - reference log-prob.

    k1 = x; k2 = x^2 / 2; k3 = exp(-x) - 1 + x. k1 and k3 are unbiased values, k2 has low variance and a bias of
    third order. Source: Schulman, "Approximating KL divergence", 2020.
    """
    x = log_ratio_N
    match estimator:
        case KlEstimator.k1:
            return x
        case KlEstimator.k2:
            return 0.5 * x * x
        case KlEstimator.k3:
            return (-x).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp() - 1.0 + x


def kl_penalty(
    current_N: Tensor,
    reference_N: Tensor,
    *,
    value: KlEstimator,
    gradient: KlEstimator,
    rollout_N: Tensor | None = None,
) -> Tensor:
    """Per-token penalty whose value is one estimator's and whose gradient is another's.

    Differentiating k2 gives x grad logp, whose mean under current is the gradient of KL(current || reference); k1's
    gradient has mean 0 and k3's is that of KL(reference || current). With ``rollout_N`` (log-probs of the policy that
    sampled; NaN: on-policy) both are multiplied by the detached weight current/rollout. Source: arXiv:2506.09477
    (gradients of KL estimators).
    """
    x = current_N - reference_N
    steered = kl_estimate(x, gradient)
    term = kl_estimate(x.detach(), value) + steered - steered.detach()
    if rollout_N is None:
        return term
    log_weight_N = current_N.detach() - torch.where(rollout_N.isnan(), current_N.detach(), rollout_N)
    return term * log_weight_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
