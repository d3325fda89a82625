"""Exact moments against those of 20,000 draws by an independent sampler."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from truth.independent import draw
from truth.written_out import EVERY

from trimtab.method import Inputs, evaluate
from trimtab.objective.aggregate import Counts
from trimtab.spec import MethodSpec
from trimtab.truth.enumerate import enumerate_problem
from trimtab.truth.generate import generate
from trimtab.truth.limit import without_m2
from trimtab.truth.measure import Estimate, State, measure, objective_alone, state, token_gradients
from trimtab.truth.recipe import Recipe


@cache
def drawn_once() -> list[tuple[int, str]]:
    return draw(generate(Recipe(seed=3)), random.Random(1), 20_000)


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("name", ["decoupled token", "reinforce sequence", "rejection", "normalised", "m2po", "zero"])
def test_sampling_agrees_within_its_standard_error(name: str, step: int) -> None:
    """20,000 draws by an independent sampler, as one batch of the product's own."""
    problem = generate(Recipe(seed=3))
    listed = enumerate_problem(problem)
    at, spec = state(listed, step, 2.0), EVERY[name]
    exact = measure(spec, at)
    place = {(i, " ".join(map(str, w))): n for n, (i, w) in enumerate(zip(listed.prompt_B.tolist(), listed.words,
                                                                          strict=True))}  # fmt: skip
    rows = torch.tensor([place[drawn] for drawn in drawn_once()])
    gradients = sampled_gradients(spec, at.inputs, at.logits_PV, rows, listed.prefix_N, listed.token_N)
    # Not the sample's own error: where the draws miss a rare sequence with a large weight, that is far too small.
    spread_of_each = exact_variances(spec, at, exact)
    assert float(spread_of_each.sum()) == pytest.approx(exact.variance, rel=1e-10)
    error = (spread_of_each / len(rows)).sqrt()
    assert bool(((gradients.mean(0) - exact.expectation).abs() <= 5 * error + 1e-12).all())
    square = (gradients - exact.expectation).square().sum(1)
    spread = 5 * float(square.std()) / math.sqrt(len(rows))
    batch_wide = 0.01 * exact.variance if name in ("normalised", "m2po") else 0.0  # the drawn batch is not infinite
    assert abs(float(square.mean()) - exact.variance) <= spread + batch_wide


def exact_variances(spec: MethodSpec, at: State, exact: Estimate) -> Tensor:
    """Variance of each coordinate, from every sequence's whole gradient."""
    square = torch.zeros_like(exact.expectation)
    for share, part in without_m2(objective_alone(spec), at.inputs, at.draw_B):
        pull_N, _ = token_gradients(part, at)
        whole = laid_out(pull_N, at.prefix_N, at.token_N, at.inputs.row_N, at.logits_PV)
        square += share * (at.draw_B[:, None] * whole**2).sum(0)
    return square - exact.expectation**2


def laid_out(pull_N: Tensor, prefix_N: Tensor, token_N: Tensor, row_N: Tensor, logits_PV: Tensor) -> Tensor:
    """Each row's gradient [rows, P * V] from its tokens'."""
    size = logits_PV.shape[1]
    one_hot = torch.nn.functional.one_hot(token_N, size) - logits_PV.softmax(-1)[prefix_N]
    out = torch.zeros(int(row_N[-1]) + 1, logits_PV.numel(), dtype=torch.float64)
    places = prefix_N[:, None] * size + torch.arange(size)
    return out.index_put((row_N[:, None].expand_as(places), places), pull_N[:, None] * one_hot, accumulate=True)


def sampled_gradients(
    spec: MethodSpec, every: Inputs, logits_PV: Tensor, rows: Tensor, prefix_N: Tensor, token_N: Tensor
) -> Tensor:
    """Gradient of each drawn sequence [rows, P * V], the batch-wide rules being those of the drawn batch."""
    starts = every.length_B.cumsum(0) - every.length_B
    at_N = torch.cat([torch.arange(int(starts[r]), int(starts[r] + every.length_B[r])) for r in rows])
    length_B = every.length_B[rows]
    row_N = torch.repeat_interleave(torch.arange(len(rows)), length_B)
    assert every.proximal_N is not None
    current_N = every.current_N[at_N].detach().requires_grad_()
    batch = Inputs(
        current_N=current_N, rollout_N=every.rollout_N[at_N], proximal_N=every.proximal_N[at_N],
        valid_N=every.valid_N[at_N], row_N=row_N, length_B=length_B, advantage_B=every.advantage_B[rows],
    )  # fmt: skip
    loss = evaluate(objective_alone(spec), batch, totals=Counts(tokens=1, rows=1)).loss.total
    (pull_N,) = torch.autograd.grad(-loss, current_N)
    return laid_out(pull_N, prefix_N[at_N], token_N[at_N], row_N, logits_PV)


def test_one_sequences_gradient_does_not_depend_on_the_others() -> None:
    problem = generate(Recipe(prompts=1))
    at = state(enumerate_problem(problem), 1, 2.0)
    for spec in EVERY.values():
        if spec.mis.tis_batch_normalize or spec.mis.m2_threshold:
            continue
        whole, _ = token_gradients(objective_alone(spec), at)
        rows = torch.arange(5)
        few = int(at.inputs.length_B[:5].sum())
        cut = replace(
            at.inputs, current_N=at.inputs.current_N[:few], rollout_N=at.inputs.rollout_N[:few],
            proximal_N=at.inputs.proximal_N[:few], valid_N=at.inputs.valid_N[:few], row_N=at.inputs.row_N[:few],
            length_B=at.inputs.length_B[rows], advantage_B=at.inputs.advantage_B[rows], group_B=None,
        )  # fmt: skip
        part, _ = token_gradients(objective_alone(spec), replace(at, inputs=cut, draw_B=at.draw_B[:5]))
        assert part.tolist() == pytest.approx(whole[:few].tolist(), rel=1e-13, abs=1e-15)
