"""Built-in problems: random policies, rewards that few sequences earn, and one chosen mismatch."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

from trimtab.errors import ConfigError
from trimtab.truth.enumerate import ascend, enumerate_problem
from trimtab.truth.problem import Problem, PromptProblem, Word, check_size, prefixes, sequences, text
from trimtab.truth.recipe import MEANING, STRENGTH, Gap, Recipe

Table = dict[str, tuple[float, ...]]


def generate(recipe: Recipe) -> Problem:
    """Logits ~ N(0, 1); rewards in {0, 1}; advantage = reward - its mean under the rollout; prompts weigh the same."""
    for name, value, least in (("symbols", recipe.symbols, 2), ("length", recipe.length, 1),
                               ("prompts", recipe.prompts, 1)):  # fmt: skip
        if value < least:
            raise ConfigError(f"--{name}={value} must be {least} or more")
    if recipe.eos is not None and not 0 <= recipe.eos < recipe.symbols:
        raise ConfigError(f"--eos={recipe.eos} is no symbol; allowed: none, 0 … {recipe.symbols - 1}")
    strength = STRENGTH[recipe.mismatch] if recipe.strength is None else recipe.strength
    if not (0 <= strength < math.inf) or (recipe.mismatch is Gap.truncation and strength >= 1):
        raise ConfigError(f"--strength={strength} is out of range; {MEANING[recipe.mismatch]}: a finite number from 0 "
                          f"up{', below 1' if recipe.mismatch is Gap.truncation else ''}")  # fmt: skip
    check_size(recipe.symbols, recipe.length, recipe.eos, recipe.prompts)
    # noise is drawn apart, so that problems of one seed differ in nothing but their mismatch
    draw, noise = random.Random(recipe.seed), random.Random(f"noise {recipe.seed}")
    prompts = tuple(_prompt(recipe, strength, draw, noise) for _ in range(recipe.prompts))
    problem = Problem(recipe.symbols, recipe.length, recipe.eos, prompts)
    return _aged(problem, strength) if recipe.mismatch is Gap.staleness else problem


def _aged(problem: Problem, strength: float, steps: int = 4) -> Problem:
    """Train the trainer's policies away from the rollout's, which stays as it is."""
    listed = enumerate_problem(problem)
    moved_PV = ascend(listed, listed.logits_PV, strength / steps, steps).tolist()
    tables: list[Table] = [{} for _ in problem.prompts]
    for (prompt, prefix), row in zip(listed.labels, moved_PV, strict=True):
        tables[prompt][prefix] = tuple(row)
    prompts = (replace(p, proximal=t, current=dict(t)) for p, t in zip(problem.prompts, tables, strict=True))
    return replace(problem, prompts=tuple(prompts))


def _prompt(recipe: Recipe, strength: float, draw: random.Random, noise: random.Random) -> PromptProblem:
    shape = (recipe.symbols, recipe.length, recipe.eos)
    proximal: Table = {
        text(prefix): tuple(draw.gauss(0, 1) for _ in range(recipe.symbols)) for prefix in prefixes(*shape)
    }
    rollout = {key: _rollout(row, recipe.mismatch, strength, noise) for key, row in proximal.items()}
    whole = list(sequences(*shape))
    reward = {word: float(draw.random() < 0.4) for word in whole}
    mean = sum(math.exp(log_prob(word, rollout)) * reward[word] for word in whole)
    advantage = {text(word): reward[word] - mean for word in whole}
    return PromptProblem(1.0 / recipe.prompts, rollout, proximal, dict(proximal), advantage)


def log_prob(word: Word, logits: Mapping[str, tuple[float, ...]]) -> float:
    """Log-prob of a sequence."""
    total = 0.0
    for t, symbol in enumerate(word):
        row = logits[text(word[:t])]
        high = max(row)
        total += row[symbol] - high - math.log(sum(math.exp(x - high) for x in row))
    return total


def _rollout(row: tuple[float, ...], mismatch: Gap, strength: float, noise: random.Random) -> tuple[float, ...]:
    match mismatch:
        case Gap.none | Gap.staleness:
            return row
        case Gap.logit_noise:
            return tuple(x + noise.gauss(0, strength) for x in row)
        case Gap.temperature:
            return tuple(x * (1 + strength) for x in row)
        case Gap.truncation:
            return _top_p(row, 1 - strength)
        case Gap.quantised:
            return tuple(strength * round(x / strength) if strength else x for x in row)


def _top_p(row: tuple[float, ...], mass: float) -> tuple[float, ...]:
    """The fewest likeliest symbols that hold ``mass``; the others become impossible."""
    total = sum(math.exp(x) for x in row)
    kept, sum_ = set(), 0.0
    for i in sorted(range(len(row)), key=lambda i: -row[i]):
        kept.add(i)
        sum_ += math.exp(row[i]) / total
        if sum_ >= mass * (1 - 1e-12):
            break
    return tuple(x if i in kept else -math.inf for i, x in enumerate(row))
