"""The user's own task, by import path: ``task.path=package.module:name``.

``name`` is a class or function that takes ``task.options`` as keyword arguments and returns an object with

    train() -> sequence of trimtab.batch.Problem
    evaluation() -> sequence of trimtab.batch.Problem
    reward(problem, response: str) -> float

All of it is checked before anything is trained. Errors inside the user's code are not hidden;
those of reward() say which problem it was.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any, Callable, Sequence

from trimtab.batch import Problem
from trimtab.errors import ConfigError, DataError
from trimtab.spec import TaskSpec
from trimtab.task.data import NamesProblem, Splits, check_prompt, check_text, checked_reward, split

METHODS = {"train": (), "evaluation": (), "reward": ("problem", "response")}


def locate(path: str | None) -> Callable[..., Any]:
    """The object that ``package.module:name`` names; the current folder is importable."""
    module_name, colon, name = (path or "").partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"task.path={path}: task=custom needs an import path, task.path=package.module:name")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a sweep's copy of the module comes first
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"task.path={path}: cannot import {module_name} (looked in {here} too): {error}") from error
    if name not in vars(module):
        public = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))) or "nothing"
        raise ConfigError(f"task.path={path}: {module_name} has no {name}; it has {public}")
    found = vars(module)[name]
    if not callable(found):
        raise ConfigError(f"task.path={path}: {name} is a {type(found).__name__}; it must be a class or a function")
    return found


def check_call(path: str | None, what: str, call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """ConfigError when ``call`` cannot be called like that."""
    try:
        signature = inspect.signature(call)
    except (ValueError, TypeError):  # written in C: nothing to look at
        return
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        wanted = ", ".join([*args, *(f"{k}=…" for k in options)])
        raise ConfigError(
            f"task.path={path}: {what}{signature} cannot be called as {what}({wanted}): {error}"
            + ("; see task.options" if options or not args else "")
        ) from error


def problems_of(path: str | None, method: str, found: Any) -> tuple[Problem, ...]:
    """The problems a user's method returned, checked: type, distinct ids, something to ask."""
    if not isinstance(found, Sequence):
        raise ConfigError(f"task.path={path}: {method}() must return a list of Problem, got a {type(found).__name__}")
    seen: set[str] = set()
    for i, problem in enumerate(found):
        if not isinstance(problem, Problem):
            raise DataError(f"task.path={path}: {method}()[{i}] must be a trimtab.batch.Problem, got {problem!r:.80}")
        check_text(f"task.path={path}: {method}()[{i}]", "id", problem.id)
        check_text(f"task.path={path}: {method}()[{i}]", "answer", problem.answer)
        check_prompt(f"task.path={path}: {method}()[{i}]", "prompt", problem.prompt)
        if problem.id in seen:
            raise DataError(f"task.path={path}: {method}()[{i}] repeats the id {problem.id!r}")
        if not problem.prompt:
            raise DataError(f"task.path={path}: problem {problem.id!r} of {method}() has an empty prompt")
        seen.add(problem.id)
    return tuple(found)


class CustomTask:
    """Adapter around the user's object; it keeps the splits apart and checks every reward."""

    def __init__(self, spec: TaskSpec) -> None:
        self._where = f"task.path={spec.path}"
        factory = locate(spec.path)
        options = {str(k): v for k, v in spec.options.items()}
        check_call(spec.path, str(spec.path).rpartition(":")[2], factory, **options)
        self._task = factory(**options)
        methods = dict(inspect.getmembers(self._task, callable))
        missing = [f"{name}({', '.join(args)})" for name, args in METHODS.items() if name not in methods]
        if missing:
            raise ConfigError(
                f"task.path={spec.path} gave a {type(self._task).__name__} without {' and '.join(missing)}; "
                "a task has train(), evaluation() and reward(problem, response)"
            )
        for name, args in METHODS.items():
            check_call(spec.path, name, methods[name], *args)
        self._splits: Splits = split(
            problems_of(spec.path, "train", self._task.train()),
            problems_of(spec.path, "evaluation", self._task.evaluation()),
            self._where,
        )

    def train(self) -> Sequence[Problem]:
        return self._splits.train

    def evaluation(self) -> Sequence[Problem]:
        return self._splits.evaluation

    def reward(self, problem: Problem, response: str) -> float:
        with NamesProblem(self._where, problem):
            value = self._task.reward(problem, response)
        return checked_reward(problem, value)

    def fingerprint(self) -> str:
        return self._splits.fingerprint()
