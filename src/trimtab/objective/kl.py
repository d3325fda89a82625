"""KL divergence of the current policy to the reference: value and gradient are separate choices."""

from __future__ import annotations

from torch import Tensor

from trimtab.objective.terms import clamped
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
            return clamped(-x, LOG_RATIO_CLAMP).exp() - 1.0 + x


def kl_penalty(
    current_N: Tensor,
    reference_N: Tensor,
    *,
    value: KlEstimator,
    gradient: KlEstimator,
    log_weight_N: Tensor | None = None,
    clamp: float | None = None,
    log_ratio_clamp: float | None = None,
) -> Tensor:
    """Per-token penalty w k whose value is one estimator's and whose gradient is another's.

    w = exp(log_weight), 1 without. With a detached w the gradient is w grad k: k2 gives w x grad logp, whose mean under
    current is the gradient of KL(current || reference); k1's has mean 0 and k3's is that of KL(reference || current).
    With a gradient in w it is w (k grad logp + grad k), which is the exact gradient for k1 and k3, as their values
    are unbiased for every policy. ``clamp`` bounds |k|, and ``log_ratio_clamp`` |x| before it; beyond them k has no
    gradient, but w keeps its own. Source: arXiv:2506.09477 (gradients of KL estimators), arXiv:2512.02556 (w).
    """
    x = clamped(current_N - reference_N, log_ratio_clamp)
    shown, steered = clamped(kl_estimate(x.detach(), value), clamp), clamped(kl_estimate(x, gradient), clamp)
    if log_weight_N is not None:
        weight_N = clamped(log_weight_N, LOG_RATIO_CLAMP).exp()
        shown, steered = weight_N.detach() * shown, weight_N * steered
    return shown + (steered - steered.detach())
