"""What the theory says of each correction, against recursion over plain floats and closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from truth.independent import Coefficients, distance, finite_differences, moments
from truth.methods import method
from truth.written_out import EVERY, FULL, GAPS, WRITTEN_OUT, bandit, estimate, moved, ratio

from trimtab.spec import Algo, Level, LossName
from trimtab.truth.generate import generate
from trimtab.truth.recipe import Gap, Recipe


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_expectation_and_variance_are_those_of_the_recursion(name: str, gap: Gap, step: int) -> None:
    spec, rule = WRITTEN_OUT[name]
    problem = generate(Recipe(mismatch=gap, length=3))
    problem = replace(problem, prompts=tuple(replace(p, weight=0.4 + i) for i, p in enumerate(problem.prompts)))
    found = estimate(problem, spec, step)
    problem = moved(problem, step)
    mean, variance = moments(problem, rule)
    target = finite_differences(problem)
    assert found.expectation.tolist() == pytest.approx(mean, rel=1e-11, abs=1e-14)
    assert found.target.tolist() == pytest.approx(target, rel=1e-6, abs=1e-9)
    assert found.bias == pytest.approx(distance(mean, target), abs=1e-8)
    assert found.variance == pytest.approx(variance, rel=1e-11)
    assert found.mse == found.bias**2 + found.variance


# -- the theory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", list(Gap))
def test_an_untruncated_sequence_weight_is_unbiased_exactly_where_the_rollout_can_write_everything(gap: Gap) -> None:
    problem = generate(Recipe(mismatch=gap))
    for spec in (method(), method(Algo.bypass, loss=LossName.reinforce), method(Algo.on_policy)):
        found = estimate(problem, spec)
        assert found.bias > 1e-3 if gap is Gap.truncation else found.bias < 1e-12
        assert found.variance > 0


@pytest.mark.parametrize("step", [1, 4])
def test_current_over_rollout_stays_unbiased_along_the_inner_loop_and_the_ppo_clip_does_not(step: int) -> None:
    problem = generate(Recipe())
    assert estimate(problem, method(Algo.bypass, loss=LossName.reinforce), step).bias < 1e-12
    assert estimate(problem, method(), step).bias > 1e-3


@pytest.mark.parametrize("gap", GAPS)
def test_token_and_geometric_weights_and_no_weight_are_biased(gap: Gap) -> None:
    problem = generate(Recipe(mismatch=gap))
    for level in (Level.token, Level.geometric, None):
        assert estimate(problem, method(level=level)).bias > 1e-3


@pytest.mark.parametrize("gap", FULL)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_tighter_bound_is_more_bias_and_less_variance(gap: Gap, seed: int) -> None:
    """Bias = -E[(w - c)+ A ∇log π] exactly; the clipped mass, and with rewards of one sign the bias, only grows."""
    problem = generate(Recipe(mismatch=gap, seed=seed))
    positive = replace(problem, prompts=tuple(
        replace(p, advantage={key: abs(a) for key, a in p.advantage.items()}) for p in problem.prompts
    ))  # fmt: skip
    found = {c: estimate(positive, method(upper=c)) for c in (math.inf, 2.0, 1.4, 1.1, 0.9)}
    for c, at in found.items():
        missing, _ = moments(positive, _beyond(c))
        assert (at.target - at.expectation).tolist() == pytest.approx(missing, abs=1e-12)
    biases, variances = [x.bias for x in found.values()], [x.variance for x in found.values()]
    assert biases[0] < 1e-12 and biases == sorted(biases) and biases[-1] > 1e-3
    assert variances == sorted(variances, reverse=True) and variances[-1] < variances[0]


def _beyond(c: float) -> Coefficients:
    return lambda path, a: [max(w - c, 0.0) * a if c < math.inf else 0.0
                            for w in ratio(path, Level.sequence, path.proximal)]  # fmt: skip


@pytest.mark.parametrize("c", [1.0, 1.5, 1.9, 2.5])
def test_truncation_shrinks_towards_zero_in_closed_form(c: float) -> None:
    """Two symbols, the first rewarded: gradient (1, -1) p (1 - p), estimated (1, -1) min(p, c mu) (1 - p)."""
    mu, p = 0.3, 0.6
    found = estimate(bandit([mu, 1 - mu], [p, 1 - p], [1.0, 0.0]), method(upper=c))
    assert found.target.tolist() == pytest.approx([p * (1 - p), -p * (1 - p)], rel=1e-14)
    mean = min(p, c * mu) * (1 - p)
    assert found.expectation.tolist() == pytest.approx([mean, -mean], rel=1e-14)
    assert found.expectation[0] <= found.target[0] * (1 + 1e-15)
    assert found.bias == pytest.approx(math.sqrt(2) * max(p - c * mu, 0) * (1 - p), abs=1e-15)
    w = min(p / mu, c)
    assert found.variance == pytest.approx(2 * (1 - p) ** 2 * w**2 * mu * (1 - mu), rel=1e-13)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("level", list(Level))
def test_bypass_and_decoupled_agree_at_the_first_step_with_the_weight_on(gap: Gap, level: Level) -> None:
    problem = generate(Recipe(mismatch=gap))
    one = estimate(problem, method(Algo.decoupled, level, 1.5))
    other = estimate(problem, method(Algo.bypass, level, 1.5, loss=LossName.reinforce))
    assert one.expectation.tolist() == pytest.approx(other.expectation.tolist(), abs=1e-13)
    assert one.variance == pytest.approx(other.variance, rel=1e-12)
    later = [estimate(problem, spec, 4).bias for spec in (
        method(Algo.decoupled, level, 1.5), method(Algo.bypass, level, 1.5, loss=LossName.reinforce))]  # fmt: skip
    assert abs(later[0] - later[1]) > 1e-4


@pytest.mark.parametrize("name", EVERY)
def test_without_a_mismatch_every_method_is_the_target(name: str) -> None:
    found = estimate(generate(Recipe(mismatch=Gap.none)), EVERY[name])
    assert found.bias < (1e-9 if name == "gmpo" else 1e-12)  # gmpo takes logs of weight + 1e-10
    assert (found.kept.tokens, found.kept.rows) == pytest.approx((1, 1), abs=1e-12)
    assert found.cosine == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_symbols_that_the_rollout_never_samples_make_bias_and_no_nan(name: str) -> None:
    problem = generate(Recipe(mismatch=Gap.truncation, strength=0.3))
    assert any(x == -math.inf for row in problem.prompts[0].rollout.values() for x in row)
    found = estimate(problem, EVERY[name], 1)
    assert bool(found.expectation.isfinite().all()) and math.isfinite(found.variance)
    assert found.bias > 1e-3
