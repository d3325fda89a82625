"""Surrogates, KL and aggregation against closed forms, loops and finite differences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from trimtab.objective.aggregate import Counts, coefficients
from trimtab.objective.kl import kl_estimate, kl_penalty
from trimtab.objective.loss import Terms, combine, weighted_sum
from trimtab.objective.surrogate import Surrogate, ppo_clip, reinforce
from trimtab.spec import Aggregate, KlEstimator, LossSpec, RejectTerms


def ppo_loop(x: float, a: float, low: float, high: float, dual: float | None) -> float:
    r = math.exp(max(-20.0, min(20.0, x)))
    loss = -min(r * a, max(1 - low, min(1 + high, r)) * a)
    if dual is not None and a < 0:
        loss = min(loss, -dual * a)
    return loss


@pytest.mark.parametrize("dual", [None, 3.0])
def test_ppo_equals_a_loop(dual: float | None) -> None:
    grid = list(itertools.product([-25.0, -1.5, -0.1, 0.0, 0.1, 0.25, 1.5, 25.0], [-2.0, -0.5, 0.0, 0.7]))
    x, a = (torch.tensor(v, dtype=torch.float64) for v in zip(*grid, strict=True))
    out = ppo_clip(x, a, clip_low=0.2, clip_high=0.28, dual_clip=dual)
    expected = [ppo_loop(xi, ai, 0.2, 0.28, dual) for xi, ai in grid]
    assert out.loss_N.tolist() == pytest.approx(expected, rel=1e-12)


def test_ppo_gradient_is_r_times_advantage_inside_and_zero_where_a_bound_bites() -> None:
    x = torch.tensor([0.1, 1.0, -1.0, 1.0, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    out = ppo_clip(x, a, clip_low=0.2, clip_high=0.2, dual_clip=5.0)
    (gradient,) = torch.autograd.grad(out.loss_N.sum(), x)
    e = math.exp
    assert gradient.tolist() == pytest.approx([-e(0.1), 0.0, -e(-1.0), e(1.0), 0.0, 0.0], rel=1e-12)
    assert out.clipped_high_N.tolist() == [False, True, False, False, False, False]
    assert out.clipped_low_N.tolist() == [False, False, False, False, True, False]
    assert out.dual_clipped_N.tolist() == [False, False, False, False, False, True]


def test_ppo_gradient_equals_finite_differences() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, dtype=torch.float64).requires_grad_()
    a = torch.randn(50, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: ppo_clip(v, a, clip_low=0.2, clip_high=0.3).loss_N, (x,))


def test_at_equal_policies_ppo_and_reinforce_have_one_gradient() -> None:
    logp = torch.tensor([-0.3, -2.0], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([1.5, -0.5], dtype=torch.float64)
    ppo = torch.autograd.grad(ppo_clip(logp - logp.detach(), a, clip_low=0.2, clip_high=0.2).loss_N.sum(), logp)[0]
    score = torch.autograd.grad(reinforce(logp, a).loss_N.sum(), logp)[0]
    assert torch.equal(ppo, score)


# -- KL ---------------------------------------------------------------------------------------------------------------


def exact_kl_gradient(theta: Tensor, reference: Tensor) -> Tensor:
    live = theta.clone().requires_grad_()
    p, q = live.log_softmax(0), reference.log_softmax(0)
    return torch.autograd.grad((p.exp() * (p - q)).sum(), live)[0]


def enumerated_gradient(
    theta: Tensor, reference: Tensor, rollout: Tensor, kind: KlEstimator, corrected: bool
) -> Tensor:
    """Exact expectation, over symbols drawn from ``rollout``, of the penalty's gradient."""
    live = theta.clone().requires_grad_()
    p, q, mu = live.log_softmax(0), reference.log_softmax(0), rollout.log_softmax(0)
    term = kl_penalty(p, q, value=KlEstimator.k3, gradient=kind, rollout_N=mu if corrected else None)
    return torch.autograd.grad((mu.exp() * term).sum(), live)[0]


THETA = torch.tensor([0.3, -1.2, 0.8, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.4, 0.1, 0.9], dtype=torch.float64)
ROLLOUT = torch.tensor([1.0, -0.2, -0.4, 0.3], dtype=torch.float64)


def test_gradient_of_k2_is_the_exact_one_on_policy_and_k1_k3_are_not() -> None:
    exact = exact_kl_gradient(THETA, REFERENCE)
    assert torch.allclose(enumerated_gradient(THETA, REFERENCE, THETA, KlEstimator.k2, False), exact, atol=1e-14)
    assert torch.allclose(
        enumerated_gradient(THETA, REFERENCE, THETA, KlEstimator.k1, False), torch.zeros(4).double(), atol=1e-14
    )
    assert not torch.allclose(enumerated_gradient(THETA, REFERENCE, THETA, KlEstimator.k3, False), exact, atol=1e-2)


def test_off_policy_the_importance_weight_makes_it_exact_again() -> None:
    exact = exact_kl_gradient(THETA, REFERENCE)
    assert torch.allclose(enumerated_gradient(THETA, REFERENCE, ROLLOUT, KlEstimator.k2, True), exact, atol=1e-14)
    assert not torch.allclose(enumerated_gradient(THETA, REFERENCE, ROLLOUT, KlEstimator.k2, False), exact, atol=1e-2)


@pytest.mark.parametrize("kind", list(KlEstimator))
def test_kl_value_is_the_chosen_estimators_whatever_the_gradient(kind: KlEstimator) -> None:
    x = torch.tensor([-0.7, 0.0, 1.3], dtype=torch.float64)
    closed = {KlEstimator.k1: x, KlEstimator.k2: x**2 / 2, KlEstimator.k3: torch.exp(-x) - 1 + x}[kind]
    assert torch.allclose(kl_estimate(x, kind), closed, rtol=1e-14)
    for gradient in KlEstimator:
        assert torch.allclose(kl_penalty(x, torch.zeros_like(x), value=kind, gradient=gradient), closed, rtol=1e-14)


def test_k1_and_k3_are_unbiased_values_of_the_kl() -> None:
    p, q = THETA.log_softmax(0), REFERENCE.log_softmax(0)
    kl = float((p.exp() * (p - q)).sum())
    for kind in (KlEstimator.k1, KlEstimator.k3):
        assert float((p.exp() * kl_estimate(p - q, kind)).sum()) == pytest.approx(kl, rel=1e-12)


# -- denominators -----------------------------------------------------------------------------------------------------

ROW_N = torch.tensor([0, 0, 0, 0, 0, 1])  # lengths 5 and 1, the example of the field
LOSS_N = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 4.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        (Aggregate.token_mean, 9 / 6),
        (Aggregate.sequence_mean, (1 + 4) / 2),
        (Aggregate.sequence_sum, (5 + 4) / (2 * 10)),
    ],
)
def test_aggregates_of_two_rows_of_five_and_one_tokens(aggregate: Aggregate, expected: float) -> None:
    valid_N = torch.ones(6, dtype=torch.bool)
    coefficient_N = coefficients(valid_N, ROW_N, 2, aggregate=aggregate, constant=10.0)
    assert float(weighted_sum(LOSS_N, coefficient_N, valid_N)) == pytest.approx(expected, rel=1e-12)


def test_rejected_tokens_in_and_out_of_the_denominator() -> None:
    loss_N = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    keep_N, row_N = torch.tensor([True, False, False, True, False]), torch.zeros(5, dtype=torch.int64)
    everything = coefficients(torch.ones(5, dtype=torch.bool), row_N, 1, aggregate=Aggregate.token_mean, constant=1.0)
    kept = coefficients(keep_N, row_N, 1, aggregate=Aggregate.token_mean, constant=1.0)
    assert float(weighted_sum(loss_N, everything, keep_N)) == pytest.approx(5 / 5)
    assert float(weighted_sum(loss_N, kept, keep_N)) == pytest.approx(5 / 2)


@pytest.mark.parametrize("aggregate", list(Aggregate))
def test_coefficients_of_shares_with_global_counts_equal_those_of_the_whole(aggregate: Aggregate) -> None:
    valid_N = torch.tensor([True, True, False, True, True, True])
    whole = coefficients(valid_N, ROW_N, 2, aggregate=aggregate, constant=7.0)
    totals = Counts(tokens=5, rows=2)
    first = coefficients(valid_N[:5], ROW_N[:5], 1, aggregate=aggregate, constant=7.0, totals=totals)
    second = coefficients(valid_N[5:], ROW_N[5:] - 1, 1, aggregate=aggregate, constant=7.0, totals=totals)
    assert torch.equal(torch.cat([first, second]), whole)


def test_empty_rows_and_nothing_kept_give_zero_not_nan() -> None:
    nothing = torch.zeros(6, dtype=torch.bool)
    for aggregate in Aggregate:
        coefficient_N = coefficients(nothing, ROW_N, 3, aggregate=aggregate, constant=1.0)
        assert coefficient_N.tolist() == [0.0] * 6


# -- the whole loss ---------------------------------------------------------------------------------------------------


def terms(loss_N: Tensor, weight_N: Tensor, keep_N: Tensor, valid_N: Tensor) -> Terms:
    no = torch.zeros_like(keep_N)
    coefficient_N = coefficients(valid_N, ROW_N, 2, aggregate=Aggregate.token_mean, constant=1.0)
    return Terms(Surrogate(loss_N, no, no, no), weight_N, keep_N, valid_N, coefficient_N, coefficient_N)


@pytest.mark.parametrize("reject_terms", list(RejectTerms))
def test_loss_is_policy_plus_kl_minus_entropy_and_rejection_reaches_the_chosen_terms(reject_terms: RejectTerms) -> None:
    spec = LossSpec(kl_coef=0.5, kl_value=KlEstimator.k1, entropy_coef=0.1, reject_terms=reject_terms)
    keep_N = torch.tensor([True, False, True, True, True, True])
    valid_N = torch.tensor([True, True, True, True, True, False])
    current_N = torch.linspace(-1, 0, 6, dtype=torch.float64)
    weight_N = torch.linspace(0.5, 2, 6, dtype=torch.float64)
    entropy_N = torch.linspace(1, 2, 6, dtype=torch.float64)
    loss = combine(
        terms(LOSS_N, weight_N, keep_N, valid_N),
        spec,
        current_N=current_N,
        reference_N=torch.zeros(6).double(),
        entropy_N=entropy_N,
    )
    policy = sum(float(LOSS_N[i] * weight_N[i]) / 5 for i in range(6) if keep_N[i] and valid_N[i])
    counted = [i for i in range(6) if valid_N[i] and (keep_N[i] or reject_terms is RejectTerms.policy)]
    kl = sum(float(current_N[i]) / 5 for i in counted)
    entropy = sum(float(entropy_N[i]) / 5 for i in counted)
    assert float(loss.total) == pytest.approx(policy + 0.5 * kl - 0.1 * entropy, rel=1e-12)
    assert float(loss.policy) == pytest.approx(policy, rel=1e-12)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_rejected_and_invalid_positions_may_hold_anything(poison: float) -> None:
    valid_N = torch.tensor([True, True, True, True, True, False])
    keep_N = torch.tensor([True, False, True, True, True, True])
    clean = combine(terms(LOSS_N, torch.ones(6), keep_N, valid_N), LossSpec(), current_N=LOSS_N)
    spoilt_N = LOSS_N.clone()
    spoilt_N[[1, 5]] = poison
    weight_N = torch.ones(6)
    weight_N[[1, 5]] = poison
    spoilt = combine(terms(spoilt_N, weight_N, keep_N, valid_N), LossSpec(), current_N=LOSS_N)
    assert float(spoilt.total) == float(clean.total)
