"""Each method's moments written out again, and the problems and methods that the tests of this folder share."""

from __future__ import annotations

import math
from dataclasses import replace

from truth.independent import Coefficients, Path
from truth.methods import method

from trimtab.spec import Algo, Level, LossName, MethodSpec, TisMode
from trimtab.truth.enumerate import enumerate_problem
from trimtab.truth.measure import Estimate, measure, state
from trimtab.truth.problem import Problem, PromptProblem
from trimtab.truth.recipe import Gap

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


def bandit(mu: list[float], pi: list[float], advantage: list[float]) -> Problem:
    """One prompt, one token."""
    table = {"": tuple(map(math.log, pi))}
    worth = {str(i): a for i, a in enumerate(advantage)}
    return Problem(len(mu), 1, None, (PromptProblem(1.0, {"": tuple(map(math.log, mu))}, table, table, worth),))


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


EVERY = {
    **{name: spec for name, (spec, _) in WRITTEN_OUT.items()},
    "zero": method(level=Level.token, mode=TisMode.zero, lower=0.5, upper=2.0),
    "mask": method(level=Level.token, mode=TisMode.mask, lower=0.5, upper=2.0),
    "normalised": method(level=Level.token, upper=1.2, normalize=True),
    "m2po": method(Algo.decoupled, None, m2=0.03),
    "on_policy": method(Algo.on_policy, Level.token, 2.0),
    **{name.value: method(Algo.standard, None, loss=name) for name in LossName},
}
