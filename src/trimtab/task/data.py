"""What every task shares: the two splits, their overlap, their fingerprint; checks of texts and rewards."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Rational, Real
from types import TracebackType
from typing import Any

from trimtab.batch import Problem
from trimtab.errors import DataError

log = logging.getLogger(__name__)

SURROGATE = re.compile("[\ud800-\udfff]")
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
LARGEST = 3.4028234663852886e38  # of float32, in which a batch holds its rewards


@dataclass(frozen=True)
class Splits:
    """Problems to train on and problems to evaluate on; none of the second is among the first."""

    train: tuple[Problem, ...]
    evaluation: tuple[Problem, ...]

    def fingerprint(self) -> str:
        """SHA-256 (hex) over id, prompt, answer and extra (if any) of every problem, split by split, in order."""
        digest = hashlib.sha256()
        for name, problems in (("train", self.train), ("evaluation", self.evaluation)):
            digest.update(f"{name} {len(problems)}\n".encode())
            for problem in problems:
                fields: list[Any] = [problem.id, problem.prompt, problem.answer]
                if problem.extra is not None:
                    fields.append(canonical(problem.extra))
                line = json.dumps(fields, sort_keys=True)
                digest.update(line.encode() + b"\n")
        return digest.hexdigest()


def canonical(value: Any) -> Any:
    """``value`` as JSON can hold it, the same in every process: sets are sorted, objects told by their text."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {key if isinstance(key, str) else as_text(key): canonical(item) for key, item in value.items()}
        case list() | tuple():
            return [canonical(item) for item in value]
        case set() | frozenset():
            return sorted((canonical(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    return as_text(value)


def as_text(value: Any) -> str:
    """``str(value)`` without memory addresses, which differ from process to process."""
    return ADDRESS.sub("", str(value))


def check_text(where: str, name: str, text: Any) -> None:
    """DataError for text with a lone surrogate, which no tokenizer and no file takes; other values pass."""
    found = SURROGATE.search(text) if isinstance(text, str) else None
    if found:
        raise DataError(
            f"{where}: {name!r} holds {found[0]!r} at character {found.start()}, half of a surrogate pair and no "
            "character of its own; mend or drop this text"
        )


def check_prompt(where: str, name: str, prompt: str | Sequence[Mapping[str, Any]]) -> None:
    """``check_text`` of a prompt: a text, or the texts of its messages."""
    texts = [prompt] if isinstance(prompt, str) else [t for m in prompt if isinstance(m, Mapping) for t in m.values()]
    for text in texts:
        check_text(where, name, text)


def checked_reward(problem: Problem, value: Any) -> float:
    """``value`` as a float; DataError naming the problem unless it is a number that is finite in float32."""
    if isinstance(value, Real):
        number: Any = value if isinstance(value, Rational) else float(value)  # an int may be too large for a float
        if -LARGEST <= number <= LARGEST:
            return float(number)
    raise DataError(
        f"problem {problem.id}: reward() must return a finite number (in float32: up to 3.4e38), got {short(value)}"
    )


def short(value: Any) -> str:
    """A value for a message; Python refuses to write out very long ints."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"an int of {value.bit_length()} bits"
    return f"{value!r:.80}"


class NamesProblem:
    """``with NamesProblem(where, problem):`` adds both to an error of reward(), which passes through unchanged."""

    def __init__(self, where: str, problem: Problem) -> None:
        self.where, self.problem = where, problem

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception):
            error.add_note(f"{self.where}: reward() raised this for problem {self.problem.id!r}")


def prompt_key(problem: Problem) -> str:
    """A problem's prompt as one string, equal exactly when the prompts are."""
    return json.dumps(problem.prompt, sort_keys=True)


def split(train: Iterable[Problem], evaluation: Sequence[Problem], where: str) -> Splits:
    """Splits without overlap: problems whose prompt is evaluated are taken out of training, and that is said.

    Raises DataError when nothing is left to train on; ``where`` names the data in messages.
    """
    held_out = {prompt_key(p) for p in evaluation}
    given = tuple(train)
    kept = tuple(p for p in given if prompt_key(p) not in held_out)
    if len(kept) < len(given):
        log.warning("%s: %d training problems are also evaluated and were left out", where, len(given) - len(kept))
    if not kept:
        raise DataError(
            f"{where}: no problem is left to train on ({len(given)} given, {len(evaluation)} of all kept for "
            "evaluation); give more data or lower task.eval_size"
        )
    return Splits(kept, tuple(evaluation))


def hold_out(problems: Sequence[Problem], eval_size: int) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """(the rest, the last ``eval_size``) of ``problems``."""
    cut = max(len(problems) - eval_size, 0)
    return problems[:cut], problems[cut:]
