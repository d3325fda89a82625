"""Arithmetic: right answers, whole splits, no leak, rewards."""

from __future__ import annotations

import re

import pytest

from trimtab.config import compose
from trimtab.errors import ConfigError
from trimtab.spec import Difficulty, PromptStyle, TaskSpec
from trimtab.task import make_task
from trimtab.task.arithmetic import ArithmeticTask, draw, families, permuted

SPACES = {  # every problem there is, by brute force
    Difficulty.one_digit: {f"{a}+{b}" for a in range(10) for b in range(10)},
    Difficulty.two_digit: {f"{a}+{b}" for a in range(10, 100) for b in range(10, 100)},
    Difficulty.two_digit_mixed: {f"{a}{o}{b}" for a in range(10, 100) for o in "+-" for b in range(10, 100)},
    Difficulty.product: {f"{a}*{b}" for a in range(10) for b in range(10)},
}


def family(text: str) -> tuple[str, ...]:
    """A problem and its mirror image are one family; subtraction has no mirror image."""
    a, op, b = re.fullmatch(r"(\d+)([-+*])(\d+)", text).groups()
    return (a, op, b) if op == "-" else (op, *sorted((a, b)))


@pytest.mark.parametrize("difficulty", list(Difficulty))
def test_answers_are_right_and_no_family_is_in_both_splits(difficulty: Difficulty) -> None:
    task = make_task(TaskSpec(difficulty=difficulty))
    for problem in (*task.train(), *task.evaluation()):
        assert str(eval(problem.prompt.rstrip("="))) == problem.answer
    train = [p.prompt.rstrip("=") for p in task.train()]
    evaluation = [p.prompt.rstrip("=") for p in task.evaluation()]
    assert len(set(train)) == len(train) and len(set(evaluation)) == len(evaluation)
    assert not {family(t) for t in train} & {family(t) for t in evaluation}
    assert {p.id for p in task.train()}.isdisjoint(p.id for p in task.evaluation())


@pytest.mark.parametrize("difficulty", list(SPACES))
def test_all_problems_are_drawn_once(difficulty: Difficulty) -> None:
    drawn = [f"{a}{op}{b}" for members in families(difficulty) for a, op, b in members]
    assert len(drawn) == len(set(drawn)) and set(drawn) == SPACES[difficulty]


def test_permuted_is_a_permutation_read_lazily() -> None:
    import random

    assert sorted(permuted(50, random.Random(1))) == list(range(50))
    first = [x for x, _ in zip(permuted(10**9, random.Random(1)), range(5), strict=False)]
    assert len(set(first)) == 5


def test_sizes_as_asked_or_capped_to_what_exists() -> None:
    task = make_task(TaskSpec(train_size=4096, eval_size=256))
    assert (len(task.train()), len(task.evaluation())) == (4096, 256)
    small = make_task(TaskSpec(difficulty=Difficulty.one_digit))  # 100 problems: a fifth is held out
    assert len(small.evaluation()) == 20 and len(small.train()) in (79, 80)
    exact = make_task(TaskSpec(difficulty=Difficulty.one_digit, train_size=60, eval_size=40))
    assert len(exact.evaluation()) == 40 and len(exact.train()) in (59, 60)


def test_evaluation_does_not_change_with_the_training_size() -> None:
    assert draw(Difficulty.two_digit, 100, 64)[1] == draw(Difficulty.two_digit, 3000, 64)[1]


def test_same_index_same_problem_and_fingerprint_tells_data_apart() -> None:
    one, two = make_task(TaskSpec()), make_task(TaskSpec())
    assert one.train() == two.train() and one.fingerprint() == two.fingerprint()
    others = [
        TaskSpec(train_size=4095),
        TaskSpec(eval_size=255),
        TaskSpec(difficulty=Difficulty.two_digit_mixed),
        TaskSpec(style=PromptStyle.few_shot),
    ]
    prints = {make_task(s).fingerprint() for s in others} | {one.fingerprint()}
    assert len(prints) == 5


def test_the_first_problem_is_what_it_was() -> None:
    # Recorded runs refer to problems by index: the order may not drift.
    task = make_task(TaskSpec(train_size=4096))
    assert [p.prompt for p in (*task.train()[:2], task.evaluation()[0])] == ["80+68=", "31+27=", "40+71="]
    assert task.fingerprint().startswith("1c58c0a2")


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("46", 1.0), (" 46 ", 1.0), ("46\n", 1.0), ("046", 0.0), ("460", 0.0), ("46 46", 0.0), ("4 6", 0.0), ("", 0.0),
        ("+46", 0.0), ("46.", 0.0), ("٤٦", 0.0), ("\x00", 0.0), ("9" * 10000, 0.0),
    ],
)  # fmt: skip
def test_plain_reward_is_for_the_answer_alone(response: str, reward: float) -> None:
    from trimtab.batch import Problem

    task = make_task(TaskSpec())
    assert task.reward(Problem("x", "12+34=", "46"), response) == reward


def test_negative_answers_are_matched() -> None:
    task = make_task(TaskSpec(difficulty=Difficulty.two_digit_mixed))
    problem = next(p for p in task.train() if p.answer.startswith("-"))
    assert task.reward(problem, problem.answer) == 1.0
    assert task.reward(problem, problem.answer[1:]) == 0.0


def test_chat_prompts_and_their_reward() -> None:
    task = make_task(TaskSpec(style=PromptStyle.chat, system="Be brief."))
    problem = task.train()[0]
    assert [m["role"] for m in problem.prompt] == ["system", "user"]
    assert problem.prompt[0]["content"] == "Be brief."
    assert all(n in problem.prompt[1]["content"] for n in problem.id.removeprefix("train:").split("+"))
    a = problem.answer
    assert [task.reward(problem, r) for r in (a, f"The answer is {a}.", f"{a}, or 1", "none")] == [1.0, 1.0, 0.0, 0.0]


def test_few_shot_examples_are_right_and_in_neither_split() -> None:
    spec = TaskSpec(style=PromptStyle.few_shot, shots=3, train_size=50, eval_size=20)
    task = make_task(spec)
    shown = re.findall(r"Q: What is (\d+)\+(\d+)\?\nA: (\d+)\n\n", task.train()[0].prompt)
    assert len(shown) == 3 and all(int(a) + int(b) == int(c) for a, b, c in shown)
    ids = {p.id.split(":")[1] for p in (*task.train(), *task.evaluation())}
    assert not ids & {f"{a}+{b}" for a, b, _ in shown}
    assert len(task.train()) == 50 and task.train()[0].prompt.endswith("?\nA:")
    problem = task.train()[0]
    assert task.reward(problem, f" {problem.answer}\nQ: What is 1+1?") == 1.0
    assert task.reward(problem, f" 1\n{problem.answer}") == 0.0


def test_few_shot_stops_at_a_line_end_unless_told_otherwise() -> None:
    assert compose(["task.style=few_shot"]).task.stop == "\n"
    assert compose(["task.style=few_shot", "task.stop=';'"]).task.stop == ";"
    assert compose([]).task.stop is None


def test_warm_up_examples_come_from_the_training_split_alone() -> None:
    task = ArithmeticTask(TaskSpec())
    examples = task.examples()
    assert examples == [(p.prompt, p.answer) for p in task.train()]
    assert not {p for p, _ in examples} & {p.prompt for p in task.evaluation()}
    with pytest.raises(ConfigError, match=r"task\.style=plain"):
        ArithmeticTask(TaskSpec(style=PromptStyle.chat)).examples()


def test_nothing_left_to_train_on_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.train_size"):
        make_task(TaskSpec(train_size=0))
    with pytest.raises(ConfigError, match=r"task\.shots=100"):
        make_task(TaskSpec(difficulty=Difficulty.product, style=PromptStyle.few_shot, shots=100))
