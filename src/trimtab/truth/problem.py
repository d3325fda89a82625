"""A policy small enough that every sequence it can write is listed; also as a JSON file (``--problem``)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import DataError

MOST_TOKENS = 1_000_000
"""Tokens of all sequences of all prompts that are still enumerated."""

Word = tuple[int, ...]
"""Symbols one after the other: a prefix or a whole sequence."""

LARGEST = 10**300
"""Largest whole number that a problem may hold."""


@dataclass(frozen=True)
class PromptProblem:
    """One prompt: the three policies' logits after each prefix, and the advantage of each whole sequence.

    Keys are symbols joined by spaces, "" is the empty prefix. ``rollout`` may hold -inf: symbols it never samples.
    """

    weight: float
    rollout: Mapping[str, tuple[float, ...]]
    proximal: Mapping[str, tuple[float, ...]]
    current: Mapping[str, tuple[float, ...]]
    advantage: Mapping[str, float]


@dataclass(frozen=True)
class Problem:
    """Symbols are 0 … ``symbols`` - 1; a sequence ends after ``eos`` (None: there is none) or at ``length`` symbols."""

    symbols: int
    length: int
    eos: int | None
    prompts: tuple[PromptProblem, ...]


def text(word: Word) -> str:
    """The key of a prefix or sequence."""
    return " ".join(map(str, word))


def prefixes(symbols: int, length: int, eos: int | None) -> list[Word]:
    """Every prefix after which another symbol follows, shortest first."""
    found: list[Word] = [()]
    for prefix in found:  # grows while it is read
        if len(prefix) + 1 < length:
            found += [(*prefix, symbol) for symbol in range(symbols) if symbol != eos]
    return found


def sequences(symbols: int, length: int, eos: int | None) -> Iterator[Word]:
    """Every whole sequence."""
    for prefix in prefixes(symbols, length, eos):
        for symbol in range(symbols):
            if symbol == eos or len(prefix) + 1 == length:
                yield (*prefix, symbol)


def token_count(symbols: int, length: int, eos: int | None) -> int:
    """Tokens of all sequences of one prompt, without listing them; a lower bound of them beyond MOST_TOKENS."""
    going, total = 1, 0
    for depth in range(1, min(length, MOST_TOKENS)):
        total += depth * going * (eos is not None)
        going *= symbols - (eos is not None)
        if max(going, total) > MOST_TOKENS:
            break
    return total + length * going * symbols


def check_size(symbols: int, length: int, eos: int | None, prompts: int) -> None:
    """Refuse what cannot be listed in memory and time."""
    tokens = prompts * token_count(symbols, length, eos)
    if tokens > MOST_TOKENS:
        raise DataError(
            f"symbols={symbols}, length={length} and {prompts} prompts make {tokens:,} tokens or more over all "
            f"sequences; at most {MOST_TOKENS:,} are enumerated: make length, symbols or the number of prompts smaller"
        )


# -- files -----------------------------------------------------------------------------------------------------------


def read_problem(path: Path) -> Problem:
    """The problem in a JSON file; DataError names the key that is wrong, what is allowed, and what mends it."""
    try:
        loaded = json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"--problem={path} cannot be read ({error.strerror}); give a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"--problem={path} is no JSON: {error}") from error
    try:
        return parse_problem(loaded)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def parse_problem(loaded: Any) -> Problem:
    """The problem that a decoded JSON file holds."""
    given = _object(loaded, "the file", ("symbols", "length", "eos", "prompts"))
    symbols = _integer(given["symbols"], "symbols", 1)
    length = _integer(given["length"], "length", 1)
    eos = None if given["eos"] is None else _symbol(given["eos"], "eos", symbols)
    prompts = given["prompts"]
    if not isinstance(prompts, list) or not prompts:
        raise DataError(f"prompts is {_shown(prompts)}; it must be a list of one prompt or more")
    check_size(symbols, length, eos, len(prompts))
    needed = tuple(map(text, prefixes(symbols, length, eos)))
    whole = tuple(map(text, sequences(symbols, length, eos)))
    return Problem(
        symbols, length, eos,
        tuple(_prompt(p, f"prompts[{i}]", symbols, needed, whole) for i, p in enumerate(prompts)),
    )  # fmt: skip


def as_json(problem: Problem) -> dict[str, Any]:
    """The inverse of ``parse_problem``; -inf is written as the string "-inf"."""

    def table(logits: Mapping[str, tuple[float, ...]]) -> dict[str, list[float | str]]:
        return {key: ["-inf" if x == -math.inf else x for x in row] for key, row in logits.items()}

    return {
        "symbols": problem.symbols,
        "length": problem.length,
        "eos": problem.eos,
        "prompts": [
            {
                "weight": p.weight,
                "rollout": table(p.rollout),
                "proximal": table(p.proximal),
                "current": table(p.current),
                "advantage": dict(p.advantage),
            }
            for p in problem.prompts
        ],
    }


def _prompt(loaded: Any, at: str, symbols: int, needed: tuple[str, ...], whole: tuple[str, ...]) -> PromptProblem:
    given = _object(loaded, at, ("weight", "rollout", "proximal", "current", "advantage"))
    weight = _number(given["weight"], f"{at}.weight")
    if not (math.isfinite(weight) and weight > 0):
        raise DataError(f"{at}.weight is {weight}; it must be a finite number above 0: leave the prompt out instead")
    return PromptProblem(
        weight,
        _table(given["rollout"], f"{at}.rollout", symbols, needed, holes=True),
        _table(given["proximal"], f"{at}.proximal", symbols, needed),
        _table(given["current"], f"{at}.current", symbols, needed),
        _advantages(given["advantage"], f"{at}.advantage", whole),
    )


def _table(
    loaded: Any, at: str, symbols: int, needed: tuple[str, ...], holes: bool = False
) -> dict[str, tuple[float, ...]]:
    """Logits after each prefix. Prefixes that no sequence passes (after eos, too long) are allowed, and never used."""
    given = _object(loaded, at, needed, what="prefixes")
    return {key: _logits(row, f"{at}[{key!r}]", _word(key, at, symbols), symbols, holes) for key, row in given.items()}


def _logits(row: Any, at: str, key: Word, symbols: int, holes: bool) -> tuple[float, ...]:
    if not isinstance(row, list) or len(row) != symbols:
        raise DataError(f"{at} is {_shown(row)}; it must be a list of {symbols} logits, one a symbol")
    logits = tuple(_number(x, f"{at}[{i}]") for i, x in enumerate(row))
    allowed = "finite, or -inf for a symbol that is never sampled" if holes else "finite"
    for i, x in enumerate(logits):
        if not (math.isfinite(x) or (holes and x == -math.inf)):
            raise DataError(f"{at}[{i}] is {x}; a logit must be {allowed}")
    if all(x == -math.inf for x in logits):
        raise DataError(f"{at} is -inf for every symbol; at least one logit must be finite")
    return logits


def _advantages(loaded: Any, at: str, whole: tuple[str, ...]) -> dict[str, float]:
    given = _object(loaded, at, whole, what="sequences")
    known = set(whole)
    for key, value in given.items():
        if key not in known:
            raise DataError(f"{at}[{key!r}] is no whole sequence; they end at eos or at length: leave it out")
        if not math.isfinite(_number(value, f"{at}[{key!r}]")):
            raise DataError(f"{at}[{key!r}] is {value}; an advantage must be finite")
    return {key: float(given[key]) for key in whole}


def _object(loaded: Any, at: str, needed: tuple[str, ...], what: str = "keys") -> dict[str, Any]:
    if not isinstance(loaded, dict):
        raise DataError(f"{at} is {_shown(loaded)}; it must be an object with the {what} {_list(needed)}")
    missing = tuple(key for key in needed if key not in loaded)
    if missing:
        raise DataError(f"{at} lacks {_list(missing)}; the {what} needed are {_list(needed)}")
    return loaded


def _word(key: str, at: str, symbols: int) -> Word:
    parts = key.split(" ") if key else []
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part) < symbols and part == str(int(part))):
            raise DataError(f"{at}[{key!r}]: {part!r} is no symbol; a prefix is symbols 0 … {symbols - 1} joined by "
                            'single spaces, "" the empty one')  # fmt: skip
    return tuple(map(int, parts))


def _symbol(value: Any, at: str, symbols: int) -> int:
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < symbols:
        raise DataError(f"{at} is {_shown(value)}; it must be a symbol, 0 … {symbols - 1}, or null")
    return number


def _integer(value: Any, at: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{at} is {_shown(value)}; it must be an integer from {least} up")
    return value


def _number(value: Any, at: str) -> float:
    if value in ("-inf", "-Infinity"):
        return -math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DataError(f"{at} is {_shown(value)}; it must be a number")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise DataError(f"{at} is beyond what a float64 holds; it must be a number of at most {LARGEST:.0e}")
    return float(value)


def _list(keys: tuple[str, ...], most: int = 6) -> str:
    shown = ", ".join(repr(key) for key in keys[:most])
    return shown if len(keys) <= most else f"{shown}, … ({len(keys)})"


def _shown(value: Any) -> str:
    written = json.dumps(value)
    return written if len(written) <= 60 else f"{written[:57]}…"
