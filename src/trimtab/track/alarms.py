"""Alarms as metrics.jsonl holds them: ``alarm/<kind>`` in each step in which one held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PREFIX = "alarm/"


def alarms_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """From rows of metrics.jsonl, for each kind that was raised: its first and last step, and in how many it held."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        for name in row:
            if name.startswith(PREFIX):
                step = int(row["step"])
                told = found.setdefault(name.removeprefix(PREFIX), {"first": step, "last": step, "steps": 0})
                told["last"] = step
                told["steps"] += 1
    return found
