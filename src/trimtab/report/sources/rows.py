"""Rows of metrics, as files and servers give them, to the columns of a Run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.report.model import Floats

# What counts the steps of a foreign run; the first that a row has.
AXES = ("train/step", "training/global_step", "train/global_step", "trainer/global_step", "global_step", "step",
        "_step")  # fmt: skip
UNSPEAKABLE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # as W&B writes them
INTERNAL = frozenset({"step", "nonfinite", "_step", "_timestamp", "_wandb"})


LARGEST = 1e100
"""What is larger counts as non-finite: its square, which every spread needs, would be."""


def usable(value: float) -> bool:
    """Whether a metric's value can be calculated with."""
    return abs(value) <= LARGEST  # False for NaN


@dataclass(frozen=True)
class Columns:
    """Metrics by step, as ``Run`` holds them."""

    step: NDArray[np.int64]
    columns: Mapping[str, Floats]
    broken: Mapping[str, tuple[int, ...]]

    @property
    def nonfinite(self) -> dict[str, int]:
        """How often each metric was non-finite."""
        return {name: len(steps) for name, steps in self.broken.items()}


def columns_of(rows: Mapping[int, Mapping[str, Any]]) -> Columns:
    """Columns from one row a step. What is no number is left out; null counts as non-finite only if the row says so."""
    steps = sorted(rows)
    columns: dict[str, Floats] = {}
    broken: dict[str, list[int]] = {}
    for i, step in enumerate(steps):
        row = rows[step]
        for name in row.get("nonfinite") or ():
            broken.setdefault(name, []).append(step)
            columns.setdefault(name, np.full(len(steps), math.nan))
        for name, value in row.items():
            value = UNSPEAKABLE.get(value, value) if isinstance(value, str) else value
            if name in INTERNAL or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            column = columns.get(name)
            if column is None:
                column = columns[name] = np.full(len(steps), math.nan)
            if usable(value):
                column[i] = value
            else:
                broken.setdefault(name, []).append(step)
    found = {name: tuple(dict.fromkeys(at)) for name, at in broken.items()}
    return Columns(np.asarray(steps, dtype=np.int64), columns, found)


def step_of(row: Mapping[str, Any]) -> int | None:
    """The step of a foreign row; None when nothing in it counts steps."""
    for axis in AXES:
        value = row.get(axis)
        if isinstance(value, int | float) and math.isfinite(value):
            return int(value)
    return None


def merged(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Foreign rows by step: those that follow each other with one step are parts of one row, of others the last wins.

    A row whose step has been left behind and comes again is that of a later attempt and replaces the earlier one.
    """
    found: dict[int, dict[str, Any]] = {}
    previous: int | None = None
    for row in rows:
        step = step_of(row)
        if step is None:
            continue
        if step == previous:
            found[step] |= row
        else:
            found[step] = dict(row)
        previous = step
    return found


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; an empty mapping stays as a value, ``{"value": x}`` of W&B's files is x."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if name in ("_wandb", "wandb_version"):
            continue
        if isinstance(value, Mapping) and set(value) <= {"value", "desc"} and "value" in value and not prefix:
            value = value["value"]
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{name}.")
        else:
            found[name] = value
    return found


def seed_of(config: Mapping[str, Any]) -> int | None:
    """The seed: ``seed``, else the one value that all keys ending in ``.seed`` have. A negative one means none."""
    own = config.get("seed")
    found = (
        {own} if own is not None else {v for k, v in config.items() if k.endswith(".seed") and isinstance(v, int | str)}
    )
    value = found.pop() if len(found) == 1 else None
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return int(value) if isinstance(value, int | float) and math.isfinite(value) and value >= 0 else None


def injected_of(config: Mapping[str, Any]) -> str:
    """The mismatch put in on purpose, such as ``logit_noise 0.1`` or ``dtype bfloat16``; empty: none."""
    kind = config.get("mismatch.kind", "none")
    if kind in (None, "none"):
        return ""
    if kind == "dtype":
        return f"{kind} {config.get('mismatch.dtype', '')}".strip()
    strength = config.get("mismatch.strength")  # 0: a gap that is there or not
    return f"{kind} {strength:g}" if isinstance(strength, int | float) and strength else str(kind)


def planned_of(config: Mapping[str, Any]) -> int | None:
    """Steps asked for."""
    steps = config.get("steps")
    return steps if isinstance(steps, int) and not isinstance(steps, bool) else None
