"""Figures for papers: the settings as dots, learning curves, reward against mismatch; PNG, and PDF with real text."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from trimtab.errors import ConfigError
from trimtab.files import replacing
from trimtab.report.colours import Look, looks
from trimtab.report.curves import Axis, Curve, curve, lonely, seeds_drawn, thin_curve
from trimtab.report.model import Comparison, Interval, Row, Run
from trimtab.report.page.svg import span
from trimtab.report.page.text import aligned, short, shorts
from trimtab.report.page.view import AXES, MISMATCH, injected, metric_of, settled
from trimtab.report.score import scores_of, tail_mean

FORMATS = ("png", "pdf", "svg")
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "down": "v", "plus": "P", "hexagon": "h",
           "cross": "X"}  # fmt: skip
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib's own, so every machine draws alike
    "font.size": 8.0,
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.unicode_minus": True,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "text.parse_math": False,  # a $ in a name is a $
    "pdf.fonttype": 42,  # TrueType: text that can be searched and edited
    "svg.fonttype": "none",
    "svg.hashsalt": "trimtab",
}
NO_DATE: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None},
    "svg": {"Date": None, "Creator": None},
}
MOST_CURVES = 12
LONGEST = (48, 64, 80)  # characters of a setting's name: the fewest that keep the names apart
LETTER = 0.062  # inches that a character of a name takes


def check_matplotlib() -> None:
    """ConfigError without matplotlib, before anything is read."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures are drawn by matplotlib: pip install 'trimtab[plot]', or leave out --png and --pdf")


def figures(
    comparison: Comparison, runs: Sequence[Run], folder: Path, formats: Sequence[str] = ("png", "pdf")
) -> list[Path]:
    """Write ``settings``, ``curves`` and ``mismatch`` in each format into ``folder``; the paths, in that order.

    The same comparison gives the same bytes. A figure without data is left out. ConfigError for another format, or
    without matplotlib.
    """
    for format_ in formats:
        if format_ not in FORMATS:
            raise ConfigError(f"no figures as {format_!r}; allowed: {', '.join(FORMATS)}")
    check_matplotlib()
    import matplotlib

    look = looks([row.setting.label for row in comparison.rows])
    counted = {id(run) for run in runs}
    drawings = {"settings": settings, "curves": curves, "mismatch": mismatch}
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in drawings.items():
            figure = draw(comparison, look, counted)
            if figure is None:
                continue
            for format_ in formats:
                path = folder / f"{name}.{format_}"
                with replacing(path) as file:
                    figure.savefig(file, format=format_, dpi=200, metadata=NO_DATE[format_], bbox_inches="tight",
                                   pad_inches=0.04)  # fmt: skip
                written.append(path)
    return written


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def ordered(comparison: Comparison) -> list[Row]:
    """Rows by rank; those without a score last."""
    last = len(comparison.rows) + 1
    return sorted(comparison.rows, key=lambda row: row.rank if row.rank is not None else last)


def names(comparison: Comparison, drawn: Sequence[Row]) -> dict[str, str]:
    """What to call each of the settings drawn: the keys that differ among them, shortened but never to one name.

    Of long names the values that most of the settings have are left out first, as then the others stay readable.
    A mismatch put in on purpose is told, unless all settings of the comparison have it alike.
    """
    values = [row.setting.values for row in drawn]
    keys = [key for key in values[0] if len({one.get(key) for one in values}) > 1] if values else []
    usual = {key: Counter(one[key] for one in values).most_common(1)[0][0] for key in keys[1:]}
    made = {row.setting.label: row.setting.label for row in drawn}
    for left_out in ({}, usual):  # where they are long, what most have too; the first key always stays
        told = {row.setting.label: " ".join(f"{key}={value}" for key, value in row.setting.values.items()
                if key in keys and value != left_out.get(key)) for row in drawn}  # fmt: skip
        if keys and len(set(told.values())) == len(told):
            made = told
        if max(map(len, made.values()), default=0) <= LONGEST[0]:
            break
    wide = next((w for w in LONGEST if len({short(text, w) for text in made.values()}) == len(made)), LONGEST[0])
    cut = shorts(list(made.values()), wide)
    common = len({injected(row.setting) for row in comparison.rows}) == 1
    return {row.setting.label: (drawable(cut[made[row.setting.label]]) or "(all runs)")
            + (" (injected)" if injected(row.setting) and not common else "") for row in drawn}  # fmt: skip


def drawable(text: str) -> str:
    """Characters that the figures' font lacks by their number: ⟨U+4E2D⟩ tells names apart where boxes don't."""
    there = _characters()
    return "".join(
        c if ord(c) in there else f"\u27e8U+{ord(c):04X}\u27e9"
        for c in text.replace("\n", "⟨LF⟩").replace("\t", "⟨HT⟩")
    )


@cache
def _characters() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def settings(comparison: Comparison, look: dict[str, Look], counted: set[int]) -> Any:
    """Every seed as a dot with mean and t interval; on the right the paired differences with theirs."""
    rows = [row for row in ordered(comparison) if row.scores]
    if not rows:
        return None
    differ = any(row.difference.pairs for row in rows)
    called = names(comparison, rows)
    beside = [f"{called[r.setting.label]}  (n = {_seeds(r)})" for r in rows]
    width = max(6.9, 5.6 + LETTER * max(map(len, beside))) if differ else max(4.6, 3.2 + LETTER * max(map(len, beside)))
    figure = _figure(width, 1.0 + 0.3 * len(rows))
    panels = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2)) if differ else [figure.subplots()]
    left = panels[0]
    for i, row in enumerate(rows):
        at, ink, fine = -i, look[row.setting.label].light, row.interval
        if fine.low is not None and fine.high is not None:
            left.plot([fine.low, fine.high], [at, at], color=ink, alpha=0.25, lw=6, solid_capstyle="butt", zorder=2)
        left.plot([fine.mean, fine.mean], [at - 0.3, at + 0.3], color=ink, lw=1.6, zorder=3)
        left.scatter(list(row.scores.values()), [at] * len(row.scores), s=16, color=ink, lw=0.4, edgecolor="white",
                     marker=MARKERS[look[row.setting.label].marker], zorder=4)  # fmt: skip
    base = next((row for row in rows if row.setting.label == comparison.baseline), None)
    if base is not None:
        left.axvline(base.interval.mean, color="#777777", lw=0.7, ls=(0, (2, 2)), zorder=1)
    left.set_yticks([-i for i in range(len(rows))], beside)
    left.set_ylim(-len(rows) + 0.4, 0.6)
    left.tick_params(axis="y", length=0)
    left.set_xlim(*span([x for row in rows for x in (*row.scores.values(), *_ends(row.interval))]))
    _few_ticks(left, 5)
    left.set_xlabel("\n".join(wrap(_heading(comparison), 36)))
    left.grid(axis="x", color="#e6e6e6", lw=0.5)
    left.set_axisbelow(True)
    if differ:
        _forest(panels[1], rows, look)
    return figure


def _ends(interval: Interval) -> list[float]:
    return [interval.mean, *(v for v in (interval.low, interval.high) if v is not None)]


def _heading(comparison: Comparison) -> str:
    return drawable(short(metric_of(comparison.metric).heading, 60))


def _few_ticks(axes: Any, most: int) -> None:
    """At most so many steps between numbers, fewer where these are long, so that none runs into the next."""
    from matplotlib.ticker import MaxNLocator

    for bins in range(most, 1, -1):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=bins, min_n_ticks=2))
        low, high = axes.get_xlim()
        marks = [float(v) for v in axes.xaxis.get_major_locator().tick_values(low, high) if low <= v <= high]
        if sum(len(text) + 2 for text in aligned(marks)) <= 8 * most:
            break
    axes.xaxis.set_major_formatter(_numbers())


def _seeds(row: Row) -> str:
    n = row.interval.n
    return f"{n} of {row.expected}" if row.expected > n else str(n)


def _forest(axes: Any, rows: Sequence[Row], look: dict[str, Look]) -> None:
    axes.axvline(0.0, color="#777777", lw=0.7, ls=(0, (2, 2)))
    for i, row in enumerate(rows):
        fine, ink = row.difference.interval, look[row.setting.label].light
        if not row.difference.pairs:
            continue
        if fine.low is not None and fine.high is not None:
            axes.plot([fine.low, fine.high], [-i, -i], color=ink, lw=1.4)
        axes.scatter([fine.mean], [-i], s=18, color=ink, marker=MARKERS[look[row.setting.label].marker], zorder=3)
        p = row.difference.p_corrected
        if p is not None:
            text = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
            if row.difference.p_lost is not None:
                text += ", lost seeds counted"
            axes.annotate(text, (1.0, -i), xycoords=("axes fraction", "data"), xytext=(4, 0),
                          textcoords="offset points", va="center", fontsize=7, color="#444444")  # fmt: skip
    there = [row.difference.interval for row in rows if row.difference.pairs]
    axes.set_xlim(*span([0.0, *(x for interval in there for x in _ends(interval))]))
    _few_ticks(axes, 4)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.set_xlabel("difference, paired")
    axes.grid(axis="x", color="#e6e6e6", lw=0.5)
    axes.set_axisbelow(True)


def curves(comparison: Comparison, look: dict[str, Look], counted: set[int]) -> Any:
    """The metric against step, tokens and wall time, with t bands."""
    rows = ordered(comparison)
    chosen = [row for row in rows[:MOST_CURVES] if row.setting.label != comparison.baseline]
    chosen = [*(row for row in rows if row.setting.label == comparison.baseline), *chosen]
    metric, called = comparison.metric, names(comparison, chosen)
    every = {axis: [(row, settled(curve(row.setting, metric, axis), axis)) for row in chosen] for axis in Axis}
    drawn = {axis: [(row, found) for row, found in pairs if len(found.x)] for axis, pairs in every.items()}
    axes = [axis for axis, found in drawn.items() if found]
    if not axes:
        return None
    figure = _figure(2.5 * len(axes) + 0.6, 2.5 + 0.14 * math.ceil(len(chosen) / 2))
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    for panel, axis in zip(panels, axes, strict=True):
        for row, whole in drawn[axis]:
            at, found = look[row.setting.label], thin_curve(whole, 800)
            dash = (0, tuple(map(float, at.dash.split()))) if at.dash else "-"
            panel.fill_between(found.x, found.low, found.high, color=at.light, alpha=0.14, lw=0)
            panel.plot(found.x, found.mean, color=at.light, lw=1.3, ls=dash, marker=MARKERS[at.marker], ms=3.2,
                       markevery=(0.05, 0.2), label=f"{called[row.setting.label]} ({seeds_drawn(whole)})")  # fmt: skip
            for i in lonely(found.mean):  # a line of one point has no length
                panel.plot([found.x[i]] * 2, [found.low[i], found.high[i]], color=at.light, lw=1.0)
                panel.plot([found.x[i]], [found.mean[i]], color=at.light, ls="", marker=MARKERS[at.marker], ms=3.2)
        panel.set_xlabel(AXES[axis])
        panel.grid(color="#eeeeee", lw=0.5)
        panel.set_axisbelow(True)
        panel.xaxis.set_major_formatter(_numbers())
        panel.yaxis.set_major_formatter(_numbers())
    panels[0].set_ylabel(_heading(comparison))
    panels[0].set_ylim(*_frame([found for pairs in drawn.values() for _, found in pairs]))
    handles, labels = panels[0].get_legend_handles_labels()
    title = f"the best {len(chosen)} of {len(rows)} settings" if len(chosen) < len(rows) else None
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=7, title=title,
                  title_fontsize=7)  # fmt: skip
    return figure


def _numbers() -> Any:
    """Numbers of an axis as the page has them: no offset in a corner, none twice."""
    from matplotlib.ticker import Formatter

    class Numbers(Formatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return aligned([float(x)])[0]

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return aligned([0.0 if abs(v) < 1e-9 * max(map(abs, values)) else float(v) for v in values])

    return Numbers()


def _frame(found: Sequence[Curve]) -> tuple[float, float]:
    """All means, and the bands but for their outermost 5%: two seeds make a band arbitrarily wide."""
    means = np.concatenate([one.mean for one in found])
    bounds = np.concatenate([values for one in found for values in (one.low, one.high)])
    bounds = bounds[np.isfinite(bounds)]
    return span([*means, *(np.quantile(bounds, (0.05, 0.95)) if len(bounds) else ())])


def mismatch(comparison: Comparison, look: dict[str, Look], counted: set[int]) -> Any:
    """Each run's score against its mismatch KL; hollow: the mismatch was injected."""
    figure = _figure(4.4, 3.2)
    axes, everywhere = figure.subplots(), list[tuple[float, float]]()
    called = names(comparison, comparison.rows)
    for row in ordered(comparison):
        at, spots = look[row.setting.label], []
        for run in row.setting.runs:
            gap = tail_mean(run, MISMATCH, comparison.last)
            value = scores_of(comparison).get(id(run))
            if id(run) in counted and gap is not None and value is not None:
                spots.append((gap, value))
        if not spots:
            continue
        everywhere += spots
        face = "none" if injected(row.setting) else at.light
        axes.scatter([x for x, _ in spots], [y for _, y in spots], s=20, facecolor=face, edgecolor=at.light, lw=1.0,
                     marker=MARKERS[at.marker], label=called[row.setting.label])  # fmt: skip
    if not everywhere:
        return None
    hollow = ", hollow: injected" if any(injected(row.setting) for row in comparison.rows) else ""
    axes.set_xlabel(f"mismatch KL (k3), nats{hollow}")
    axes.set_ylabel(_heading(comparison))
    axes.set_xlim(*span(x for x, _ in everywhere))
    axes.set_ylim(*span(y for _, y in everywhere))
    axes.xaxis.set_major_formatter(_numbers())
    axes.yaxis.set_major_formatter(_numbers())
    axes.grid(color="#eeeeee", lw=0.5)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    return figure
