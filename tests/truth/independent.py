"""An enumeration of its own: recursion over dicts and plain floats, no tensors; what trimtab.truth is held against."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from trimtab.truth.problem import Problem, PromptProblem

Logits = Mapping[str, tuple[float, ...]]


def softmax(row: tuple[float, ...]) -> list[float]:
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


@dataclass(frozen=True)
class Path:
    """One whole sequence: the prefix and symbol of each token, and their probabilities under the three policies."""

    prefixes: tuple[str, ...] = ()
    symbols: tuple[int, ...] = ()
    rollout: tuple[float, ...] = ()
    proximal: tuple[float, ...] = ()
    current: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        return " ".join(str(s) for s in self.symbols)


def paths(problem: Problem, prompt: PromptProblem, at: Path | None = None) -> Iterator[Path]:
    """Depth first."""
    at = Path() if at is None else at
    if len(at.symbols) == problem.length or (at.symbols and at.symbols[-1] == problem.eos):
        yield at
        return
    mu, pi_old, pi = (softmax(table[at.key]) for table in (prompt.rollout, prompt.proximal, prompt.current))
    for s in range(problem.symbols):
        yield from paths(
            problem,
            prompt,
            Path((*at.prefixes, at.key), (*at.symbols, s), (*at.rollout, mu[s]), (*at.proximal, pi_old[s]),
                 (*at.current, pi[s])),
        )  # fmt: skip


def value(problem: Problem) -> float:
    """J of the current policies."""
    return sum(
        prompt.weight * math.prod(path.current) * prompt.advantage[path.key]
        for prompt in problem.prompts
        for path in paths(problem, prompt)
    )


def coordinates(problem: Problem) -> list[tuple[int, str, int]]:
    return [(i, key, s) for i, p in enumerate(problem.prompts) for key in sorted(p.current)
            for s in range(problem.symbols)]  # fmt: skip


def finite_differences(problem: Problem, h: float = 1e-5) -> list[float]:
    """∇J by central differences, one logit after the other."""

    def moved(i: int, key: str, s: int, by: float) -> float:
        prompt = problem.prompts[i]
        row = list(prompt.current[key])
        row[s] += by
        changed = replace(prompt, current={**prompt.current, key: tuple(row)})
        return value(replace(problem, prompts=(*problem.prompts[:i], changed, *problem.prompts[i + 1 :])))

    return [(moved(*at, h) - moved(*at, -h)) / (2 * h) for at in coordinates(problem)]


Coefficients = Callable[[Path, float], list[float]]
"""From a sequence and its advantage: d objective / d log-prob of each token."""


def sequence_gradient(problem: Problem, number: int, path: Path, coefficients: list[float]) -> dict[tuple, float]:
    """Gradient of one sequence's objective: each token pulls the logits after its prefix."""
    gradient: dict[tuple, float] = {}
    for prefix, symbol, c in zip(path.prefixes, path.symbols, coefficients, strict=True):
        pi = softmax(problem.prompts[number].current[prefix])
        for s in range(problem.symbols):
            gradient[number, prefix, s] = gradient.get((number, prefix, s), 0.0) + c * ((s == symbol) - pi[s])
    return gradient


def moments(problem: Problem, rule: Coefficients) -> tuple[list[float], float]:
    """Expectation, and trace of the covariance, over prompts (by weight) and the rollout policy's sequences."""
    order = coordinates(problem)
    total = sum(p.weight for p in problem.prompts)
    outcomes = []
    for i, prompt in enumerate(problem.prompts):
        for path in paths(problem, prompt):
            chance = prompt.weight / total * math.prod(path.rollout)
            if chance > 0:
                gradient = sequence_gradient(problem, i, path, rule(path, prompt.advantage[path.key]))
                outcomes.append((chance, [total * gradient.get(at, 0.0) for at in order]))
    mean = [sum(c * g[j] for c, g in outcomes) for j in range(len(order))]
    return mean, sum(c * sum((x - m) ** 2 for x, m in zip(g, mean, strict=True)) for c, g in outcomes)


def distance(a: list[float], b: list[float]) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def draw(problem: Problem, chance: random.Random, count: int) -> list[tuple[int, str]]:
    """Prompts by weight, then symbols one after the other from the rollout policy."""
    found = []
    for _ in range(count):
        (i,) = chance.choices(range(len(problem.prompts)), [p.weight for p in problem.prompts])
        symbols: list[int] = []
        while len(symbols) < problem.length and (not symbols or symbols[-1] != problem.eos):
            row = softmax(problem.prompts[i].rollout[" ".join(map(str, symbols))])
            symbols += chance.choices(range(problem.symbols), row)
        found.append((i, " ".join(map(str, symbols))))
    return found
