"""Any generator of the reasoning-gym library by name, with its own verifier as the reward."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any, Sequence

from trimtab.batch import Problem
from trimtab.errors import ConfigError, DataError
from trimtab.spec import PromptStyle, TaskSpec
from trimtab.task.data import Splits, split
from trimtab.task.limit import TEXT_ERRORS, time_limit
from trimtab.task.prompts import answer_text, render

try:
    import reasoning_gym as gym
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.utils import extract_answer
except ImportError as error:
    raise ConfigError("task=reasoning_gym needs the package: pip install reasoning-gym") from error

# Generators seed item i with seed + i, so neighbouring seeds would share almost all of their items.
TRAIN_SEED, EVAL_SEED = 0, 1_500_000_001
SECONDS = 2.0  # for one verdict


def make_generator(name: str | None, options: dict[str, Any], seed: int, size: int) -> Any:
    """A generator; ConfigError for an unknown name (with close ones) or options it refuses."""
    if name is None:
        raise ConfigError("task=reasoning_gym needs a generator: task.generator=NAME, for example chain_sum")
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise ConfigError(f"task.generator={name} is unknown; near it: {', '.join(near)}")
    taken = sorted({"seed", "size"} & set(options))
    if taken:
        raise ConfigError(f"task.options.{taken[0]} is set by trimtab; use task.train_size and task.eval_size")
    allowed = sorted({f.name for f in fields(DATASETS[name][1])} - {"seed", "size"})
    try:
        return gym.create_dataset(name, seed=seed, size=size, **options)
    except TEXT_ERRORS as error:
        raise ConfigError(
            f"task.generator={name} refuses task.options={options}: {error}; its options are {', '.join(allowed)}"
        ) from error


class ReasoningGymTask:
    """Generated puzzles. The reward is the verifier's score, which may lie between 0 and 1.

    What is judged is the text in ``<answer>…</answer>`` if there is one, else the whole response.
    """

    def __init__(self, spec: TaskSpec) -> None:
        self._spec = spec
        few = spec.shots if spec.style is PromptStyle.few_shot else 0
        evaluation = self._draw("eval", EVAL_SEED, spec.eval_size)
        train = self._draw("train", TRAIN_SEED, spec.train_size + few)
        clean = split(train, evaluation, f"task.generator={spec.generator}")
        shots = [(str(p.prompt), p.answer) for p in clean.train[:few]]  # worked examples belong to neither split
        if len(clean.train) <= few:
            raise DataError(f"task.generator={spec.generator}: task.shots={few} leaves no problem to train on")
        self._splits = Splits(
            tuple(self._styled(p, shots) for p in clean.train[few:]),
            tuple(self._styled(p, shots) for p in clean.evaluation),
        )

    def _draw(self, name: str, seed: int, size: int) -> list[Problem]:
        """Up to ``size`` problems with distinct questions."""
        if size < 1:
            return []
        self._generator = make_generator(self._spec.generator, dict(self._spec.options), seed, size)
        found: dict[str, Problem] = {}
        for index in range(size):
            entry = self._generator[index]
            question = entry["question"]
            if question not in found:
                found[question] = Problem(f"{name}:{index}", question, str(entry["answer"]), extra=entry)
        return list(found.values())

    def _styled(self, problem: Problem, shots: Sequence[tuple[str, str]]) -> Problem:
        return Problem(problem.id, render(problem.prompt, self._spec, shots), problem.answer, problem.extra)

    def train(self) -> Sequence[Problem]:
        return self._splits.train

    def evaluation(self) -> Sequence[Problem]:
        return self._splits.evaluation

    def reward(self, problem: Problem, response: str) -> float:
        tagged = extract_answer(response)
        text = tagged if tagged is not None else answer_text(response, self._spec.style)
        try:
            with time_limit(SECONDS):
                return float(self._generator.score_answer(text, dict(problem.extra or {})))
        except TEXT_ERRORS:
            return 0.0

    def fingerprint(self) -> str:
        return self._splits.fingerprint()
