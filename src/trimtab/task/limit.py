"""A time limit on code that judges a model's text: a response such as ``9**9**9`` must not hang a run."""

from __future__ import annotations

import re
import signal
import threading
import tokenize
from contextlib import contextmanager
from types import FrameType
from typing import Iterator

# What parsers and verifiers are seen to raise on odd text. Reward 0 for any of them; other errors are defects.
TEXT_ERRORS = (
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
    AttributeError,
    NameError,
    SyntaxError,
    AssertionError,
    RuntimeError,  # with RecursionError and NotImplementedError
    MemoryError,
    re.error,
    tokenize.TokenError,
)


class JudgeTimeout(RuntimeError):
    """Judging one response took too long."""


def in_main_thread() -> bool:
    """Whether signals can be used here."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise JudgeTimeout in the block after ``seconds``; outside the main thread, where signals cannot, no limit."""
    if not in_main_thread():
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise JudgeTimeout(f"judging a response took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
