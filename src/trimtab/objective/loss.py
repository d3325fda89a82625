"""One micro-batch's loss: surrogate x weight over kept tokens, plus KL and entropy terms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.objective.kl import kl_penalty
from trimtab.objective.surrogate import Surrogate
from trimtab.spec import LossSpec, RejectTerms


@dataclass(frozen=True)
class Terms:
    """Inputs of a micro-batch, all of shape N. ``weight``, ``keep`` and the coefficients are detached.

    valid_N: tokens that the policy chose; keep_N: not rejected; policy_coefficient_N and term_coefficient_N:
    denominators of the policy term and of the KL and entropy terms (see ``aggregate.coefficients``).
    """

    surrogate: Surrogate
    weight_N: Tensor
    keep_N: Tensor
    valid_N: Tensor
    policy_coefficient_N: Tensor
    term_coefficient_N: Tensor


@dataclass(frozen=True)
class Loss:
    """Scalars: ``total`` has the gradient, the rest are detached sums that add up over micro-batches."""

    total: Tensor
    policy: Tensor
    kl: Tensor
    entropy: Tensor


def weighted_sum(value_N: Tensor, coefficient_N: Tensor, where_N: Tensor) -> Tensor:
    """sum coefficient * value over ``where_N``; what stands elsewhere (NaN, inf) has neither value nor gradient."""
    return (torch.where(where_N, value_N, 0.0) * torch.where(where_N, coefficient_N, 0.0)).sum()


def combine(
    terms: Terms,
    spec: LossSpec,
    *,
    current_N: Tensor,
    reference_N: Tensor | None = None,
    rollout_N: Tensor | None = None,
    entropy_N: Tensor | None = None,
) -> Loss:
    """policy + kl_coef * KL - entropy_coef * entropy, each reduced by its coefficients.

    ``loss.reject_terms`` says whether a rejected token also loses its KL and entropy terms.
    """
    policy_N = terms.keep_N & terms.valid_N
    match spec.reject_terms:
        case RejectTerms.policy:
            term_N = terms.valid_N
        case RejectTerms.all:
            term_N = policy_N
    policy = weighted_sum(terms.surrogate.loss_N * terms.weight_N, terms.policy_coefficient_N, policy_N)
    total, zero = policy, torch.zeros((), dtype=policy.dtype)
    kl = entropy = zero
    if reference_N is not None:
        penalty_N = kl_penalty(
            current_N,
            reference_N,
            value=spec.kl_value,
            gradient=spec.kl_gradient,
            rollout_N=rollout_N if spec.kl_importance else None,
        )
        kl = weighted_sum(penalty_N, terms.term_coefficient_N, term_N)
        total = total + spec.kl_coef * kl
    if entropy_N is not None:
        entropy = weighted_sum(entropy_N, terms.term_coefficient_N, term_N)
        if spec.entropy_coef != 0.0:
            total = total - spec.entropy_coef * entropy
    return Loss(total, policy.detach(), kl.detach(), entropy.detach())
