"""The figures' data inside the page: curves of every metric and axis, and single runs, thinned out, extremes kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trimtab.report.curves import Axis, Curve, axis_of, curve, thin_curve, thin_run
from trimtab.report.model import Floats, Run
from trimtab.report.page.figures import Curves
from trimtab.report.page.text import visible
from trimtab.report.page.view import AXES, View, metric_of, settled

NUMBERS_OF_CURVES, NUMBERS_OF_RUNS = 900_000, 500_000
"""How many numbers the page may hold of each; some 6 bytes each."""
FEWEST, MOST = 40, 400


def curves_of(v: View) -> dict[tuple[str, str, Axis], Curve]:
    """Every curve that the page can show, thinned out to what the page's size allows."""
    cells = max(len(v.settings) * len(v.metrics) * len(AXES), 1)
    points = min(max(NUMBERS_OF_CURVES // (5 * cells), FEWEST), MOST)
    made = {}
    for metric in v.metrics:
        for axis in AXES:
            for setting in v.settings:
                found = settled(curve(setting, metric, axis), axis)
                if len(found.x):
                    made[setting.label, metric, axis] = thin_curve(found, points)
    return made


def data(v: View, curves: Curves) -> dict[str, Any]:
    """What page.js draws from. Settings by their number; ``low`` and ``high`` are null where there is no interval."""
    shapes = [v.look(s.label).marker for s in v.settings]
    drawn: dict[str, dict[str, list[Any]]] = {}
    for (label, metric, axis), found in curves.items():
        n = [int(n) for n in found.n]
        entry = [v.index[label], _numbers(found.x), _numbers(found.mean), _numbers(found.low), _numbers(found.high),
                 n[0] if len(set(n)) == 1 else n]  # fmt: skip
        drawn.setdefault(metric, {}).setdefault(axis.value, []).append(entry)
    return {
        "settings": [v.short[s.label] or "(all runs)" for s in v.settings],
        "markers": shapes,
        "metrics": [[key, visible(metric_of(key).heading)] for key in v.metrics if key in drawn],
        "axes": [[axis.value, title] for axis, title in AXES.items() if any(axis.value in by for by in drawn.values())],
        "curves": drawn,
        "runs": runs_of(v),
    }


def runs_of(v: View) -> list[dict[str, Any]]:
    """Single runs, for whoever asks: per metric the steps and values; ``axes`` turns steps into tokens or time."""
    pairs = [(v.index[s.label], run) for s in v.settings for run in s.runs if len(run.step)]
    cells = max(len(pairs) * len(v.metrics), 1)
    points = min(max(NUMBERS_OF_RUNS // (2 * cells), FEWEST), MOST)
    return [
        {"s": index, "seed": run.seed, "axes": _axes(run), "m": {
            metric: _thin(run, metric, points) for metric in v.metrics if metric in run.columns
        }}
        for index, run in pairs
    ]  # fmt: skip


def _thin(run: Run, metric: str, points: int) -> list[list[float | None]]:
    values = run.columns[metric]
    there = np.isfinite(values)
    x, y = thin_run(run.step[there].astype(np.float64), values[there], points)
    return [_numbers(x), _numbers(y)]


def _axes(run: Run) -> dict[str, list[list[float | None]]]:
    at = np.unique(np.linspace(0, len(run.step) - 1, 33).astype(int))
    found = {}
    for axis in AXES:
        values = None if axis is Axis.step else axis_of(run, axis)
        if values is not None and np.isfinite(values[at]).all():
            found[axis.value] = [_numbers(run.step[at].astype(np.float64)), _numbers(values[at])]
    return found


def _numbers(values: Sequence[float] | Floats) -> list[float | None]:
    """Five significant digits, far finer than a pixel; None for what isn't finite."""
    return [_plain(float(value)) for value in values]


def _plain(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
