"""Batch-wide rules: the exact figures are the limits of ever larger batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from truth.independent import distance
from truth.methods import method
from truth.written_out import bandit, estimate

from trimtab.method import Inputs, evaluate
from trimtab.spec import Aggregate, Algo, Denominator, Level, MethodSpec, TisMode
from trimtab.truth.limit import m2_cut

COUNTS = [4, 2, 1, 1]
EIGHT = bandit([c / 8 for c in COUNTS], [0.2, 0.3, 0.1, 0.4], [1.0, -1.0, 0.5, 2.0])


def batch_gradient(spec: MethodSpec) -> list[float]:
    """Gradient of the product's loss on the eight rows, with the denominators and batch-wide rules it has."""
    symbols = torch.tensor([s for s, c in enumerate(COUNTS) for _ in range(c)])
    prompt = EIGHT.prompts[0]
    logits = torch.tensor(prompt.current[""], dtype=torch.float64).requires_grad_()
    inputs = Inputs(
        current_N=logits.log_softmax(-1)[symbols],
        rollout_N=torch.tensor(prompt.rollout[""], dtype=torch.float64)[symbols],
        proximal_N=logits.detach().log_softmax(-1)[symbols],
        valid_N=torch.ones(8, dtype=torch.bool),
        row_N=torch.arange(8),
        length_B=torch.ones(8, dtype=torch.int64),
        advantage_B=torch.tensor(list(prompt.advantage.values()), dtype=torch.float64)[symbols],
    )
    (gradient,) = torch.autograd.grad(-evaluate(spec, inputs).loss.total, logits)
    return gradient.tolist()


@pytest.mark.parametrize("level", [Level.token, Level.sequence])
@pytest.mark.parametrize("mode", [TisMode.truncate, TisMode.mask, TisMode.zero, TisMode.clip])
def test_batch_normalising_divides_by_the_exact_mean(level: Level, mode: TisMode) -> None:
    spec = method(level=level, mode=mode, lower=0.5, upper=2.0, normalize=True)
    assert estimate(EIGHT, spec).expectation.tolist() == pytest.approx(batch_gradient(spec), rel=1e-12)


def test_a_normalised_truncated_weight_has_the_closed_form() -> None:
    """Divided by E[min(w, c)], the weight's own mean."""
    pi = [math.exp(x) for x in EIGHT.prompts[0].current[""]]
    mean = sum(c / 8 * min(p / (c / 8), 1.5) for c, p in zip(COUNTS, pi, strict=True))
    plain = estimate(EIGHT, method(upper=1.5)).expectation
    assert estimate(EIGHT, method(upper=1.5, normalize=True)).expectation.tolist() == pytest.approx(
        (plain / mean).tolist(), rel=1e-13
    )


@pytest.mark.parametrize("aggregate", [Aggregate.token_mean, Aggregate.sequence_mean])
def test_the_denominator_kept_divides_by_the_kept_share(aggregate: Aggregate) -> None:
    """proximal/rollout is 0.4, 1.2, 0.8, 3.2: the bounds keep symbols 1 and 2, that is 3 draws of 8."""
    spec = method(level=None, rs=(Level.token, 0.5, 2.0), aggregate=aggregate)
    kept = replace(spec, loss=replace(spec.loss, denominator=Denominator.kept))
    found = estimate(EIGHT, spec)
    assert (found.kept.tokens, found.kept.rows) == pytest.approx((3 / 8, 3 / 8), rel=1e-14)
    assert batch_gradient(spec) == pytest.approx(found.expectation.tolist(), rel=1e-13)
    assert batch_gradient(kept) == pytest.approx((found.expectation * 8 / 3).tolist(), rel=1e-13)
    assert found.kept.bias == pytest.approx(distance(batch_gradient(kept), found.target.tolist()), rel=1e-12)
    assert estimate(EIGHT, kept).expectation.tolist() == found.expectation.tolist()  # nothing is divided by


def test_the_cut_of_m2po() -> None:
    """Mass 1/4 each at sizes 0, 1, 2, 3: the mean square of {0, 1, φ·2} is 1 where 1 + 4φ = 2 + φ: φ = 1/3."""
    sizes, mass = torch.tensor([3.0, 1.0, 0.0, 2.0]), torch.full((4,), 0.25)
    share, cut, below = m2_cut(sizes.double(), mass.double(), 1.0)
    assert (share, cut) == pytest.approx((1 / 3, 2.0)) and 1 < below < 2
    assert m2_cut(sizes.double(), mass.double(), 4.0)[:2] == (1.0, 3.0)
    share, cut, below = m2_cut(sizes.double() + 2, mass.double(), 1.0)
    assert (share, cut) == (0.0, 2.0) and below < 2


def test_m2po_in_a_batch_of_many_copies_is_its_limit() -> None:
    """log-ratios: their squares, and which part of the cut survives, in the product's own batch of many rows."""
    spec = method(Algo.decoupled, None, m2=0.2)
    found = estimate(EIGHT, spec)
    copies = 5000
    symbols = torch.tensor([s for s, c in enumerate(COUNTS) for _ in range(c)]).repeat(copies)
    prompt = EIGHT.prompts[0]
    current = torch.tensor(prompt.current[""], dtype=torch.float64).log_softmax(-1)
    inputs = Inputs(
        current_N=current[symbols].requires_grad_(),
        rollout_N=torch.tensor(prompt.rollout[""], dtype=torch.float64)[symbols],
        proximal_N=current[symbols],
        valid_N=torch.ones(len(symbols), dtype=torch.bool),
        row_N=torch.arange(len(symbols)),
        length_B=torch.ones(len(symbols), dtype=torch.int64),
        advantage_B=torch.tensor(list(prompt.advantage.values()), dtype=torch.float64)[symbols],
    )
    keep = evaluate(spec, inputs).applied.keep_N
    assert found.kept.tokens == pytest.approx(float(keep.double().mean()), abs=2 / len(symbols))
