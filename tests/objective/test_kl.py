"""KL estimators: closed forms, and gradients against exact enumeration over a small alphabet."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trimtab.objective.kl import kl_estimate, kl_penalty
from trimtab.spec import KlEstimator

THETA = torch.tensor([0.3, -1.2, 0.8, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.4, 0.1, 0.9], dtype=torch.float64)
ROLLOUT = torch.tensor([1.0, -0.2, -0.4, 0.3], dtype=torch.float64)


def exact_kl_gradient(theta: Tensor, reference: Tensor) -> Tensor:
    live = theta.clone().requires_grad_()
    p, q = live.log_softmax(0), reference.log_softmax(0)
    return torch.autograd.grad((p.exp() * (p - q)).sum(), live)[0]


def enumerated_gradient(kind: KlEstimator, rollout: Tensor, *, weight: str) -> Tensor:
    """Exact expectation, over symbols drawn from ``rollout``, of the penalty's gradient."""
    live = THETA.clone().requires_grad_()
    p, q, mu = live.log_softmax(0), REFERENCE.log_softmax(0), rollout.log_softmax(0)
    log_weight = {"none": None, "detached": (p - mu).detach(), "live": p - mu, "current": p - p.detach()}[weight]
    term = kl_penalty(p, q, value=KlEstimator.k3, gradient=kind, log_weight_N=log_weight)
    return torch.autograd.grad((mu.exp() * term).sum(), live)[0]


EXACT = exact_kl_gradient(THETA, REFERENCE)


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-14)


def test_without_weight_k2_gives_the_exact_gradient_on_policy_and_k1_k3_do_not() -> None:
    assert close(enumerated_gradient(KlEstimator.k2, THETA, weight="none"), EXACT)
    assert close(enumerated_gradient(KlEstimator.k1, THETA, weight="none"), torch.zeros(4).double())
    assert not torch.allclose(enumerated_gradient(KlEstimator.k3, THETA, weight="none"), EXACT, atol=1e-2)


def test_off_policy_a_detached_weight_makes_k2_exact_again() -> None:
    assert close(enumerated_gradient(KlEstimator.k2, ROLLOUT, weight="detached"), EXACT)
    assert not torch.allclose(enumerated_gradient(KlEstimator.k2, ROLLOUT, weight="none"), EXACT, atol=1e-2)


@pytest.mark.parametrize(("kind", "exact"), [(KlEstimator.k1, True), (KlEstimator.k2, False), (KlEstimator.k3, True)])
def test_a_live_weight_makes_the_unbiased_values_exact_for_every_sampling_policy(
    kind: KlEstimator, exact: bool
) -> None:
    for rollout in (THETA, ROLLOUT):
        assert torch.allclose(enumerated_gradient(kind, rollout, weight="live"), EXACT, atol=1e-14) is exact
    assert torch.allclose(enumerated_gradient(kind, THETA, weight="current"), EXACT, atol=1e-14) is exact


@pytest.mark.parametrize("kind", list(KlEstimator))
def test_value_is_the_chosen_estimators_whatever_the_gradient(kind: KlEstimator) -> None:
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


def test_clamp_bounds_the_weighted_estimate_and_ends_both_gradients() -> None:
    x = torch.tensor([-3.0, -1.8, -1.0, 0.5, 12.0], dtype=torch.float64)
    for live_weight in (False, True):
        current = x.clone().requires_grad_()
        weight = current - (x - math.log(2.0)) if live_weight else torch.full_like(x, math.log(2.0))
        term = kl_penalty(
            current,
            torch.zeros_like(x),
            value=KlEstimator.k3,
            gradient=KlEstimator.k3,
            log_weight_N=weight,
            clamp=6.0,
        )
        k3 = [math.exp(-v) - 1 + v for v in x.tolist()]
        assert term.tolist() == pytest.approx([min(2 * k, 6.0) for k in k3], rel=1e-12)
        (gradient,) = torch.autograd.grad(term.sum(), current)
        slope = [1 - math.exp(-v) + (k if live_weight else 0.0) for k, v in zip(k3, x.tolist(), strict=True)]
        expected = [2 * s if 2 * k < 6.0 else 0.0 for s, k in zip(slope, k3, strict=True)]
        assert gradient.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_where_the_argument_is_clamped_a_live_weight_has_no_gradient_either() -> None:
    x = torch.tensor([-5.0, 1.0], dtype=torch.float64)
    current = x.clone().requires_grad_()
    term = kl_penalty(
        current, torch.zeros(2).double(), value=KlEstimator.k1, gradient=KlEstimator.k1,
        log_weight_N=current - x, log_ratio_clamp=2.0,
    )  # fmt: skip
    assert term.tolist() == [-2.0, 1.0]
    assert torch.autograd.grad(term.sum(), current)[0].tolist() == [0.0, 2.0]


def test_clamp_bounds_k1_from_both_sides() -> None:
    x = torch.tensor([-4.0, -1.0, 3.0], dtype=torch.float64)
    term = kl_penalty(x, torch.zeros_like(x), value=KlEstimator.k1, gradient=KlEstimator.k1, clamp=2.0)
    assert term.tolist() == [-2.0, -1.0, 2.0]


def test_log_ratio_clamp_bounds_the_estimators_argument() -> None:
    x = torch.tensor([-15.0, 0.5, 15.0], dtype=torch.float64, requires_grad=True)
    term = kl_penalty(x, torch.zeros(3).double(), value=KlEstimator.k3, gradient=KlEstimator.k3, log_ratio_clamp=10.0)
    assert term.tolist() == pytest.approx([math.exp(10) - 11, math.exp(-0.5) - 0.5, math.exp(-10) + 9], rel=1e-12)
    (gradient,) = torch.autograd.grad(term.sum(), x)
    assert gradient.tolist() == pytest.approx([0.0, 1 - math.exp(-0.5), 0.0], rel=1e-12)
