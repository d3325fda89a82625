"""Problems from JSON lines files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Iterator

from trimtab.errors import ConfigError, DataError
from trimtab.spec import TaskSpec
from trimtab.task.records import Record, RecordTask


def jsonl_task(spec: TaskSpec) -> RecordTask:
    """The task of ``task.path`` (and the first ``eval_size`` lines of ``eval_path``, else its own last ones)."""
    if spec.path is None:
        raise ConfigError("task=jsonl needs a file: task.path=FILE.jsonl")
    evaluation = read_lines(spec.eval_path, "eval_path") if spec.eval_path is not None else None
    return RecordTask(spec, read_lines(spec.path, "path"), evaluation)


def refuse_constant(name: str) -> None:
    """NaN and Infinity are not JSON; as an answer they would match by accident."""
    raise ValueError(f"{name} is not JSON")


def finite(number: str) -> float:
    """A number of JSON; one too large for a float would become infinite."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number:.40} is beyond the range of a float (1.8e308)")
    return value


def read_lines(path: str, option: str) -> Iterator[Record]:
    """(``file:line``, object) of each line that is not blank; DataError names file and line of a bad one."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"task.{option}={path}: no such file")
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file.name}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                value = json.loads(text, parse_constant=refuse_constant, parse_float=finite)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}:{number}: not a JSON object on one line: {error}") from error
            if not isinstance(value, dict):
                raise DataError(f"{file}:{number}: a line must be a JSON object, got {line.strip()[:80]!r}")
            yield where, value
