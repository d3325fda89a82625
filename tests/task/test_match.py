"""Comparing a response with the answer: values, and no text that raises or hangs."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import ConfigError
from trimtab.spec import Match, TaskSpec
from trimtab.task.limit import JudgeTimeout, time_limit
from trimtab.task.match import make_matcher


def test_exact() -> None:
    judge = make_matcher(TaskSpec())
    assert [judge(t, "a b") for t in ("a b", " a b\n", "a  b", "A b", "")] == [1, 1, 0, 0, 0]


def test_regex_takes_the_first_group_of_the_last_match() -> None:
    judge = make_matcher(TaskSpec(match=Match.regex, pattern=r"#### (-?\d+)(%)?"))
    texts = ("so #### 7", "#### 6 no, #### 7%", "#### 7 no, #### 6", "7", "")
    assert [judge(t, "7") for t in texts] == [1, 1, 0, 0, 0]


def test_regex_with_a_group_that_took_no_part() -> None:
    judge = make_matcher(TaskSpec(match=Match.regex, pattern=r"x(\d)?"))
    assert judge("x", "1") == 0.0


def test_a_pattern_that_backtracks_without_end_gives_0_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.task.match.SECONDS", 1)
    judge = make_matcher(TaskSpec(match=Match.regex, pattern=r"(a+)+$"))
    began = time.monotonic()
    assert judge("a" * 40 + "b", "a") == 0.0
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TaskSpec(match=Match.regex), r"task\.pattern="),
        (TaskSpec(match=Match.regex, pattern="("), "not a regular expression"),
        (TaskSpec(match=Match.regex, pattern="a"), "no group"),
        (TaskSpec(match=Match.exact, pattern="(a)"), "task.match=regex"),
    ],
)
def test_bad_patterns_are_refused(spec: TaskSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_matcher(spec)


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        ("The answer is $x^2 + 2x + 1$", "$(x+1)^2$", 1.0),
        ("so it is 42", "42", 1.0),
        ("so it is 41", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_math_verify(text: str, answer: str, reward: float) -> None:
    pytest.importorskip("math_verify")
    assert make_matcher(TaskSpec(match=Match.math_verify))(text, answer) == reward


def test_math_verify_outside_the_main_thread() -> None:
    pytest.importorskip("math_verify")
    judge = make_matcher(TaskSpec(match=Match.math_verify))
    got: list[float] = []
    thread = threading.Thread(target=lambda: got.extend([judge("$0.5$", "$1/2$"), judge("1", "2")]))
    thread.start()
    thread.join()
    assert got == [1.0, 0.0]


ODD = [
    "\x00",
    "\\frac{",
    "$" * 500,
    "9**9**9**9",
    "\\boxed{9^{9^{9^{9}}}}",
    "(" * 2000,
    "1/0",
    "nan",
    "\ud800",
    "\\int",
]


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_odd_texts_get_0_from_every_match(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setattr("trimtab.task.match.SECONDS", 1)
    for spec in (TaskSpec(), TaskSpec(match=Match.regex, pattern=r"(\d+)"), TaskSpec(match=Match.math_verify)):
        assert make_matcher(spec)(text, "123456") == 0.0


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(), max_size=40))
def test_no_text_raises(text: str) -> None:
    for spec in (TaskSpec(), TaskSpec(match=Match.regex, pattern=r"(.)$")):
        assert make_matcher(spec)(text, "\x07!") in (0.0, 1.0)


def test_time_limit_ends_a_loop_and_leaves_no_alarm() -> None:
    with pytest.raises(JudgeTimeout), time_limit(0.05):
        while True:
            pass
    with time_limit(0.05):
        pass
    time.sleep(0.1)  # an alarm left behind would end the process
