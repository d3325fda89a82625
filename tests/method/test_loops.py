"""Losses and gradients of presets against float64 loops over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from method.cases import ROWS, as_seen, presets, random_inputs

from trimtab.method import (
    Inputs,
    evaluate,
    policy_term,
    token_gradient,
)


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
