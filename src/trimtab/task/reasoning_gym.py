"""Any generator of the reasoning-gym library by name, with its own verifier as the reward."""

from __future__ import annotations

import difflib
import os
import pickle
import subprocess
import sys
from dataclasses import fields
from typing import Any, Sequence

from trimtab.batch import Problem
from trimtab.errors import ConfigError, DataError
from trimtab.spec import PromptStyle, TaskSpec
from trimtab.task.data import NamesProblem, Splits, checked_reward, split
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


# Some generators iterate over sets of text, whose order changes with each process, and some draw from Python's global
# random state. A resumed run needs the same problems, so they are made in a process where both are fixed.
CHILD = """
import pickle, random, sys
import reasoning_gym
name, options, draws = pickle.load(sys.stdin.buffer)
made = []
for seed, size in draws:
    random.seed(seed)
    generator = reasoning_gym.create_dataset(name, seed=seed, size=size, **options) if size else ()
    made.append([generator[i] for i in range(size)])
pickle.dump(made, sys.stdout.buffer)
"""


def entries(name: str | None, options: dict[str, Any], draws: Sequence[tuple[int, int]]) -> list[list[dict[str, Any]]]:
    """The generator's entries for each (seed, size), the same in every process.

    Raises ConfigError with the generator's own last line when it fails.
    """
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    given = pickle.dumps((name, options, list(draws)))
    child = subprocess.run([sys.executable, "-c", CHILD], input=given, capture_output=True, env=env, check=False)
    if child.returncode != 0:
        said = child.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise ConfigError(f"task.generator={name} with task.options={options} fails to generate: {said[0]}")
    return pickle.loads(child.stdout)


def distinct(name: str, found: Sequence[dict[str, Any]]) -> list[Problem]:
    """Problems of entries, the first of each question."""
    problems: dict[str, Problem] = {}
    for index, entry in enumerate(found):
        question = entry["question"]
        problems.setdefault(question, Problem(f"{name}:{index}", question, str(entry["answer"]), extra=entry))
    return list(problems.values())


class ReasoningGymTask:
    """Generated puzzles. The reward is the verifier's score, which may lie between 0 and 1.

    What is judged is the text in ``<answer>…</answer>`` if there is one, else the whole response.
    """

    def __init__(self, spec: TaskSpec) -> None:
        self._spec = spec
        few = spec.shots if spec.style is PromptStyle.few_shot else 0
        options = dict(spec.options)
        draws = [(TRAIN_SEED, spec.train_size + few), (EVAL_SEED, spec.eval_size)]
        self._generator = make_generator(spec.generator, options, TRAIN_SEED, max(draws[0][1], 1))
        train, evaluation = entries(spec.generator, options, draws)
        clean = split(distinct("train", train), distinct("eval", evaluation), f"task.generator={spec.generator}")
        shots = [(str(p.prompt), p.answer) for p in clean.train[:few]]  # worked examples belong to neither split
        if len(clean.train) <= few:
            raise DataError(f"task.generator={spec.generator}: task.shots={few} leaves no problem to train on")
        self._splits = Splits(
            tuple(self._styled(p, shots) for p in clean.train[few:]),
            tuple(self._styled(p, shots) for p in clean.evaluation),
        )

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
            with NamesProblem(f"task.generator={self._spec.generator}", problem), time_limit(SECONDS):
                score = float(self._generator.score_answer(text, dict(problem.extra or {})))
        except TEXT_ERRORS:
            return 0.0
        return checked_reward(problem, score)

    def fingerprint(self) -> str:
        return self._splits.fingerprint()
