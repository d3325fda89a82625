"""The tree of sequences and the exact gradient, against recursion and finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from truth.independent import coordinates, finite_differences, paths, value

from trimtab.truth.enumerate import ascend, enumerate_problem, objective, target_gradient
from trimtab.truth.generate import generate
from trimtab.truth.problem import sequences, token_count
from trimtab.truth.recipe import Gap, Recipe

SHAPES = [Recipe(), Recipe(symbols=2, length=5, eos=1, prompts=1), Recipe(symbols=4, length=3, eos=None, prompts=3)]


@pytest.mark.parametrize("recipe", SHAPES)
def test_the_sequences_are_those_of_the_recursion_and_their_probabilities_add_up(recipe: Recipe) -> None:
    problem = generate(recipe)
    listed = enumerate_problem(problem)
    expected = {(i, path.symbols): math.prod(path.rollout) for i, p in enumerate(problem.prompts)
                for path in paths(problem, p)}  # fmt: skip
    found = dict(zip(zip(listed.prompt_B.tolist(), listed.words, strict=True),
                     listed.sequences_of(listed.rollout_PV).exp().tolist(), strict=True))  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-12)
    assert float(listed.draw_B.sum()) == pytest.approx(1, abs=1e-12)
    assert len(listed.token_N) == recipe.prompts * token_count(recipe.symbols, recipe.length, recipe.eos)


@pytest.mark.parametrize("shape", [(3, 4, 0), (3, 4, None), (2, 1, 1), (1, 3, None), (5, 2, 4), (1, 3, 0)])
def test_tokens_are_counted_without_listing_them(shape: tuple[int, int, int | None]) -> None:
    assert token_count(*shape) == sum(len(word) for word in sequences(*shape))


@pytest.mark.parametrize("recipe", SHAPES)
def test_the_target_is_the_slope_of_the_objective(recipe: Recipe) -> None:
    problem = generate(recipe)
    problem = replace(problem, prompts=tuple(replace(p, weight=0.3 + i) for i, p in enumerate(problem.prompts)))
    listed = enumerate_problem(problem)
    assert float(objective(listed, listed.logits_PV)) == pytest.approx(value(problem), rel=1e-12)
    slope = finite_differences(problem)
    assert target_gradient(listed, listed.logits_PV).flatten().tolist() == pytest.approx(slope, rel=1e-7, abs=1e-9)


def test_gradients_come_prompt_by_prompt_with_prefixes_sorted_as_text() -> None:
    problem = generate(Recipe(symbols=12, length=2, eos=None, prompts=2))
    listed = enumerate_problem(problem)
    order = [(i, key, s) for i, key in listed.labels for s in range(12)]
    assert order == coordinates(problem)
    assert [key for i, key in listed.labels if i == 0][:5] == ["", "0", "1", "10", "11"]


def test_the_closed_form_of_the_target() -> None:
    """Σ_y π(y) (A(y) - V(prefix)): the advantage of a symbol over its prefix's mean, times the chance to be there."""
    problem = generate(Recipe(prompts=1))
    listed = enumerate_problem(problem)
    prompt = problem.prompts[0]
    reach, worth = {}, {}
    for path in paths(problem, prompt):
        for t, prefix in enumerate(path.prefixes):
            chance = math.prod(path.current)
            reach[prefix] = reach.get(prefix, 0.0) + chance
            at = prefix, path.symbols[t]
            worth[at] = worth.get(at, 0.0) + chance * prompt.advantage[path.key]
    probability = listed.logits_PV.softmax(-1)
    for row, (_, prefix) in enumerate(listed.labels):
        here = [worth[prefix, s] for s in range(problem.symbols)]
        exact = [x - float(p) * sum(here) for x, p in zip(here, probability[row], strict=True)]
        assert target_gradient(listed, listed.logits_PV)[row].tolist() == pytest.approx(exact, abs=1e-14)


def test_the_inner_loop_climbs() -> None:
    listed = enumerate_problem(generate(Recipe()))
    values = [float(objective(listed, ascend(listed, listed.logits_PV, 1.0, n))) for n in range(4)]
    assert values == sorted(values) and values[3] > values[0]
    once = listed.logits_PV + target_gradient(listed, listed.logits_PV)
    assert torch.equal(ascend(listed, listed.logits_PV, 1.0, 1), once)


def test_each_mismatch_is_what_it_says() -> None:
    made = {gap: generate(Recipe(mismatch=gap)) for gap in Gap}
    base = made[Gap.none].prompts[0]
    assert base.rollout == base.proximal == base.current
    for gap in (Gap.logit_noise, Gap.temperature, Gap.truncation, Gap.quantised):
        assert made[gap].prompts[0].proximal == base.proximal
        assert made[gap].prompts[0].rollout != base.proximal
    assert made[Gap.temperature].prompts[0].rollout == {k: tuple(1.5 * x for x in v) for k, v in base.proximal.items()}
    assert all(x % 1 == 0 for row in made[Gap.quantised].prompts[1].rollout.values() for x in row)
    for key, row in made[Gap.truncation].prompts[0].rollout.items():
        left = [p for x, p in zip(row, _softmax(base.proximal[key]), strict=True) if x > -math.inf]
        assert sum(left) >= 0.9 - 1e-12 and sum(left) - min(left) < 0.9
    stale = made[Gap.staleness]
    assert stale.prompts[0].rollout == base.proximal
    assert value(stale) > value(replace(stale, prompts=tuple(replace(p, current=p.rollout) for p in stale.prompts)))


def _softmax(row: tuple[float, ...]) -> list[float]:
    return torch.tensor(row, dtype=torch.float64).softmax(-1).tolist()
