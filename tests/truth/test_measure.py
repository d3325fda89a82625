"""What the theory says of each correction, against recursion over plain floats, closed forms, and sampling."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from truth.independent import Coefficients, Path, distance, draw, finite_differences, moments
from truth.methods import method

from trimtab.method import Inputs, evaluate
from trimtab.objective.aggregate import Counts
from trimtab.spec import Aggregate, Algo, Denominator, Level, LossName, MethodSpec, TisMode
from trimtab.truth.enumerate import enumerate_problem
from trimtab.truth.generate import generate
from trimtab.truth.limit import m2_cut, without_m2
from trimtab.truth.measure import Estimate, State, measure, objective_alone, state, token_gradients
from trimtab.truth.problem import Problem, PromptProblem
from trimtab.truth.recipe import Gap, Recipe

GAPS = [gap for gap in Gap if gap is not Gap.none]
FULL = [gap for gap in GAPS if gap is not Gap.truncation]  # the rollout policy can write everything


def estimate(problem: Problem, spec: MethodSpec, step: int = 0, step_size: float = 2.0) -> Estimate:
    return measure(spec, state(enumerate_problem(problem), step, step_size))


def moved(problem: Problem, step: int, step_size: float = 2.0) -> Problem:
    """The problem whose current policies are those after ``step`` inner steps."""
    listed = enumerate_problem(problem)
    rows = state(listed, step, step_size).logits_PV.tolist()
    tables: list[dict[str, tuple[float, ...]]] = [{} for _ in problem.prompts]
    for (i, key), row in zip(listed.labels, rows, strict=True):
        tables[i][key] = tuple(row)
    prompts = (replace(p, current=t) for p, t in zip(problem.prompts, tables, strict=True))
    return replace(problem, prompts=tuple(prompts))


# -- each method's moments, written out again ------------------------------------------------------------------------


def ratio(path: Path, level: Level, numerator: tuple[float, ...]) -> list[float]:
    rho = [a / b for a, b in zip(numerator, path.rollout, strict=True)]
    match level:
        case Level.token:
            return rho
        case Level.sequence:
            return [math.prod(rho)] * len(rho)
        case Level.geometric:
            return [math.prod(rho) ** (1 / len(rho))] * len(rho)


def reinforce(level: Level, upper: float = math.inf) -> Coefficients:
    """A min(w, upper), w = current/rollout."""
    return lambda path, a: [a * min(w, upper) for w in ratio(path, level, path.current)]


def ppo(x: float, a: float) -> float:
    """d min(x A, clip(x) A) / d log x."""
    return x * a if x * a <= min(max(x, 0.8), 1.2) * a else 0.0


def decoupled(level: Level, upper: float = math.inf) -> Coefficients:
    def rule(path: Path, a: float) -> list[float]:
        weights = ratio(path, level, path.proximal)
        moves = [c / p for c, p in zip(path.current, path.proximal, strict=True)]
        return [min(w, upper) * ppo(x, a) for w, x in zip(weights, moves, strict=True)]

    return rule


def standard(path: Path, a: float) -> list[float]:
    return [ppo(c / p, a) for c, p in zip(path.current, path.proximal, strict=True)]


def bypass(path: Path, a: float) -> list[float]:
    return [ppo(c / m, a) for c, m in zip(path.current, path.rollout, strict=True)]


def masked(path: Path, a: float) -> list[float]:
    """Sequence rejection on proximal/rollout in [0.8, 1.25], token weights up to 2."""
    inside = 0.8 <= ratio(path, Level.sequence, path.proximal)[0] <= 1.25
    return decoupled(Level.token, 2.0)(path, a) if inside else [0.0] * len(path.symbols)


WRITTEN_OUT: dict[str, tuple[MethodSpec, Coefficients]] = {
    "standard": (method(Algo.standard, None), standard),
    "bypass": (method(Algo.bypass, None), bypass),
    "decoupled token": (method(level=Level.token, upper=1.3), decoupled(Level.token, 1.3)),
    "decoupled sequence": (method(upper=2.0), decoupled(Level.sequence, 2.0)),
    "decoupled geometric": (method(level=Level.geometric, upper=1.1), decoupled(Level.geometric, 1.1)),
    "reinforce sequence": (method(Algo.bypass, loss=LossName.reinforce), reinforce(Level.sequence)),
    "reinforce token": (method(Algo.bypass, Level.token, 1.5, loss=LossName.reinforce), reinforce(Level.token, 1.5)),
    "rejection": (method(level=Level.token, upper=2.0, rs=(Level.sequence, 0.8, 1.25)), masked),
}


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


def bandit(mu: list[float], pi: list[float], advantage: list[float]) -> Problem:
    """One prompt, one token."""
    table = {"": tuple(map(math.log, pi))}
    worth = {str(i): a for i, a in enumerate(advantage)}
    return Problem(len(mu), 1, None, (PromptProblem(1.0, {"": tuple(map(math.log, mu))}, table, table, worth),))


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


EVERY = {
    **{name: spec for name, (spec, _) in WRITTEN_OUT.items()},
    "zero": method(level=Level.token, mode=TisMode.zero, lower=0.5, upper=2.0),
    "mask": method(level=Level.token, mode=TisMode.mask, lower=0.5, upper=2.0),
    "normalised": method(level=Level.token, upper=1.2, normalize=True),
    "m2po": method(Algo.decoupled, None, m2=0.03),
    "on_policy": method(Algo.on_policy, Level.token, 2.0),
    **{name.value: method(Algo.standard, None, loss=name) for name in LossName},
}


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


# -- batch-wide rules: the infinite batch ------------------------------------------------------------------------------

# Eight draws with these counts are the rollout policy exactly, so a batch of them is an infinite batch in small.
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


# -- sampling ----------------------------------------------------------------------------------------------------------


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
