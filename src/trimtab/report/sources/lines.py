"""metrics.jsonl to columns: by Arrow where the file is sound, line by line where it isn't."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj
from numpy.typing import NDArray

from trimtab.report.model import Floats
from trimtab.report.sources.rows import INTERNAL, LARGEST, Columns, columns_of

LEAST_BLOCK, MOST_BLOCK = 1 << 16, 1 << 30


def read_lines(path: Path) -> tuple[Columns, list[str]]:
    """(columns, what is wrong with the file). Of a step that comes twice the last line counts.

    A torn last line is dropped. A file that isn't there has no steps and nothing wrong with it.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return columns_of({}), []
    except OSError as error:
        return columns_of({}), [f"{path.name} cannot be read: {error.strerror}"]
    if not data.endswith(b"\n"):
        whole, _, rest = data.rpartition(b"\n")
        data = data if _row(rest) is not None else whole
    steps, columns = _by_arrow(data)
    if columns is None:
        return _by_hand(path, data)
    return columns, _went_back(path, steps)


def _by_arrow(data: bytes) -> tuple[NDArray[np.int64], Columns | None]:
    """Some four times as fast as json; None where anything is unusual."""
    nothing = np.zeros(0, dtype=np.int64)
    if not LEAST_BLOCK // 64 < len(data) < MOST_BLOCK:
        return nothing, None
    options = pj.ReadOptions(use_threads=False, block_size=max(len(data) + 1, LEAST_BLOCK))  # one block: one schema
    try:
        table = pj.read_json(pa.BufferReader(data), read_options=options)
    except pa.ArrowException:  # NaN as a bare word, a damaged line, a metric that is now a number and now a text
        return nothing, None
    if "step" not in table.column_names or table["step"].type != pa.int64() or table["step"].null_count:
        return nothing, None
    steps = table["step"].to_numpy()
    unique, at = np.unique(steps[::-1], return_index=True)
    rows = len(steps) - 1 - at
    columns: dict[str, Floats] = {}
    broken: dict[str, list[int]] = {}
    for name in table.column_names:
        kind = table[name].type
        if name not in INTERNAL and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            columns[name], bad = _column(table[name], rows)
            if bad.any():
                broken[name] = unique[bad].tolist()
        elif name not in INTERNAL and not pa.types.is_null(kind):
            return nothing, None
    if "nonfinite" in table.column_names:
        for step, names in zip(unique.tolist(), table["nonfinite"].take(pa.array(rows)).to_pylist(), strict=True):
            for name in names or ():
                broken.setdefault(str(name), []).append(step)
    for name in broken:
        columns.setdefault(name, np.full(len(unique), math.nan))
    return steps, Columns(unique, columns, {name: tuple(at) for name, at in broken.items()})


def _column(values: pa.ChunkedArray, rows: NDArray[np.int64]) -> tuple[Floats, NDArray[np.bool_]]:
    """(values of ``rows``, NaN where there is none; which of them are there but not finite: Arrow reads a bare NaN)."""
    column = np.asarray(values.to_numpy(), dtype=np.float64)
    bad = ~(np.abs(column) <= LARGEST)
    if bad.sum() > values.null_count:
        bad &= values.is_valid().to_numpy()
        column = np.where(bad, math.nan, column)
    else:
        bad[:] = False
    return column[rows], bad[rows]


def _row(line: bytes) -> dict[str, Any] | None:
    """The object on a line if it has a step."""
    try:
        row = json.loads(line)
        step = row["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    whole = isinstance(step, int | float) and not isinstance(step, bool) and math.isfinite(step) and step == int(step)
    return row if whole and isinstance(row, dict) else None


def _by_hand(path: Path, data: bytes) -> tuple[Columns, list[str]]:
    found: dict[int, dict[str, Any]] = {}
    bad: list[int] = []
    steps = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        row = _row(line)
        if row is None:
            bad.append(number)
            continue
        steps.append(int(row["step"]))
        found[steps[-1]] = row
    remarks = [f"{path.name}: {len(bad)} lines cannot be read, the first is line {bad[0]}"] if bad else []
    return columns_of(found), remarks + _went_back(path, np.asarray(steps, dtype=np.int64))


def _went_back(path: Path, steps: NDArray[np.int64]) -> list[str]:
    """A remark where the last attempt ended before an earlier one, whose later steps are still there."""
    if not len(steps) or steps[-1] == steps.max():
        return []
    back = np.flatnonzero(np.diff(steps) < 0)[-1] + 1
    return [f"{path.name} goes back to step {steps[back]} and on to {steps[-1]} only: steps after that are those of an "
            "earlier attempt"]  # fmt: skip
