"""Problems from records (a JSON line, a dataset's row): one prompt field, one answer field."""

from __future__ import annotations

import math
from typing import Any, Iterable, Mapping, Sequence

from trimtab.batch import Problem
from trimtab.errors import DataError
from trimtab.spec import PromptStyle, TaskSpec
from trimtab.task.data import Splits, check_prompt, check_text, hold_out, split
from trimtab.task.match import make_matcher
from trimtab.task.prompts import Messages, answer_text, render

Record = tuple[str, Mapping[str, Any]]  # where it stands (also its id), fields


def field(where: str, record: Mapping[str, Any], key: str, option: str) -> Any:
    """``record[key]``; DataError naming the place, the key, the keys there are, and the option."""
    if key not in record:
        found = ", ".join(map(str, record)) or "none"
        raise DataError(f"{where}: no key {key!r}; keys here: {found}. Set task.{option}")
    return record[key]


def question_of(where: str, value: Any, key: str) -> str | Messages:
    """A prompt: text, or chat messages with role and content."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        for message in value:
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise DataError(f"{where}: {key!r} has a message without text in 'role' and 'content': {message!r:.80}")
        return [{"role": m["role"], "content": m["content"]} for m in value]
    raise DataError(f"{where}: {key!r} must be text or a list of chat messages, not empty; got {value!r:.80}")


def answer_of(where: str, value: Any, key: str) -> str:
    """An answer: text, or a finite number as JSON writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise DataError(f"{where}: {key!r} must be text or a finite number, got {value!r:.80}")


class RecordTask:
    """Prompts and answers from records, judged by ``task.match``."""

    def __init__(self, spec: TaskSpec, train: Iterable[Record], evaluation: Iterable[Record] | None) -> None:
        self._spec = spec
        self._match = make_matcher(spec)
        rows = [self._raw(*record) for record in train]
        if evaluation is None:
            rest, held = hold_out(rows, spec.eval_size)
        else:
            rest, held = rows, [self._raw(*record) for record in evaluation][: spec.eval_size]
        few = spec.shots if spec.style is PromptStyle.few_shot else 0
        clean = split(rest, held, f"task.path={spec.path}")
        shots = [(str(p.prompt), p.answer) for p in clean.train[:few]]  # worked examples belong to neither split
        train_rows = clean.train[few:]
        if not train_rows:
            raise DataError(f"task.path={spec.path}: task.shots={few} leaves no problem to train on")
        self._splits = Splits(
            tuple(self._styled(p, shots) for p in train_rows),
            tuple(self._styled(p, shots) for p in clean.evaluation),
        )

    def _raw(self, where: str, record: Mapping[str, Any]) -> Problem:
        prompt_key, answer_key = self._spec.prompt_key, self._spec.answer_key
        question = question_of(where, field(where, record, prompt_key, "prompt_key"), prompt_key)
        answer = answer_of(where, field(where, record, answer_key, "answer_key"), answer_key)
        check_prompt(where, prompt_key, question)
        check_text(where, answer_key, answer)
        return Problem(id=where, prompt=question, answer=answer)

    def _styled(self, problem: Problem, shots: Sequence[tuple[str, str]]) -> Problem:
        return Problem(problem.id, render(problem.prompt, self._spec, shots), problem.answer)

    def train(self) -> Sequence[Problem]:
        return self._splits.train

    def evaluation(self) -> Sequence[Problem]:
        return self._splits.evaluation

    def reward(self, problem: Problem, response: str) -> float:
        return self._match(answer_text(response, self._spec.style), problem.answer)

    def fingerprint(self) -> str:
        return self._splits.fingerprint()
