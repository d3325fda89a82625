"""KL divergence of the current policy to the reference: value and gradient are separate choices."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.objective.terms import clamped, exponent
from trimtab.spec import KlEstimator
from trimtab.stat import LOG_RATIO_CLAMP


def kl_estimate(log_ratio_N: Tensor, estimator: KlEstimator, exponent_clamp: float | None = LOG_RATIO_CLAMP) -> Tensor:
    """Estimate of KL(current || reference) at tokens sampled from current; x = current - reference log-prob.

    k1 = x; k2 = x^2 / 2; k3 = exp(-x) - 1 + x. k1 and k3 are unbiased values, k2 has low variance and a bias of
    third order. ``exponent_clamp`` bounds what is exponentiated, nats; None: only by what the
    dtype can hold. Source: Schulman, "Approximating
    KL divergence", 2020.
    """
    x = log_ratio_N
    match estimator:
        case KlEstimator.k1:
            return x
        case KlEstimator.k2:
            return 0.5 * x * x
        case KlEstimator.k3:
            return exponent(-x, exponent_clamp).exp() - 1.0 + x


def kl_penalty(
    current_N: Tensor,
    reference_N: Tensor,
    *,
    value: KlEstimator,
    gradient: KlEstimator,
    log_weight_N: Tensor | None = None,
    clamp: float | None = None,
    log_ratio_clamp: float | None = None,
    exponent_clamp: float | None = LOG_RATIO_CLAMP,
) -> Tensor:
    """Per-token penalty w k whose value is one estimator's and whose gradient is another's.

    w = exp(log_weight), 1 without. With a detached w the gradient is w grad k: k2 gives w x grad logp, whose mean under
    current is the gradient of KL(current || reference); k1's has mean 0 and k3's is that of KL(reference || current).
    With a gradient in w it is w (k grad logp + grad k), which is the exact gradient for k1 and k3, as their values
    are unbiased for every policy. ``log_ratio_clamp`` bounds |x|, and ``clamp`` |w k|; beyond them there is no
    gradient, neither of k nor of w. ``exponent_clamp``: of log_weight, and see ``kl_estimate``. Source:
    arXiv:2506.09477 (gradients of KL estimators), arXiv:2512.02556 (w); NeMo-RL, miles and slime clamp in this order.
    """
    apart_N = current_N - reference_N
    x = clamped(apart_N, log_ratio_clamp)
    shown, steered = kl_estimate(x.detach(), value, exponent_clamp), kl_estimate(x, gradient, exponent_clamp)
    if log_weight_N is not None:
        weight_N = exponent(log_weight_N, exponent_clamp).exp()
        live_N = torch.where(x == apart_N, weight_N, weight_N.detach())
        shown, steered = weight_N.detach() * shown, live_N * steered
    shown, steered = clamped(shown, clamp), clamped(steered, clamp)
    return shown + (steered - steered.detach())
