"""One micro-batch's loss: the policy term over kept tokens, plus KL, entropy and the other terms."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.errors import DataError
from trimtab.objective.kl import kl_penalty
from trimtab.objective.terms import Surrogate, clamped
from trimtab.spec import KlImportance, LossSpec, RejectTerms
from trimtab.stat import exponent_limit


@dataclass(frozen=True)
class Terms:
    """Inputs of a micro-batch, all of shape N. ``keep`` and the coefficients are detached.

    surrogate: its loss holds the weight. valid_N: tokens that the policy chose; keep_N: not rejected.
    policy_coefficient_N and term_coefficient_N: denominators of the policy term and of the KL, entropy and pull terms
    (see ``aggregate.coefficients``). top_N: tokens whose policy term stays (``loss.top_entropy``); None: all.
    """

    surrogate: Surrogate
    keep_N: Tensor
    valid_N: Tensor
    policy_coefficient_N: Tensor
    term_coefficient_N: Tensor
    top_N: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """Scalars: ``total`` has the gradient, the rest are detached sums that add up over micro-batches.

    ``pull``: squared log-ratios to the anchor; ``nll``: mean -log-prob of the positive rows. None is scaled by its
    coefficient; each is 0 where its inputs are missing.
    """

    total: Tensor
    policy: Tensor
    kl: Tensor
    entropy: Tensor
    pull: Tensor
    nll: Tensor


def weighted_sum(value_N: Tensor, coefficient_N: Tensor, where_N: Tensor) -> Tensor:
    """sum coefficient * value over ``where_N``; what stands elsewhere (NaN, inf) has neither value nor gradient."""
    return (torch.where(where_N, value_N, 0.0) * torch.where(where_N, coefficient_N, 0.0)).sum()


def combine(
    terms: Terms,
    spec: LossSpec,
    *,
    current_N: Tensor,
    anchor_N: Tensor | None = None,
    reference_N: Tensor | None = None,
    rollout_N: Tensor | None = None,
    entropy_N: Tensor | None = None,
    reward_N: Tensor | None = None,
    positive_tokens: int | None = None,
    log_ratio_N: Tensor | None = None,
) -> Loss:
    """policy + kl_coef KL - entropy_coef entropy + log_ratio_penalty pull + positive_nll_coef nll.

    policy: over valid, kept and top tokens. ``loss.reject_terms``: whether a rejected token loses its KL and entropy
    terms too. pull: (current - anchor)^2 over all valid tokens, rejected or not, its log-ratio within
    +-``loss.log_ratio_clamp``, as prime-rl's kl_tau. nll: see ``positive_nll``. log_ratio_N: of the policy ratio at
    ``loss.ratio_level``, the anchor's weight of the KL; empty: each token's own. A term with missing inputs is 0. What
    stands at tokens that are not valid is never looked at. Raises DataError if ``loss.kl_importance`` names log-probs
    that are missing.
    """
    valid_N, coefficient_N = terms.valid_N, terms.term_coefficient_N
    current_N = torch.where(valid_N, current_N, 0.0)
    term_N, policy_N = _where(spec.reject_terms, terms)
    policy = weighted_sum(terms.surrogate.loss_N, terms.policy_coefficient_N, policy_N)
    kl = entropy = pull = nll = torch.zeros((), dtype=policy.dtype)
    if reference_N is not None:
        log_weight_N = _kl_log_weight(spec.kl_importance, valid_N, current_N, anchor_N, rollout_N, log_ratio_N)
        kl_N = _kl(spec, current_N, torch.where(valid_N, reference_N, 0.0), log_weight_N)
        kl = weighted_sum(kl_N, coefficient_N, term_N)
    if entropy_N is not None:
        entropy = weighted_sum(entropy_N, coefficient_N, term_N)
    if anchor_N is not None and spec.log_ratio_penalty != 0.0:
        x_N = clamped(_log_ratio(valid_N, current_N, anchor_N), _pull_bound(spec, current_N.dtype))
        pull = weighted_sum(x_N * x_N, coefficient_N, valid_N)
    if reward_N is not None and spec.positive_nll_coef != 0.0:
        nll = positive_nll(current_N, valid_N & (reward_N > 0), positive_tokens)
    total = policy + _scaled(spec, kl, entropy, pull, nll)
    return Loss(total, policy.detach(), kl.detach(), entropy.detach(), pull.detach(), nll.detach())


def _scaled(spec: LossSpec, kl: Tensor, entropy: Tensor, pull: Tensor, nll: Tensor) -> Tensor:
    """Sum of the terms times their coefficients; a coefficient of 0 leaves out even a NaN."""
    factors = (spec.kl_coef, -spec.entropy_coef, spec.log_ratio_penalty, spec.positive_nll_coef)
    found = [factor * term for factor, term in zip(factors, (kl, entropy, pull, nll), strict=True) if factor != 0.0]
    return sum(found, start=torch.zeros((), dtype=kl.dtype))


def positive_nll(current_N: Tensor, positive_N: Tensor, tokens: int | None = None) -> Tensor:
    """Mean of -current over the tokens of responses with a positive reward, a scalar.

    positive_N (bool): those tokens. ``tokens``: how many they are in the whole update, so that micro-batches add up;
    empty: those here. Source: arXiv:2504.05118 (VAPO, equation 10).
    """
    count = int(positive_N.sum()) if tokens is None else tokens
    return torch.where(positive_N, -current_N, 0.0).sum() / max(count, 1)


def _where(reject_terms: RejectTerms, terms: Terms) -> tuple[Tensor, Tensor]:
    """Tokens of the KL and entropy terms, and of the policy term."""
    kept_N = terms.keep_N & terms.valid_N
    policy_N = kept_N if terms.top_N is None else kept_N & terms.top_N
    match reject_terms:
        case RejectTerms.policy:
            return terms.valid_N, policy_N
        case RejectTerms.all:
            return kept_N, policy_N


def _pull_bound(spec: LossSpec, dtype: torch.dtype) -> float:
    """Of the log-ratio that is squared: without a clamp, what the dtype holds the square of."""
    return math.exp(exponent_limit(dtype) / 2) if spec.log_ratio_clamp is None else spec.log_ratio_clamp


def _log_ratio(valid_N: Tensor, current_N: Tensor, other_N: Tensor) -> Tensor:
    """current - other; 0, with the gradient of current, where other is NaN (a token without a rollout log-prob)."""
    return current_N - torch.where(valid_N & ~other_N.isnan(), other_N, current_N.detach())


def _kl(spec: LossSpec, current_N: Tensor, reference_N: Tensor, log_weight_N: Tensor | None) -> Tensor:
    return kl_penalty(
        current_N,
        reference_N,
        value=spec.kl_value,
        gradient=spec.kl_gradient,
        log_weight_N=log_weight_N,
        clamp=spec.kl_clamp,
        log_ratio_clamp=spec.kl_input_clamp,
        exponent_clamp=spec.log_ratio_clamp,
    )


def _kl_log_weight(
    importance: KlImportance,
    valid_N: Tensor,
    current_N: Tensor,
    anchor_N: Tensor | None,
    rollout_N: Tensor | None,
    log_ratio_N: Tensor | None,
) -> Tensor | None:
    def against(other_N: Tensor | None, name: str) -> Tensor:
        if other_N is None:
            raise DataError(f"loss.kl_importance={importance.value} needs the log-probs {name}, which are missing")
        return _log_ratio(valid_N, current_N, other_N)

    match importance:
        case KlImportance.none:
            return None
        case KlImportance.rollout:
            return against(rollout_N, "rollout_N").detach()
        case KlImportance.anchor:
            return (against(anchor_N, "anchor_N") if log_ratio_N is None else log_ratio_N).detach()
        case KlImportance.current_live:
            return current_N - current_N.detach()
        case KlImportance.rollout_live:
            return against(rollout_N, "rollout_N")
        case KlImportance.anchor_live:
            return against(anchor_N, "anchor_N") if log_ratio_N is None else log_ratio_N
