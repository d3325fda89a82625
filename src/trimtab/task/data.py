"""What every task shares: the two splits, their overlap, their fingerprint."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import Iterable, Sequence

from trimtab.batch import Problem
from trimtab.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Splits:
    """Problems to train on and problems to evaluate on; none of the second is among the first."""

    train: tuple[Problem, ...]
    evaluation: tuple[Problem, ...]

    def fingerprint(self) -> str:
        """SHA-256 (hex) over id, prompt and answer of every problem, split by split, in order."""
        digest = hashlib.sha256()
        for name, problems in (("train", self.train), ("evaluation", self.evaluation)):
            digest.update(f"{name} {len(problems)}\n".encode())
            for problem in problems:
                line = json.dumps([problem.id, problem.prompt, problem.answer], sort_keys=True)
                digest.update(line.encode() + b"\n")
        return digest.hexdigest()


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
