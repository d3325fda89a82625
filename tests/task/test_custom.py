"""A user's own task: what works, and what is refused before anything is trained."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from trimtab.errors import ConfigError, DataError
from trimtab.spec import TaskName, TaskSpec
from trimtab.task import make_task
from trimtab.task.custom import CustomTask

GOOD = """
from trimtab.batch import Problem

class Echo:
    def __init__(self, size=3, *, word="a"):
        self.size, self.word = size, word
    def train(self):
        return [Problem(f"t{i}", f"{self.word}{i}", str(i)) for i in range(self.size)]
    def evaluation(self):
        return [Problem("e", "z", "z")]
    def reward(self, problem, response):
        return response == problem.answer

def make(size=2):
    return Echo(size)

def nothing():
    return None

class NoReward:
    def train(self): return []
    def evaluation(self): return []

class BadReward(Echo):
    def reward(self, response): return 1.0

class NanReward(Echo):
    def reward(self, problem, response): return float("nan")

class TextReward(Echo):
    def reward(self, problem, response): return "1"

class WideReward(Echo):
    def reward(self, problem, response): return float(response)

class HugeReward(Echo):
    def reward(self, problem, response): return -10 ** int(response)

class RaisingReward(Echo):
    def reward(self, problem, response): return 1 / 0

class Surrogate(Echo):
    def train(self): return [Problem("t", "a", "\\ud800")]

class ChatSurrogate(Echo):
    def evaluation(self): return [Problem("e", [{"role": "user", "content": "a\\udfff"}], "")]

class Extra(Echo):
    def __init__(self, extra): self.extra = extra
    def train(self): return [Problem("t", "a", "0", extra=self.extra)]

class Generator(Echo):
    def train(self): return iter(())

class Dicts(Echo):
    def train(self): return [{"prompt": "x"}]

class Twice(Echo):
    def train(self): return super().train() * 2

class Leak(Echo):
    def evaluation(self): return [Problem("e", "a0", "0")]

number = 3
"""
COUNT = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, under a name never imported before."""
    name = f"users_task_{next(COUNT)}"
    (tmp_path / f"{name}.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    return name


def spec(path: str, **options: object) -> TaskSpec:
    return TaskSpec(name=TaskName.custom, path=path, options=options)


def test_a_class_with_options(module: str) -> None:
    task = make_task(spec(f"{module}:Echo", size=2, word="b"))
    assert [p.prompt for p in task.train()] == ["b0", "b1"]
    assert [p.id for p in task.evaluation()] == ["e"]
    assert task.reward(task.train()[1], "1") == 1.0 and task.reward(task.train()[1], "x") == 0.0
    assert task.fingerprint() != make_task(spec(f"{module}:Echo", size=3)).fingerprint()


def test_a_function(module: str) -> None:
    assert len(make_task(spec(f"{module}:make")).train()) == 2


def test_what_is_evaluated_is_not_trained_on(module: str) -> None:
    assert [p.prompt for p in make_task(spec(f"{module}:Leak")).train()] == ["a1", "a2"]


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("missing", {}, ConfigError, "has no missing; it has .*Echo"),
        ("number", {}, ConfigError, "number is a int; it must be a class or a function"),
        ("Echo", {"colour": 1}, ConfigError, "unexpected keyword argument 'colour'; see task.options"),
        ("nothing", {}, ConfigError, r"NoneType without train\(\) and evaluation\(\) and reward\(problem, response\)"),
        ("NoReward", {}, ConfigError, r"without reward\(problem, response\)"),
        ("BadReward", {}, ConfigError, r"reward\(response\) cannot be called as reward\(problem, response\)"),
        ("Generator", {}, ConfigError, r"train\(\) must return a list of Problem"),
        ("Dicts", {}, DataError, r"train\(\)\[0\] must be a trimtab.batch.Problem, got \{'prompt'"),
        ("Surrogate", {}, DataError, r"train\(\)\[0\]: 'answer' holds '\\ud800' at character 0"),
        ("ChatSurrogate", {}, DataError, r"evaluation\(\)\[0\]: 'prompt' holds '\\udfff' at character 1"),
        ("Twice", {}, DataError, r"train\(\)\[3\] repeats the id 't0'"),
    ],
)
def test_refusals(module: str, name: str, options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_task(spec(f"{module}:{name}", **options))


@pytest.mark.parametrize("name", ["NanReward", "TextReward"])
def test_a_reward_that_is_not_a_finite_number(module: str, name: str) -> None:
    task = make_task(spec(f"{module}:{name}"))
    with pytest.raises(DataError, match=r"problem t0: .*finite number"):
        task.reward(task.train()[0], "x")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("WideReward", "3.4e38", "1e39"), ("WideReward", "-3.4e38", "-inf"), ("HugeReward", "38", "400")],
)
def test_a_reward_must_be_finite_in_float32(module: str, name: str, good: str, bad: str) -> None:
    task = make_task(spec(f"{module}:{name}"))
    assert abs(task.reward(task.train()[0], good)) in (3.4e38, 1e38)
    with pytest.raises(DataError, match=r"problem t0: .*finite number.*float32"):
        task.reward(task.train()[0], bad)


def test_a_reward_that_raises_names_the_problem_and_keeps_its_traceback(module: str) -> None:
    task = make_task(spec(f"{module}:RaisingReward"))
    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        task.reward(task.train()[1], "x")
    assert caught.value.__notes__ == [f"task.path={module}:RaisingReward: reward() raised this for problem 't1'"]
    assert caught.traceback[-1].path.stem == module


def test_the_fingerprint_follows_extra_data(module: str) -> None:
    def fingerprint(extra: object) -> str:
        return CustomTask(
            TaskSpec(name=TaskName.custom, path=f"{module}:Extra", options={"extra": extra})
        ).fingerprint()

    class Opaque:
        pass

    one = {"b": {3, 1, 2}, "a": [1.5, None, (True, "x")], 3: Opaque(), (1, 2): Opaque()}
    same = {(1, 2): Opaque(), 3: Opaque(), "a": [1.5, None, (True, "x")], "b": {2, 3, 1}}
    assert fingerprint(one) == fingerprint(same)
    others = [None, {}, {"a": 1}, {"a": 2}, {"a": "1"}, {"a": {"b": [1]}}, {"a": {"b": [2]}}, {"b": 1}]
    assert len({fingerprint(extra) for extra in [one, *others]}) == 9


@pytest.mark.parametrize("path", [None, "", "a", "a:", ":b"])
def test_a_path_that_is_none(path: str | None) -> None:
    with pytest.raises(ConfigError, match=r"task\.path=package\.module:name"):
        make_task(TaskSpec(name=TaskName.custom, path=path))


def test_modules_that_cannot_be_imported(module: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot import no_such_module_here"):
        make_task(spec("no_such_module_here:x"))
    (tmp_path / f"{module}_bad.py").write_text("def (")
    with pytest.raises(ConfigError, match=f"cannot import {module}_bad"):
        make_task(spec(f"{module}_bad:x"))
