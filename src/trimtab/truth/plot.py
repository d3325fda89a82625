"""The bias-variance plot as a PNG, drawn by matplotlib."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError
from trimtab.files import replacing
from trimtab.truth.measure import Estimate
from trimtab.truth.scatter import colours, place_labels, points, short, span

PANEL, LEGEND_COLUMNS, LEGEND_LINE = (7.2, 5.6), 5, 0.16  # inches


def check_matplotlib() -> None:
    """ConfigError without matplotlib, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("truth.png is drawn by matplotlib: pip install 'trimtab[plot]', or leave it out: --no-png")


def draw(found: Mapping[int, Mapping[str, Estimate]], path: Path, title: str) -> None:
    """One panel a step of the inner loop; methods are numbered, and listed below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(next(iter(found.values())))
    columns = min(2, len(found))
    lines = math.ceil(len(names) / LEGEND_COLUMNS)
    panels = math.ceil(len(found) / columns) * PANEL[1]
    width, height = max(columns * PANEL[0], 11.0), panels + lines * LEGEND_LINE + 1.0
    figure = Figure(figsize=(width, height), dpi=130)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, y=1 - 0.2 / height)
    below = lines * LEGEND_LINE + 0.25
    grid = figure.add_gridspec(
        math.ceil(len(found) / columns), columns, left=0.75 / width, right=1 - 0.2 / width, hspace=0.2, wspace=0.2,
        bottom=(below + 0.5) / height, top=1 - 0.95 / height,
    )  # fmt: skip
    for i, (step, estimates) in enumerate(found.items()):
        _panel(figure.add_subplot(grid[i // columns, i % columns]), step, estimates)
    _legend(figure, names, below / height, LEGEND_LINE / height)
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _panel(axes: Any, step: int, found: Mapping[str, Estimate]) -> None:
    numbers, colour = {name: i + 1 for i, name in enumerate(found)}, colours(list(found))
    spots = points(found)
    axes.set_xlim(*span([p.x for p in spots], least=-0.04 * (max(p.x for p in spots) or 1.0)))
    axes.set_ylim(*span([p.y for p in spots]))
    axes.set_title(f"inner step {step}", fontsize=10)
    axes.set_xlabel("bias (L2 norm)", fontsize=9)
    axes.set_ylabel("standard deviation of one sequence's gradient", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.scatter([p.x for p in spots], [p.y for p in spots], s=26, c=[colour[p.names[0]] for p in spots], zorder=3)
    axes.figure.canvas.draw()
    to_pixels, scale = axes.transData, axes.figure.dpi / 72
    dots = [tuple(xy / scale) for xy in to_pixels.transform([(p.x, p.y) for p in spots])]
    texts = [short(p.names, numbers) for p in spots]
    frame = axes.get_window_extent()
    box = (frame.x0 / scale, frame.y0 / scale, frame.x1 / scale, frame.y1 / scale)
    placed = place_labels(dots, [4.1 * len(text) for text in texts], 8.5, box)
    for spot, text, dot, label in zip(spots, texts, dots, placed, strict=True):
        ink, at = colour[spot.names[0]], (spot.x, spot.y)
        by = (label.left - dot[0], label.middle - dot[1])
        axes.annotate(text, at, xytext=by, textcoords="offset points", fontsize=7, va="center", color=ink)
        if label.joint is not None:
            line = {"arrowstyle": "-", "color": ink, "lw": 0.5, "shrinkA": 0, "shrinkB": 0}
            to = (label.joint[0] - dot[0], label.joint[1] - dot[1])
            axes.annotate("", at, xytext=to, textcoords="offset points", arrowprops=line)


def _legend(figure: Any, names: list[str], top: float, line: float) -> None:
    colour, lines = colours(names), math.ceil(len(names) / LEGEND_COLUMNS)
    for i, name in enumerate(names):
        x, y = (i // lines) / LEGEND_COLUMNS + 0.02, top - (i % lines) * line
        figure.text(x, y, f"{i + 1}  {name}", fontsize=7.5, color=colour[name], va="top")
