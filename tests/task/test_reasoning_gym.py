"""reasoning-gym: its generators and its verifiers through the task protocol."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest

from trimtab.errors import ConfigError, DataError
from trimtab.spec import PromptStyle, TaskName, TaskSpec
from trimtab.task import make_task

gym = pytest.importorskip("reasoning_gym")


def spec(generator: str | None, **changes: object) -> TaskSpec:
    return TaskSpec(
        **{"name": TaskName.reasoning_gym, "generator": generator, "train_size": 40, "eval_size": 15} | changes
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries made in this process: a child takes a second to import the library."""

    def entries(name: str, options: dict[str, Any], draws: list[tuple[int, int]]) -> list[list[dict[str, Any]]]:
        return [[gym.create_dataset(name, seed=s, size=n, **options)[i] for i in range(n)] for s, n in draws]

    monkeypatch.setattr("trimtab.task.reasoning_gym.entries", entries)


def test_problems_are_the_generators_own_and_its_verifier_judges() -> None:
    task = make_task(spec("chain_sum", options={"min_terms": 2, "max_terms": 2}))
    dataset = gym.create_dataset("chain_sum", seed=0, size=40, min_terms=2, max_terms=2)
    assert [(p.prompt, p.answer) for p in task.train()] == [(e["question"], e["answer"]) for e in dataset]
    first = task.train()[0]
    assert task.reward(first, f" {first.answer}\n") == 1.0
    assert task.reward(first, f"hm <answer>{first.answer}</answer> yes") == 1.0
    wrong = str(int(first.answer) + 1)
    assert task.reward(first, wrong) == dataset.score_answer(wrong, dataset[0]) < 1.0


@pytest.mark.usefixtures("here")
def test_splits_do_not_overlap_even_in_a_tiny_space() -> None:
    task = make_task(spec("chain_sum", options={"min_terms": 2, "max_terms": 2, "max_digits": 1}, train_size=300))
    train, evaluation = ({p.prompt for p in s} for s in (task.train(), task.evaluation()))
    assert train and evaluation and not train & evaluation
    assert len(train) == len(task.train())


@pytest.mark.usefixtures("here")
def test_same_spec_same_data() -> None:
    assert make_task(spec("gcd")).fingerprint() == make_task(spec("gcd")).fingerprint()
    assert make_task(spec("gcd")).fingerprint() != make_task(spec("gcd", train_size=39)).fingerprint()


OTHER_PROCESS = """
from trimtab.spec import TaskName, TaskSpec
from trimtab.task import make_task
for name in ("ransom_note", "list_functions"):
    print(make_task(TaskSpec(name=TaskName.reasoning_gym, generator=name, train_size=4, eval_size=2)).fingerprint())
"""


@pytest.mark.slow
def test_every_process_gets_the_same_problems() -> None:
    # Left alone, the first of these generators follows the hash seed and the second the global random state.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    call = [sys.executable, "-c", OTHER_PROCESS]
    runs = [subprocess.run(call, env=env | {"PYTHONHASHSEED": s}, capture_output=True, check=True) for s in ("1", "2")]
    assert runs[0].stdout == runs[1].stdout and runs[0].stdout.count(b"\n") == 2


@pytest.mark.parametrize("text", ["", "\x00", "9**9**9**9", "(" * 3000, "x = 1/0", "\ud800", "__import__('os')"])
@pytest.mark.parametrize("name", ["simple_equations", "countdown", "basic_arithmetic", "polynomial_equations"])
@pytest.mark.usefixtures("here")
def test_odd_texts_never_raise_or_hang(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.task.reasoning_gym.SECONDS", 0.3)
    task = make_task(spec(name, train_size=2, eval_size=1))
    assert 0.0 <= task.reward(task.train()[0], text) < 1.0


@pytest.mark.usefixtures("here")
def test_chat_and_few_shot_prompts() -> None:
    plain = make_task(spec("gcd"))
    chat = make_task(spec("gcd", style=PromptStyle.chat))
    assert chat.train()[0].prompt == [{"role": "user", "content": plain.train()[0].prompt}]
    shots = make_task(spec("gcd", style=PromptStyle.few_shot, shots=1))
    first = plain.train()[0]
    assert shots.train()[0].prompt == f"Q: {first.prompt}\nA: {first.answer}\n\nQ: {plain.train()[1].prompt}\nA:"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generator": None}, "task.generator=NAME"),
        ({"generator": "chain_sums"}, "chain_sums is unknown; near it: chain_sum"),
        ({"generator": "gcd", "options": {"colour": 1}}, "refuses .*colour.*its options are .*min_numbers"),
        ({"generator": "gcd", "options": {"min_numbers": -1}}, "refuses"),
        ({"generator": "gcd", "options": {"seed": 3}}, r"task\.options\.seed is set by trimtab"),
    ],
)
def test_refusals(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(spec(**changes))


@pytest.mark.usefixtures("here")
def test_a_score_that_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(spec("gcd", train_size=2, eval_size=1))
    monkeypatch.setattr(task._generator, "score_answer", lambda text, entry: math.inf)
    with pytest.raises(DataError, match=r"problem train:0: .*finite number"):
        task.reward(task.train()[0], "1")


@pytest.mark.usefixtures("here")
def test_an_error_that_is_none_of_the_texts_names_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str, entry: object) -> float:
        raise OSError("no words")

    task = make_task(spec("gcd", train_size=2, eval_size=1))
    monkeypatch.setattr(task._generator, "score_answer", broken)
    with pytest.raises(OSError, match="no words") as caught:
        task.reward(task.train()[0], "1")
    assert caught.value.__notes__ == ["task.generator=gcd: reward() raised this for problem 'train:0'"]
