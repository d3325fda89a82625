"""A method's loss and gradient against float64 loops over tokens, and what must hold for every method."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from trimtab.config import compose, methods, recipes
from trimtab.errors import DataError
from trimtab.method import (
    Inputs,
    apply_stage,
    denominators,
    evaluate,
    loss_of,
    needs_whole,
    nothing,
    policy_term,
    recomputes,
    stages,
    token_gradient,
)
from trimtab.method.evaluate import loglinear
from trimtab.spec import AdvantageKl, Algo, MethodSpec, RunSpec

ROWS = 12


@cache
def presets() -> dict[str, MethodSpec]:
    return methods(recipes(), RunSpec())


@cache
def made(*overrides: str) -> MethodSpec:
    spec = compose(overrides)
    return MethodSpec(spec.algo, spec.mis, spec.loss)


def random_inputs(seed: int, gap: float = 0.4, moved: float = 0.3) -> Inputs:
    """Ragged rows with holes and an empty row; current, proximal and rollout all differ."""
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    length_B = torch.randint(1, 7, (ROWS,), generator=generator)
    length_B[4] = 0
    row_N = torch.repeat_interleave(torch.arange(ROWS), length_B)
    n = len(row_N)
    rollout_N = -normal(n).abs() - 0.2
    proximal_N = rollout_N + gap * normal(n)
    return Inputs(
        current_N=proximal_N + moved * normal(n), rollout_N=rollout_N, proximal_N=proximal_N, row_N=row_N,
        valid_N=torch.rand(n, generator=generator) > 0.1, length_B=length_B, advantage_B=normal(ROWS),
        reference_N=rollout_N + normal(n), entropy_N=normal(n).abs(), reward_B=normal(ROWS),
        group_B=torch.arange(ROWS) // 3, lag_N=torch.randint(0, 3, (n,), generator=generator),
    )  # fmt: skip


def as_seen(method: MethodSpec, inputs: Inputs) -> Inputs:
    return inputs if recomputes(method) else replace(inputs, proximal_N=None)


# -- loops -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One response's valid tokens: flat positions, log-probs, advantage."""

    at: list[int]
    current: list[float]
    proximal: list[float]
    rollout: list[float]
    advantage: float

    def d(self, numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
        return [a - b for a, b in zip(numerator, denominator, strict=True)]


@dataclass(frozen=True)
class Recipe:
    """Weights and keeps of a row's tokens; loss and its derivative at each token; how rows are counted."""

    weight: Callable[[Row], list[float]]
    keep: Callable[[Row], list[bool]]
    token: Callable[[Row], list[tuple[float, float]]]
    aggregate: str = "token_mean"
    kept: bool = False


def ones(row: Row) -> list[float]:
    return [1.0] * len(row.at)


def everything(row: Row) -> list[bool]:
    return [True] * len(row.at)


def proximal_ratios(row: Row) -> list[float]:
    return [math.exp(x) for x in row.d(row.proximal, row.rollout)]


def clipped(ratio: float, advantage: float, dual: float | None = None) -> tuple[float, float]:
    """PPO's loss at 0.2 and its derivative in the log-ratio."""
    free, bounded = -ratio * advantage, -min(max(ratio, 0.8), 1.2) * advantage
    loss, slope = (free, -ratio * advantage) if free >= bounded else (bounded, 0.0)
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        return -dual * advantage, 0.0
    return loss, slope


def ppo(anchor: str, dual: float | None = None) -> Callable[[Row], list[tuple[float, float]]]:
    def of(row: Row) -> list[tuple[float, float]]:
        other = {"proximal": row.proximal, "rollout": row.rollout, "current": row.current}[anchor]
        return [clipped(math.exp(x), row.advantage, dual) for x in row.d(row.current, other)]

    return of


def gspo(row: Row) -> list[tuple[float, float]]:
    x = row.d(row.current, row.rollout)
    return [clipped(math.exp(sum(x) / len(x)), row.advantage)] * len(x)  # each of n tokens by 1/n, from n losses


def score(row: Row) -> list[tuple[float, float]]:
    return [(-row.advantage * x, -row.advantage) for x in row.current]


def importance(row: Row) -> list[tuple[float, float]]:
    return [(-row.advantage * math.exp(x), -row.advantage * math.exp(x)) for x in row.d(row.current, row.rollout)]


def inside(values: Sequence[float], low: float, high: float) -> list[bool]:
    return [low <= x <= high for x in values]


def product(ratios: Sequence[float]) -> float:
    return math.prod(ratios)


def probability_moves(row: Row) -> list[bool]:
    moves = [math.exp(a) - math.exp(b) for a, b in zip(row.current, row.rollout, strict=True)]
    return [x <= 0.2 if row.advantage > 0 else x >= -0.2 for x in moves]


def opsm(row: Row) -> list[bool]:
    moved = row.d(row.proximal, row.current)
    return [not (row.advantage < 0 and sum(moved) / len(moved) > 1e-4)] * len(moved)


def k3_of_inverse(row: Row) -> list[bool]:
    return [1 / r - 1 + math.log(r) <= 0.1 for r in proximal_ratios(row)]


def current_product(row: Row) -> list[float]:
    return [min(math.exp(sum(row.d(row.current, row.rollout))), 2.0)] * len(row.at)


LOOPS: dict[str, Recipe] = {
    "verl/decoupled_seq_is_rs": Recipe(
        lambda row: [min(product(proximal_ratios(row)), 2.0)] * len(row.at),
        lambda row: [0.5 <= 1 / product(proximal_ratios(row)) <= 2.0] * len(row.at),
        ppo("proximal", dual=3.0), kept=True,
    ),
    "verl/bypass_pg_is": Recipe(current_product, everything, score),
    "miles/mask": Recipe(
        proximal_ratios, lambda row: inside(proximal_ratios(row), 0.5, 2.0), ppo("proximal"), "sequence_mean", True
    ),
    "miles/opsm": Recipe(ones, opsm, ppo("proximal"), "sequence_mean"),
    "slime/icepop": Recipe(
        lambda row: [r * (0.5 <= r <= 2.0) for r in proximal_ratios(row)], everything, ppo("proximal"), "sequence_mean"
    ),
    "nemo_rl/seq_mask_tis": Recipe(
        proximal_ratios,
        lambda row: [0.999 <= product(proximal_ratios(row)) ** (1 / len(row.at)) <= 1.002] * len(row.at),
        ppo("proximal"),
    ),
    "trl/sequence_mask": Recipe(
        lambda row: [w * (w <= 3.0) for w in [product(proximal_ratios(row))] * len(row.at)], everything, ppo("proximal")
    ),
    "areal/token_k3_mask": Recipe(proximal_ratios, k3_of_inverse, ppo("proximal")),
    "pipelinerl/gspo": Recipe(ones, everything, gspo, "sequence_sum"),
    "pipelinerl/ppo": Recipe(ones, everything, ppo("rollout"), "sequence_sum"),
    "prime_rl/dppo": Recipe(ones, probability_moves, importance),
    "trimtab/on_policy": Recipe(
        lambda row: [min(math.exp(x), 2.0) for x in row.d(row.current, row.rollout)], everything, ppo("current")
    ),
}  # fmt: skip


def rows_of(inputs: Inputs) -> list[Row]:
    assert inputs.proximal_N is not None
    found = []
    for b in range(ROWS):
        at = [i for i in range(len(inputs.row_N)) if int(inputs.row_N[i]) == b and bool(inputs.valid_N[i])]
        logps = [[float(x[i]) for i in at] for x in (inputs.current_N, inputs.proximal_N, inputs.rollout_N)]
        found.append(Row(at, *logps, float(inputs.advantage_B[b])))
    return [row for row in found if row.at]


def by_loops(recipe: Recipe, inputs: Inputs) -> tuple[float, list[float]]:
    """The policy term and its derivative in each token's current log-prob."""
    rows, gradient, total = rows_of(inputs), [0.0] * len(inputs.row_N), 0.0
    keeps = [recipe.keep(row) for row in rows]
    counts = [sum(keep) if recipe.kept else len(keep) for keep in keeps]
    for row, keep, count in zip(rows, keeps, counts, strict=True):
        number = sum(n > 0 for n in counts)
        divisor = {"token_mean": sum(counts), "sequence_mean": number * max(count, 1), "sequence_sum": number}
        for at, w, stays, (loss, slope) in zip(row.at, recipe.weight(row), keep, recipe.token(row), strict=True):
            if stays:
                total += w * loss / divisor[recipe.aggregate]
                gradient[at] = w * slope / divisor[recipe.aggregate]
    return total, gradient


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("gap", [2e-3, 0.4])
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_equal_a_loop_over_tokens(name: str, gap: float, seed: int) -> None:
    inputs, method = random_inputs(seed, gap), policy_term(presets()[name])
    total, gradient = by_loops(LOOPS[name], inputs)
    seen = as_seen(method, inputs)
    assert float(evaluate(method, seen).loss.total) == pytest.approx(total, rel=1e-11, abs=1e-14)
    assert token_gradient(method, seen).tolist() == pytest.approx(gradient, rel=1e-11, abs=1e-14)


# -- options one by one ----------------------------------------------------------------------------------------------


def test_loglinear_goes_from_rollout_to_current_by_lag() -> None:
    current_N = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    rollout_N = torch.tensor([-2.0, -1.0, torch.nan, -1.0], dtype=torch.float64)
    guessed = loglinear(current_N, rollout_N, torch.tensor([0, 1, 5, 3]))
    assert guessed.tolist() == [-2.0, -1.5, -3.0, -1.0 + 0.75 * -3.0]


def test_a_guessed_proximal_policy_equals_the_same_one_given() -> None:
    inputs = random_inputs(3)
    assert inputs.lag_N is not None
    guess_N = loglinear(inputs.current_N, inputs.rollout_N, inputs.lag_N)
    guessed = evaluate(policy_term(presets()["areal/loglinear"]), replace(inputs, proximal_N=None))
    given = evaluate(policy_term(presets()["areal/decoupled"]), replace(inputs, proximal_N=guess_N))
    assert float(guessed.loss.total) == pytest.approx(float(given.loss.total), rel=1e-12)


@pytest.mark.parametrize("kind", [AdvantageKl.anchor, AdvantageKl.reference])
def test_a_kl_inside_the_advantage_lowers_it_by_coef_times_log_ratio(kind: AdvantageKl) -> None:
    inputs, method = random_inputs(1), policy_term(made("algo=reinforce", "tis_mode=off"))
    loss = replace(method.loss, advantage_kl=kind, advantage_kl_coef=0.3)
    assert inputs.reference_N is not None
    other_N = inputs.rollout_N if kind is AdvantageKl.anchor else inputs.reference_N
    lower_N = inputs.advantage_B[inputs.row_N] - 0.3 * (inputs.current_N - other_N)
    expected = torch.where(inputs.valid_N, -lower_N / int(inputs.valid_N.sum()), 0.0)
    assert torch.allclose(token_gradient(replace(method, loss=loss), inputs), expected, rtol=1e-12, atol=0)


def test_on_policy_equals_decoupled_at_the_first_update() -> None:
    for seed in range(4):
        inputs = random_inputs(seed)
        first = replace(inputs, current_N=inputs.proximal_N)
        for rules in (["level=sequence"], ["rs=token", "mis.rs_upper_bound=1.2"], ["mis.tis_batch_normalize=true"]):
            decoupled = token_gradient(made("algo=decoupled", *rules), first)
            on_policy = token_gradient(made("algo=on_policy", *rules), replace(first, proximal_N=None))
            bypass = token_gradient(made("algo=reinforce", *rules), replace(first, proximal_N=None))
            assert torch.allclose(decoupled, on_policy, rtol=1e-12, atol=0)
            assert torch.allclose(decoupled, bypass, rtol=1e-12, atol=0)


def test_metrics_only_has_corrections_and_the_loss_of_none() -> None:
    inputs = random_inputs(2)
    result = evaluate(presets()["miles/metrics_only"], inputs)
    plain = evaluate(presets()["miles/standard"], inputs)
    assert torch.equal(result.loss.total, plain.loss.total) and bool(result.applied.keep_N.all())
    (correction,) = result.applied.corrections
    assert float((correction.weight_N - 1).abs().max()) > 0.1


def test_top_entropy_keeps_the_policy_term_of_the_most_uncertain_tokens() -> None:
    inputs, method = random_inputs(5), made("loss.top_entropy=0.3")
    assert inputs.entropy_N is not None
    every = token_gradient(made(), inputs)
    bound = torch.quantile(inputs.entropy_N[inputs.valid_N].float(), 0.7)
    expected = torch.where(inputs.entropy_N >= bound, every, 0.0)
    assert torch.equal(token_gradient(method, inputs), expected) and 0 < int((expected != 0).sum()) < 20
    with pytest.raises(DataError, match="entropy_N"):
        evaluate(method, replace(inputs, entropy_N=None))


def test_positive_likelihood_is_a_mean_over_tokens_of_rewarded_rows() -> None:
    inputs = random_inputs(6)
    assert inputs.reward_B is not None
    positive_N = inputs.valid_N & (inputs.reward_B > 0)[inputs.row_N]
    added = token_gradient(made("loss.positive_nll_coef=0.5"), inputs) - token_gradient(made(), inputs)
    expected = torch.where(positive_N, -0.5 / int(positive_N.sum()), 0.0).double()
    assert torch.allclose(added, expected, atol=1e-15)


# -- what holds for every method -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recipes())
def test_micro_batches_add_up_to_the_whole(name: str) -> None:
    """The corrections of the whole, cut; where nothing depends on it all, the micro-batch's own."""
    method, inputs = presets()[name], as_seen(presets()[name], random_inputs(7))
    whole = evaluate(method, inputs)
    expected = token_gradient(method, inputs)
    gradient, total = torch.zeros_like(inputs.current_N), 0.0
    for rows in ([0, 1, 2], [3], [4, 5, 6, 7, 8, 9], [10, 11]):
        at = torch.isin(inputs.row_N, torch.tensor(rows)).nonzero()[:, 0]
        part = cut(inputs, rows, at)
        current_N = part.current_N.clone().requires_grad_()
        applied = whole.applied.at(at)
        if not needs_whole(method) and not method.mis.tis_batch_normalize and method.mis.m2_threshold is None:
            applied = nothing(part.rollout_N, part.valid_N)
            for stage in stages(method):
                applied = applied.then(apply_stage(stage, part), measured_only=method.algo.metrics_only)
        loss = loss_of(method, replace(part, current_N=current_N), applied, whole.coefficients.at(at)).loss.total
        gradient[at] = torch.autograd.grad(loss, current_N)[0]
        total += float(loss.detach())
    assert total == pytest.approx(float(whole.loss.total), rel=1e-11, abs=1e-13)
    assert torch.allclose(gradient, expected, rtol=1e-11, atol=1e-14)


def cut(inputs: Inputs, rows: list[int], at: Tensor) -> Inputs:
    def tokens(x_N: Tensor | None) -> Tensor | None:
        return None if x_N is None else x_N[at]

    assert inputs.reward_B is not None and inputs.group_B is not None
    return Inputs(
        current_N=inputs.current_N[at], rollout_N=inputs.rollout_N[at], valid_N=inputs.valid_N[at],
        row_N=torch.repeat_interleave(torch.arange(len(rows)), inputs.length_B[rows]), length_B=inputs.length_B[rows],
        advantage_B=inputs.advantage_B[rows], proximal_N=tokens(inputs.proximal_N),
        reference_N=tokens(inputs.reference_N), entropy_N=tokens(inputs.entropy_N), reward_B=inputs.reward_B[rows],
        group_B=inputs.group_B[rows], lag_N=tokens(inputs.lag_N),
    )  # fmt: skip


@pytest.mark.parametrize("name", recipes())
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_at_invalid_tokens_is_never_looked_at(name: str, poison: float) -> None:
    method, inputs = presets()[name], random_inputs(8)

    def spoilt(x_N: Tensor | None) -> Tensor:
        assert x_N is not None
        return torch.where(inputs.valid_N, x_N, poison)

    other = replace(
        inputs, current_N=spoilt(inputs.current_N), rollout_N=spoilt(inputs.rollout_N),
        proximal_N=spoilt(inputs.proximal_N), reference_N=spoilt(inputs.reference_N),
        entropy_N=spoilt(inputs.entropy_N),
    )  # fmt: skip
    one, two = token_gradient(method, as_seen(method, inputs)), token_gradient(method, as_seen(method, other))
    assert torch.equal(one, two) and bool((one[~inputs.valid_N] == 0).all())


@pytest.mark.parametrize("name", recipes())
def test_a_missing_log_prob_is_survived_and_what_is_rejected_may_be_infinite(name: str) -> None:
    method, inputs = presets()[name], random_inputs(9)
    rollout_N = inputs.rollout_N.clone()
    at = inputs.valid_N.nonzero()[:3, 0]
    rollout_N[at] = math.nan
    assert bool(token_gradient(method, as_seen(method, replace(inputs, rollout_N=rollout_N))).isfinite().all())
    rollout_N[at[0]] = -math.inf
    seen = as_seen(method, replace(inputs, rollout_N=rollout_N))
    result, gradient = evaluate(method, seen), token_gradient(method, seen)
    rejected_N = ~result.applied.keep_N
    if bool(rejected_N[at[0]]):
        assert bool(gradient.isfinite().all()) and bool(result.loss.policy.isfinite())


@pytest.mark.parametrize("name", recipes())
def test_no_tokens_and_nothing_kept_have_a_gradient_of_0(name: str) -> None:
    method, inputs = policy_term(presets()[name]), random_inputs(10)
    empty = as_seen(method, cut(inputs, [4], torch.zeros(0, dtype=torch.int64)))
    assert float(evaluate(method, empty).loss.total.detach()) == 0.0 and token_gradient(method, empty).numel() == 0
    masked = as_seen(method, replace(inputs, valid_N=torch.zeros_like(inputs.valid_N)))
    assert float(evaluate(method, masked).loss.total.detach()) == 0.0
    assert not bool(token_gradient(method, masked).any())


def test_everything_rejected_is_a_loss_of_0() -> None:
    for denominator in ("all", "kept"):
        method = made("rs=token", f"loss.denominator={denominator}")
        inputs = random_inputs(11)
        far = replace(inputs, rollout_N=inputs.rollout_N - 9.0)
        result = evaluate(method, far)
        assert float(result.loss.total) == 0.0 and not bool(token_gradient(method, far).any())
        assert not bool((result.applied.keep_N & far.valid_N).any())


def test_missing_inputs_are_named() -> None:
    inputs = random_inputs(0)
    with pytest.raises(DataError, match="proximal_N"):
        evaluate(made("algo=decoupled"), replace(inputs, proximal_N=None, lag_N=None))
    loss = replace(made().loss, advantage_kl=AdvantageKl.reference, advantage_kl_coef=0.1)
    with pytest.raises(DataError, match="reference_N"):
        evaluate(replace(made(), loss=loss), replace(inputs, reference_N=None))


def test_global_counts_replace_the_batchs_own() -> None:
    from trimtab.objective.aggregate import Counts

    inputs, method = random_inputs(1), made("tis_mode=off")
    tokens = int(inputs.valid_N.sum())
    share = evaluate(method, inputs, totals=Counts(4 * tokens, 4 * ROWS))
    assert float(share.loss.total) == pytest.approx(float(evaluate(method, inputs).loss.total) / 4)
    keep_N = torch.ones_like(inputs.valid_N)
    assert torch.equal(denominators(method.loss, inputs, keep_N).policy_N, inputs.valid_N.double() / tokens)


def test_algorithms_differ_in_their_anchor_alone_without_a_correction() -> None:
    inputs = random_inputs(4, moved=0.05)
    for algo, other_N in ((Algo.standard, inputs.proximal_N), (Algo.bypass, inputs.rollout_N)):
        method = made(f"algo={algo.name}", "tis_mode=off")
        assert other_N is not None
        expected = torch.where(inputs.valid_N, inputs.current_N - other_N, 0.0)
        assert torch.equal(evaluate(method, as_seen(method, inputs)).log_ratio_N, expected)
    on_policy = evaluate(made("algo=on_policy", "tis_mode=off"), replace(inputs, proximal_N=None))
    assert not bool(on_policy.log_ratio_N.any())
