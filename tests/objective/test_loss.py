"""The whole loss: each term against loops, what rejection reaches, what masked positions may hold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trimtab.errors import DataError
from trimtab.objective.aggregate import coefficients
from trimtab.objective.loss import Loss, Terms, combine
from trimtab.objective.surrogate import TokenTerms, policy_terms
from trimtab.objective.terms import Surrogate
from trimtab.spec import Aggregate, KlEstimator, KlImportance, LossSpec, RejectTerms

N = 6
ROW_N = torch.tensor([0, 0, 0, 0, 0, 1])
LOSS_N = torch.tensor([1.0, 1.5, -1.0, 2.0, 0.5, 4.0], dtype=torch.float64)
KEEP_N = torch.tensor([True, False, True, True, True, True])
VALID_N = torch.tensor([True, True, True, True, True, False])
CURRENT_N = torch.linspace(-1.4, -0.2, N, dtype=torch.float64)
ANCHOR_N = CURRENT_N + torch.tensor([0.2, -0.3, 0.0, 0.7, -1.0, 0.1], dtype=torch.float64)
REFERENCE_N = CURRENT_N - torch.tensor([0.5, 0.1, -0.4, 0.2, 0.0, 1.0], dtype=torch.float64)
ROLLOUT_N = CURRENT_N + torch.tensor([0.3, 0.6, math.nan, -0.2, 0.4, 0.0], dtype=torch.float64)
ENTROPY_N = torch.linspace(1, 2, N, dtype=torch.float64)
REWARD_N = torch.tensor([1.0, 1.0, 0.0, -1.0, 0.5, 2.0], dtype=torch.float64)


def terms(loss_N: Tensor, keep_N: Tensor = KEEP_N, valid_N: Tensor = VALID_N, top_N: Tensor | None = None) -> Terms:
    no = torch.zeros_like(keep_N)
    coefficient_N = coefficients(valid_N, ROW_N, 2, aggregate=Aggregate.token_mean, constant=1.0)
    return Terms(Surrogate(loss_N, no, no, no), keep_N, valid_N, coefficient_N, coefficient_N, top_N)


def of(spec: LossSpec, t: Terms, current_N: Tensor = CURRENT_N, **other: Tensor) -> Loss:
    columns = {
        "anchor_N": ANCHOR_N,
        "reference_N": REFERENCE_N,
        "rollout_N": ROLLOUT_N,
        "entropy_N": ENTROPY_N,
        "reward_N": REWARD_N,
    } | other
    return combine(t, spec, current_N=current_N, **columns)


EVERYTHING = LossSpec(
    kl_coef=0.5,
    kl_value=KlEstimator.k3,
    kl_gradient=KlEstimator.k3,
    kl_importance=KlImportance.rollout_live,
    entropy_coef=0.1,
    log_ratio_penalty=0.3,
    positive_nll_coef=0.7,
)


@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize("reject_terms", list(RejectTerms))
def test_every_term_equals_a_loop_and_rejection_reaches_the_chosen_ones(reject_terms: RejectTerms, top: bool) -> None:
    spec = replace(EVERYTHING, reject_terms=reject_terms)
    top_N = torch.tensor([False, True, True, True, False, True]) if top else None
    loss = of(spec, terms(LOSS_N, top_N=top_N))
    valid = [i for i in range(N) if VALID_N[i]]
    kept = [i for i in valid if KEEP_N[i]]
    counted = valid if reject_terms is RejectTerms.policy else kept
    c, a, q, mu = (x.tolist() for x in (CURRENT_N, ANCHOR_N, REFERENCE_N, ROLLOUT_N))
    policy = math.fsum(float(LOSS_N[i]) for i in kept if top_N is None or top_N[i]) / 5
    weight = [1.0 if math.isnan(m) else math.exp(x - m) for x, m in zip(c, mu, strict=True)]
    kl = math.fsum(weight[i] * (math.exp(q[i] - c[i]) - 1 + c[i] - q[i]) for i in counted) / 5
    entropy = math.fsum(float(ENTROPY_N[i]) for i in counted) / 5
    pull = math.fsum((c[i] - a[i]) ** 2 for i in valid) / 5
    nll = math.fsum(-c[i] for i in (0, 1, 4)) / 3
    found = [float(x) for x in (loss.policy, loss.kl, loss.entropy, loss.pull, loss.nll)]
    assert found == pytest.approx([policy, kl, entropy, pull, nll], rel=1e-12)
    total = policy + 0.5 * kl - 0.1 * entropy + 0.3 * pull + 0.7 * nll
    assert float(loss.total) == pytest.approx(total, rel=1e-12)


def test_gradient_of_the_whole_equals_finite_differences() -> None:
    """gradcheck, with what is detached by definition (the surrogate's values) held fixed."""
    live = CURRENT_N.clone().requires_grad_()
    rollout_N = torch.where(ROLLOUT_N.isnan(), CURRENT_N - 0.1, ROLLOUT_N)
    valid = terms(LOSS_N)
    assert torch.autograd.gradcheck(lambda x: of(EVERYTHING, valid, x, rollout_N=rollout_N).total, (live,))


def test_coefficients_of_zero_leave_the_term_out_and_missing_inputs_are_zero() -> None:
    poison = torch.full((N,), math.nan, dtype=torch.float64)
    plain = of(LossSpec(), terms(LOSS_N), reference_N=poison, entropy_N=poison, reward_N=poison, anchor_N=poison)
    assert float(plain.total) == float(plain.policy) == pytest.approx(float(LOSS_N[[0, 2, 3, 4]].sum()) / 5)
    bare = combine(terms(LOSS_N), EVERYTHING, current_N=CURRENT_N)
    assert float(bare.total) == float(bare.policy)
    assert [float(x) for x in (bare.kl, bare.entropy, bare.pull, bare.nll)] == [0.0] * 4


@pytest.mark.parametrize(
    ("kind", "other_N", "live"),
    [
        (KlImportance.current_live, CURRENT_N, True),
        (KlImportance.rollout, ROLLOUT_N, False),
        (KlImportance.rollout_live, ROLLOUT_N, True),
        (KlImportance.anchor, ANCHOR_N, False),
        (KlImportance.anchor_live, ANCHOR_N, True),
    ],
)
def test_kl_importance_names_the_weight_and_whether_it_has_a_gradient(
    kind: KlImportance, other_N: Tensor, live: bool
) -> None:
    spec = LossSpec(kl_coef=1.0, kl_value=KlEstimator.k1, kl_gradient=KlEstimator.k1, kl_importance=kind)
    current_N = CURRENT_N.clone().requires_grad_()
    loss = of(spec, terms(torch.zeros(N).double()), current_N)
    (gradient,) = torch.autograd.grad(loss.total, current_N)
    x = (CURRENT_N - REFERENCE_N).tolist()
    w = torch.where(other_N.isnan(), 1.0, (CURRENT_N - other_N).exp()).tolist()
    assert float(loss.kl) == pytest.approx(math.fsum(w[i] * x[i] for i in range(5)) / 5, rel=1e-12)
    expected = [w[i] * ((x[i] if live else 0.0) + 1) / 5 for i in range(5)] + [0.0]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-12)


def test_kl_importance_without_its_log_probs_is_refused() -> None:
    for kind in (KlImportance.rollout, KlImportance.rollout_live, KlImportance.anchor, KlImportance.anchor_live):
        spec = LossSpec(kl_coef=1.0, kl_importance=kind)
        with pytest.raises(DataError, match=f"kl_importance={kind.value}"):
            combine(terms(LOSS_N), spec, current_N=CURRENT_N, reference_N=REFERENCE_N)


def test_shares_of_the_nll_add_up_to_the_whole() -> None:
    spec = LossSpec(positive_nll_coef=1.0)
    whole = float(of(spec, terms(LOSS_N)).nll)
    first, second = torch.arange(N) < 2, torch.arange(N) >= 2
    shares = [
        combine(
            terms(LOSS_N, valid_N=VALID_N & at), spec, current_N=CURRENT_N, reward_N=REWARD_N, positive_tokens=3
        ).nll
        for at in (first, second)
    ]
    assert float(sum(shares)) == pytest.approx(whole, rel=1e-12)
    none = combine(terms(LOSS_N), spec, current_N=CURRENT_N, reward_N=torch.zeros(N))
    assert float(none.nll) == 0.0


def test_pull_saturates_at_its_clamp() -> None:
    spec = LossSpec(log_ratio_penalty=1.0)
    far = CURRENT_N - 30
    assert float(of(spec, terms(LOSS_N), anchor_N=far).pull) == pytest.approx(400.0)
    free = of(replace(spec, log_ratio_clamp=None), terms(LOSS_N), anchor_N=far)
    assert float(free.pull) == pytest.approx(900.0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_invalid_positions_may_hold_anything_in_any_column(poison: float) -> None:
    def spoil(x: Tensor) -> Tensor:
        return torch.where(VALID_N, x, poison)

    def run(change: bool) -> tuple[Loss, Tensor]:
        columns = (CURRENT_N, ANCHOR_N, REFERENCE_N, ROLLOUT_N, ENTROPY_N, REWARD_N, LOSS_N, LOSS_N * 0 + 1.3)
        c, a, q, mu, h, reward, advantage, weight = (spoil(x) if change else x for x in columns)
        live = c.clone().requires_grad_()
        surrogate = policy_terms(EVERYTHING, TokenTerms(live, a, advantage, weight, VALID_N, ROW_N, 2))
        t = replace(terms(LOSS_N), surrogate=surrogate)
        loss = of(EVERYTHING, t, live, anchor_N=a, reference_N=q, rollout_N=mu, entropy_N=h, reward_N=reward)
        return loss, torch.autograd.grad(loss.total, live)[0]

    (clean, gradient), (spoilt, spoilt_gradient) = run(False), run(True)
    assert float(clean.total.detach()) == float(spoilt.total.detach())
    assert torch.equal(gradient, spoilt_gradient) and float(gradient[5]) == 0.0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_rejected_positions_may_hold_any_loss(poison: float) -> None:
    clean = combine(terms(LOSS_N), LossSpec(), current_N=CURRENT_N)
    spoilt_N = LOSS_N.clone()
    spoilt_N[[1, 5]] = poison
    assert float(combine(terms(spoilt_N), LossSpec(), current_N=CURRENT_N).total) == float(clean.total)
