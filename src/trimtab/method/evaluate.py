"""The loss of one method on one batch: correct, anchor, surrogate, denominators. Branches on ``algo`` are here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Sequence

import torch
from torch import Tensor

from trimtab.correction import Correction, correct
from trimtab.errors import DataError
from trimtab.method.inputs import Inputs
from trimtab.method.rules import Stage, stages
from trimtab.objective.aggregate import Counts, coefficients
from trimtab.objective.loss import Loss, Terms, combine
from trimtab.objective.ratio import log_ratio
from trimtab.objective.surrogate import Surrogate, TokenTerms, policy_terms
from trimtab.objective.top import entropy_keep
from trimtab.spec import (
    AdvantageKl,
    Algo,
    Denominator,
    KlImportance,
    LossSpec,
    MethodSpec,
    Pair,
    Proximal,
    RatioLevel,
    RejectTerms,
)


@dataclass(frozen=True)
class Applied:
    """What the corrections do to the loss: ``weight_N`` (1 where none) and ``keep_N``, and the corrections themselves.

    ``top_N``: the tokens of highest entropy, None unless ``loss.top_entropy`` asks for them; the policy term is theirs.
    """

    weight_N: Tensor
    keep_N: Tensor
    corrections: tuple[Correction, ...] = ()
    top_N: Tensor | None = None

    def then(self, correction: Correction, *, measured_only: bool = False) -> Applied:
        """With one more correction: weights multiply, keeps AND. ``measured_only``: it is kept but has no effect."""
        corrections = (*self.corrections, correction)
        if measured_only:
            return replace(self, corrections=corrections)
        weight_N = self.weight_N * correction.weight_N.to(self.weight_N.dtype)
        return replace(self, weight_N=weight_N, keep_N=self.keep_N & correction.keep_N, corrections=corrections)

    def at(self, positions: Tensor) -> Applied:
        """The share of some tokens; the corrections stay with the whole."""
        top_N = None if self.top_N is None else self.top_N[positions]
        return Applied(self.weight_N[positions], self.keep_N[positions], top_N=top_N)


@dataclass(frozen=True)
class Coefficients:
    """Denominators as one factor a token: of the policy term, and of the KL, entropy and penalty terms.

    ``positive_tokens``: valid tokens of responses with a positive reward, what their log-likelihood is a mean over.
    """

    policy_N: Tensor
    terms_N: Tensor
    positive_tokens: int = 0

    def at(self, positions: Tensor) -> Coefficients:
        """The share of some tokens."""
        return Coefficients(self.policy_N[positions], self.terms_N[positions], self.positive_tokens)


@dataclass(frozen=True)
class Result:
    """``loss.total`` carries the gradient; the rest is detached. ``log_ratio_N``: current - anchor, 0 where invalid."""

    loss: Loss
    log_ratio_N: Tensor
    surrogate: Surrogate
    applied: Applied
    coefficients: Coefficients


def nothing(rollout_N: Tensor, valid_N: Tensor) -> Applied:
    """No correction: weight 1, everything kept."""
    return Applied(torch.ones_like(rollout_N), torch.ones_like(valid_N))


def needs_reference(loss: LossSpec) -> bool:
    """Whether the loss takes the reference's log-probs."""
    return loss.kl_coef != 0.0 or loss.advantage_kl is AdvantageKl.reference


def recomputes(method: MethodSpec) -> bool:
    """Whether a forward scores the proximal policy."""
    own = method.algo.name in (Algo.standard, Algo.decoupled)
    return own and method.algo.proximal is Proximal.recompute


def needs_whole(method: MethodSpec) -> bool:
    """Whether a share of the batch cannot be corrected by itself at its forward: something depends on all of it."""
    loss = method.loss
    moving = [stage for stage in stages(method) if stage.moving]
    normalises = any(stage.weight is not None and stage.weight.batch_normalize for stage in moving)
    sorts = any(stage.m2 is not None for stage in moving)
    counts = loss.denominator is Denominator.kept and any(stage.rejects for stage in moving)
    return normalises or sorts or counts or loss.top_entropy < 1


def with_top(method: MethodSpec, inputs: Inputs, applied: Applied) -> Applied:
    """With the tokens of highest entropy marked, if the loss asks for them."""
    if method.loss.top_entropy == 1:
        return applied
    if inputs.entropy_N is None:
        raise DataError("loss.top_entropy needs the tokens' entropies (entropy_N)")
    return replace(applied, top_N=entropy_keep(inputs.entropy_N.detach(), inputs.valid_N, method.loss.top_entropy))


def apply_stage(stage: Stage, inputs: Inputs, *, factor: float | None = None) -> Correction:
    """One stage's correction; ``factor`` is what batch-normalised weights are divided by (empty: their own mean)."""
    numerator_N, denominator_N = _policies(stage.pair, inputs)
    return correct(
        numerator_N.detach(),
        denominator_N,
        inputs.valid_N,
        inputs.length_B,
        weight=stage.weight,
        reject=stage.reject,
        veto=stage.veto,
        m2=stage.m2,
        advantage_B=inputs.advantage_B,
        row_N=inputs.row_N,
        factor=factor,
    )


def _policies(pair: Pair, inputs: Inputs) -> tuple[Tensor, Tensor]:
    match pair:
        case Pair.proximal_rollout:
            return _proximal(inputs), inputs.rollout_N
        case Pair.current_rollout:
            return inputs.current_N, inputs.rollout_N
        case Pair.current_proximal:
            return inputs.current_N, _proximal(inputs)


def _proximal(inputs: Inputs) -> Tensor:
    if inputs.proximal_N is not None:
        return inputs.proximal_N
    if inputs.lag_N is None:
        raise DataError("the method compares with the proximal policy, whose log-probs (proximal_N) are missing")
    return loglinear(inputs.current_N.detach(), inputs.rollout_N, inputs.lag_N)


def loglinear(current_N: Tensor, rollout_N: Tensor, lag_N: Tensor) -> Tensor:
    """Proximal log-probs guessed without a forward: rollout + alpha (current - rollout), alpha = lag / (lag + 1).

    The log-prob of a token is taken as linear in the policy's version: sampled at v, proximal at v + lag, current at
    v + lag + 1. A token without a rollout log-prob gets the current one. Source: AReaL, prox_logp_method=loglinear.
    """
    alpha_N = lag_N.to(current_N.dtype) / (lag_N + 1)
    return torch.where(rollout_N.isnan(), current_N, rollout_N + alpha_N * (current_N - rollout_N))


def anchor(algo: Algo, inputs: Inputs) -> Tensor:
    """Denominator of the loss's ratio, detached: proximal (standard, decoupled), rollout (bypass), current (on_policy).

    A token without a rollout log-prob counts as on-policy.
    """
    current_N = inputs.current_N.detach()
    match algo:
        case Algo.standard | Algo.decoupled:
            return _proximal(inputs)
        case Algo.bypass:
            return torch.where(inputs.rollout_N.isnan(), current_N, inputs.rollout_N)
        case Algo.on_policy:
            return current_N


def denominators(loss: LossSpec, inputs: Inputs, keep_N: Tensor, totals: Counts | None = None) -> Coefficients:
    """Coefficients from the whole batch of one update; ``totals``: global counts, if this is one rank's share."""
    constant = 1.0 if loss.sum_constant is None else loss.sum_constant
    positive = 0
    if inputs.reward_B is not None:
        positive = int((inputs.valid_N & (inputs.reward_B > 0)[inputs.row_N]).sum())

    def of(counted_N: Tensor) -> Tensor:
        coefficient_N = coefficients(
            counted_N, inputs.row_N, len(inputs.length_B), aggregate=loss.aggregate, constant=constant,
            totals=totals, group_B=inputs.group_B,
        )  # fmt: skip
        return coefficient_N.to(inputs.rollout_N.dtype)

    all_N = of(inputs.valid_N)
    match loss.denominator:
        case Denominator.all:
            return Coefficients(all_N, all_N, positive)
        case Denominator.kept:
            kept_N = of(inputs.valid_N & keep_N)
            return Coefficients(kept_N, kept_N if loss.reject_terms is RejectTerms.all else all_N, positive)


def loss_of(method: MethodSpec, inputs: Inputs, applied: Applied, coefficients: Coefficients) -> Result:
    """The loss of a batch or of a micro-batch of it, with its share of weights, keeps and coefficients.

    Inputs at invalid positions are replaced before anything is computed from them. A rejected token whose ratio
    current/anchor overflows counts as on-policy: no gradient passes through an infinite number, not even one of 0.
    """
    valid_N, spec = inputs.valid_N, method.loss

    def clean(x_N: Tensor | None) -> Tensor | None:
        return None if x_N is None else torch.where(valid_N, x_N, 0.0)

    current_N = torch.where(valid_N, inputs.current_N, 0.0)
    anchor_N = torch.where(valid_N, anchor(method.algo.name, inputs), 0.0)
    anchor_N = torch.where(_overflows(current_N, anchor_N) & ~applied.keep_N, current_N.detach(), anchor_N)
    reference_N = clean(inputs.reference_N)
    counted_N = valid_N & applied.keep_N if spec.denominator is Denominator.kept else valid_N
    tokens = TokenTerms(
        current_N=current_N,
        anchor_N=anchor_N,
        advantage_N=_advantage(spec, inputs, current_N.detach(), anchor_N, reference_N),
        weight_N=torch.where(applied.keep_N, applied.weight_N, 1.0),  # a rejected one may be infinite
        counted_N=counted_N,
        row_N=inputs.row_N,
        rows=len(inputs.length_B),
    )
    surrogate = policy_terms(spec, tokens, clamp=spec.log_ratio_clamp)
    by_row = spec.ratio_level is not RatioLevel.token and spec.kl_importance is not KlImportance.none
    terms = Terms(surrogate, applied.keep_N, valid_N, coefficients.policy_N, coefficients.terms_N, applied.top_N)
    loss = combine(
        terms,
        spec,
        current_N=current_N,
        anchor_N=anchor_N,
        rollout_N=inputs.rollout_N,
        reference_N=reference_N,
        entropy_N=clean(inputs.entropy_N),
        reward_N=None if inputs.reward_B is None else inputs.reward_B[inputs.row_N],
        positive_tokens=coefficients.positive_tokens,
        log_ratio_N=log_ratio(tokens, spec.ratio_level, None) if by_row else None,
    )
    return Result(loss, (current_N - anchor_N).detach(), surrogate, applied, coefficients)


def _overflows(current_N: Tensor, anchor_N: Tensor) -> Tensor:
    x_N = (current_N - anchor_N).detach()
    return ~(x_N < math.log(torch.finfo(x_N.dtype).max))


def _advantage(
    loss: LossSpec, inputs: Inputs, current_N: Tensor, anchor_N: Tensor, reference_N: Tensor | None
) -> Tensor:
    """The row's advantage at each token, less a KL inside it: A - coef (current - other), detached."""
    advantage_N = inputs.advantage_B.to(current_N.dtype)[inputs.row_N]
    match loss.advantage_kl:
        case AdvantageKl.none:
            return advantage_N
        case AdvantageKl.anchor:
            other_N = anchor_N
        case AdvantageKl.reference:
            if reference_N is None:
                raise DataError("loss.advantage_kl=reference needs the log-probs reference_N, which are missing")
            other_N = reference_N
    return advantage_N - loss.advantage_kl_coef * (current_N - other_N)


def evaluate(
    method: MethodSpec,
    inputs: Inputs,
    *,
    totals: Counts | None = None,
    factors: Sequence[float | None] = (),
    given: Coefficients | None = None,
) -> Result:
    """Everything at once, for a whole batch and a resolved method. ``factors``: one a stage, see ``apply_stage``.

    ``given``: coefficients of tokens that are weighted one by one; empty: those of ``loss.aggregate``.
    """
    applied, found = nothing(inputs.rollout_N, inputs.valid_N), stages(method)
    for stage, factor in zip(found, factors or [None] * len(found), strict=True):
        correction = apply_stage(stage, inputs, factor=factor)
        applied = applied.then(correction, measured_only=method.algo.metrics_only)
    applied = with_top(method, inputs, applied)
    coefficients = denominators(method.loss, inputs, applied.keep_N, totals) if given is None else given
    return loss_of(method, inputs, applied, coefficients)


def token_gradient(
    method: MethodSpec, inputs: Inputs, *, totals: Counts | None = None, given: Coefficients | None = None
) -> Tensor:
    """d loss / d current log-prob of each token, detached; the parameters enter the loss through it alone."""
    current_N = inputs.current_N.detach().requires_grad_()
    result = evaluate(method, replace(inputs, current_N=current_N), totals=totals, given=given)
    if not result.loss.total.requires_grad:
        return torch.zeros_like(current_N)
    (gradient_N,) = torch.autograd.grad(result.loss.total, current_N)
    return gradient_N
