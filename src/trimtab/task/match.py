"""How a response is compared with the known answer: exact, regular expression, or math-verify."""

from __future__ import annotations

import re
from typing import Callable

from trimtab.errors import ConfigError
from trimtab.spec import Match, TaskSpec
from trimtab.task.limit import TEXT_ERRORS, in_main_thread, time_limit

Matcher = Callable[[str, str], float]  # (judged text, answer) -> 0 or 1
SECONDS = 2  # per response


def make_matcher(spec: TaskSpec) -> Matcher:
    """The comparison of ``task.match``; it never raises for any text.

    Raises ConfigError for a pattern that is missing, not used, not valid or without a group.
    """
    if spec.match is not Match.regex and spec.pattern is not None:
        raise ConfigError(f"task.pattern is not used by task.match={spec.match.value}; drop it or set task.match=regex")
    match spec.match:
        case Match.exact:
            return exact
        case Match.regex:
            return regex(spec.pattern)
        case Match.math_verify:
            return math_verify()


def exact(text: str, answer: str) -> float:
    """1 if both are equal without the white space around them."""
    return float(text.strip() == answer.strip())


def regex(pattern: str | None) -> Matcher:
    """1 if the first group of the last match of ``pattern`` equals the answer, white space aside."""
    if pattern is None:
        raise ConfigError(r"task.match=regex needs a pattern with one group, such as task.pattern='#### (-?\d+)'")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"task.pattern={pattern!r} is not a regular expression: {error}") from error
    if compiled.groups < 1:
        raise ConfigError(f"task.pattern={pattern!r} has no group; put the answer's part in parentheses")

    def judge(text: str, answer: str) -> float:
        try:
            with time_limit(SECONDS):
                groups = [found.group(1) for found in compiled.finditer(text)]
        except TEXT_ERRORS:
            return 0.0
        return exact(groups[-1] or "", answer) if groups else 0.0

    return judge


def math_verify() -> Matcher:
    r"""1 if math-verify finds text and answer equal as mathematics (``\frac12`` equals ``0.5``)."""
    try:
        from math_verify import parse, verify
        from math_verify.errors import TimeoutException
    except ImportError as error:
        raise ConfigError("task.match=math_verify needs the package: pip install 'math-verify'") from error

    def judge(text: str, answer: str) -> float:
        # Its own limit works by signals, which only the main thread may set.
        seconds = SECONDS if in_main_thread() else None
        try:
            gold = parse(answer, parsing_timeout=seconds)
            target = parse(text, parsing_timeout=seconds)
            return float(verify(gold, target, timeout_seconds=seconds))
        except (*TEXT_ERRORS, TimeoutException):
            return 0.0

    return judge
