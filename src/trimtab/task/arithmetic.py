"""Built-in sums: every problem of a difficulty is enumerated, so the splits are disjoint by construction.

Problems that differ only in the order of the operands of + or * go to the same split: a policy trained
on ``3+4=`` has seen ``4+3=``.
"""

from __future__ import annotations

import random
import re
from typing import Iterator, Sequence

from trimtab.batch import Problem
from trimtab.errors import ConfigError
from trimtab.spec import Difficulty, PromptStyle, TaskSpec
from trimtab.task.data import Splits
from trimtab.task.prompts import answer_text, render

SEED = 20_240_229  # of the split and the order; fixed so that a problem's index means the same in every run
INTEGER = re.compile(r"-?\d+")

Sum = tuple[int, str, int]


def operators(difficulty: Difficulty) -> tuple[str, range]:
    """(operators, operands) of a difficulty."""
    match difficulty:
        case Difficulty.one_digit:
            return "+", range(0, 10)
        case Difficulty.two_digit:
            return "+", range(10, 100)
        case Difficulty.two_digit_mixed:
            return "+-", range(10, 100)
        case Difficulty.three_digit:
            return "+", range(100, 1000)
        case Difficulty.product:
            return "*", range(0, 10)


def solve(problem: Sum) -> int:
    """The value of ``a op b``."""
    a, op, b = problem
    match op:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
    raise ValueError(f"unknown operator {op!r}")


def permuted(total: int, rng: random.Random) -> Iterator[int]:
    """0 … total - 1 in random order, shuffled only as far as it is read (Fisher-Yates over a sparse array)."""
    moved: dict[int, int] = {}
    for i in range(total):
        j = rng.randrange(i, total)
        yield moved.get(j, j)
        moved[j] = moved.pop(i, i)


def families(difficulty: Difficulty) -> Iterator[tuple[Sum, ...]]:
    """All families in a fixed random order: a sum together with its mirror image, if that is another one."""
    ops, operands = operators(difficulty)
    n = len(operands)
    for code in permuted(len(ops) * n * n, random.Random(SEED)):
        op, (i, j) = ops[code // (n * n)], divmod(code % (n * n), n)
        a, b = operands[i], operands[j]
        if op == "-" or a == b:
            yield ((a, op, b),)
        elif a < b:  # the mirror image's own code is skipped, so each family comes once
            yield ((a, op, b), (b, op, a))


def sizes(difficulty: Difficulty, train_size: int, eval_size: int) -> tuple[int, int]:
    """(train, evaluation) sizes, capped to what exists: if both do not fit, at most a fifth is evaluated."""
    ops, operands = operators(difficulty)
    total = len(ops) * len(operands) ** 2
    evaluation = min(eval_size, max(total // 5, total - train_size))
    return min(train_size, total - evaluation), evaluation


def draw(difficulty: Difficulty, train_size: int, eval_size: int) -> tuple[list[Sum], list[Sum]]:
    """(train, evaluation) sums; no family is in both."""
    n_train, n_eval = sizes(difficulty, train_size, eval_size)
    train: list[Sum] = []
    evaluation: list[Sum] = []
    for family in families(difficulty):
        if len(evaluation) < n_eval:
            evaluation += family
        elif len(train) < n_train:
            train += family
        else:
            break
    random.Random(SEED + 1).shuffle(train)
    return train[:n_train], evaluation[:n_eval]


class ArithmeticTask:
    """``12+34=`` and the like; reward 1 for the right number, else 0.

    plain and few_shot: the answer must be the whole response (few_shot: its first line).
    chat: the response's last integer must be the answer.
    """

    def __init__(self, spec: TaskSpec) -> None:
        few = spec.shots if spec.style is PromptStyle.few_shot else 0
        train, evaluation = draw(spec.difficulty, spec.train_size + few, spec.eval_size)
        shown, train = train[:few], train[few:]  # worked examples belong to neither split
        if not train:
            raise ConfigError(
                f"task.train_size={spec.train_size} with task.shots={few} leaves no problem to train on; "
                "raise task.train_size or choose a larger task.difficulty"
            )
        self._spec = spec
        self._shots = [(self._question(s), str(solve(s))) for s in shown]
        self._splits = Splits(
            tuple(self._problem("train", s) for s in train),
            tuple(self._problem("eval", s) for s in evaluation),
        )

    def _question(self, problem: Sum) -> str:
        a, op, b = problem
        match self._spec.style:
            case PromptStyle.plain:
                return f"{a}{op}{b}="
            case PromptStyle.chat:
                return f"What is {a} {op} {b}? Answer with the number alone."
            case PromptStyle.few_shot:
                return f"What is {a}{op}{b}?"

    def _problem(self, split: str, problem: Sum) -> Problem:
        a, op, b = problem
        prompt = render(self._question(problem), self._spec, self._shots)
        return Problem(id=f"{split}:{a}{op}{b}", prompt=prompt, answer=str(solve(problem)))

    def train(self) -> Sequence[Problem]:
        return self._splits.train

    def evaluation(self) -> Sequence[Problem]:
        return self._splits.evaluation

    def examples(self) -> list[tuple[str, str]]:
        """(prompt, answer) of every training problem, for a supervised warm-up; never an evaluation problem.

        Raises ConfigError for chat prompts, which have no text of their own.
        """
        pairs = []
        for problem in self._splits.train:
            if not isinstance(problem.prompt, str):
                raise ConfigError("a supervised warm-up needs prompts that are text; use task.style=plain")
            pairs.append((problem.prompt, problem.answer))
        return pairs

    def reward(self, problem: Problem, response: str) -> float:
        text = answer_text(response, self._spec.style)
        if self._spec.style is PromptStyle.chat:
            found = INTEGER.findall(text)
            text = found[-1] if found else ""
        return float(text == problem.answer)

    def fingerprint(self) -> str:
        return self._splits.fingerprint()
