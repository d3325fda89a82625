"""Drawing in SVG: elements, scales, ticks, markers, lines with their bands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab.report.model import Floats
from trimtab.report.page.text import aligned, esc, plain

CONSTANT, LEAST, HUGE = 1e-5, 1e-3, 1e290
"""Shares of a value's size, for ``span``; and what lengths are cut to, as twice the largest float is infinite."""
MARKERS = {
    "circle": "M-3.6,0a3.6,3.6 0 1,0 7.2,0a3.6,3.6 0 1,0 -7.2,0z",
    "square": "M-3.2,-3.2h6.4v6.4h-6.4z",
    "diamond": "M0,-4.6L4.6,0L0,4.6L-4.6,0z",
    "triangle": "M0,-4.3L4.2,3.3H-4.2z",
    "down": "M0,4.3L4.2,-3.3H-4.2z",
    "plus": "M-1.4,-4.3h2.8v2.9h2.9v2.8h-2.9v2.9h-2.8v-2.9h-2.9v-2.8h2.9z",
    "hexagon": "M-4.2,0L-2.1,-3.7H2.1L4.2,0L2.1,3.7H-2.1z",
    "cross": "M-4,-2.2L-2.2,-4L0,-1.8L2.2,-4L4,-2.2L1.8,0L4,2.2L2.2,4L0,1.8L-2.2,4L-4,2.2L-1.8,0z",
}


def tag(name: str, *body: str, **attributes: object) -> str:
    """An element; ``class_`` is class, an underscore inside a name a hyphen, False or None leaves an attribute out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return f"<{name}{given}>{''.join(body)}</{name}>"


def _value(value: object) -> str:
    return coordinate(value) if isinstance(value, float) else esc(value)


def coordinate(value: float) -> str:
    """A place in a drawing, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True)
class Scale:
    """``low`` … ``high`` on ``start`` … ``end``, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = (math.log(max(value, 1e-300)) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 5) -> list[float]:
        """Round numbers within."""
        found = powers(self.low, self.high) if self.log else []
        return found if len(found) > 1 else ticks(self.low, self.high, most)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    for finer in (1, 2, 4):  # at least two, as one says nothing of the scale
        raw = (high - low) / (most * finer)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last > first:
            break
    return [i * step for i in range(first, last + 1)]


def powers(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten from ``low`` to ``high``; powers alone, or each nth, where that would be many."""
    bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = math.ceil((top - bottom) / 8) or 1
    decades = range(bottom - bottom % stride, top + 1, stride)
    every = (1, 2, 5) if top - bottom <= 3 and math.log10(high) - math.log10(low) <= 2 else (1,)
    return [m * 10.0**d for d in decades for m in every if low <= m * 10.0**d <= high]


def span(values: Iterable[float], room: float = 0.05, floor: float | None = None) -> tuple[float, float]:
    """A range that holds the finite values with room around them, never so short that it shows rounding alone.

    Values within ``CONSTANT`` of their size count as constant: a tenth of it either way. Others have ``LEAST`` of it.
    """
    finite = [min(max(v, -HUGE), HUGE) for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    size, spread = max(abs(low), abs(high)), high - low
    if spread <= max(CONSTANT * size, 1 / HUGE):
        extra = 0.1 * size if size > 1 / HUGE else 0.5
    else:
        extra = max(spread * room, (LEAST * size - spread) / 2)
    below = low - extra
    return (max(below, floor) if floor is not None and low >= floor else below), high + extra


def marker(shape: str, x: float, y: float, class_: str, tip: str = "", size: float = 1.0) -> str:
    """A dot; with ``tip`` the reader can go to it."""
    place = f"translate({coordinate(x)} {coordinate(y)})" + (f" scale({size:g})" if size != 1.0 else "")
    return tag("path", d=MARKERS[shape], transform=place, class_=class_, data_tip=tip or None)


def path(points: Iterable[tuple[float, float] | None]) -> str:
    """The d of a line; None lifts the pen."""
    made, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        made.append(f"{pen}{coordinate(point[0])} {coordinate(point[1])}")
        pen = "L"
    return "".join(made)


def area(xs: Floats, low: Floats, high: Floats, x: Scale, y: Scale) -> str:
    """The d of a band; it has a gap where a bound isn't finite."""
    made, run = [], list[int]()
    for i in range(len(xs) + 1):
        if i < len(xs) and math.isfinite(low[i]) and math.isfinite(high[i]):
            run.append(i)
        elif run:
            there = [(x(xs[j]), y(high[j])) for j in run]
            back = [(x(xs[j]), y(low[j])) for j in reversed(run)]
            made.append(path([*there, *back]) + "Z")
            run = []
    return "".join(made)


def line(xs: Floats, ys: Floats, x: Scale, y: Scale) -> str:
    """The d of a curve with gaps at what isn't finite."""
    return path((x(a), y(b)) if math.isfinite(b) else None for a, b in zip(xs, ys, strict=True))


def axes(x: Scale, y: Scale, name_x: str, most_x: int = 6, most_y: int = 5) -> str:
    """Grid lines and numbers; y's name stands in the figure's heading."""
    made = []
    marks = y.ticks(most_y)
    for value, text in zip(marks, _named(y, marks), strict=True):
        at = y(value)
        made.append(tag("line", x1=x.start, x2=x.end, y1=at, y2=at, class_="grid"))
        made.append(tag("text", text, x=x.start - 8, y=at + 4, class_="tick end"))
    marks = x.ticks(most_x)
    for value, text in zip(marks, _named(x, marks), strict=True):
        at = x(value)
        made.append(tag("line", x1=at, x2=at, y1=y.start, y2=y.start + 5, class_="axis"))
        made.append(tag("text", text, x=at, y=y.start + 19, class_="tick mid"))
    made.append(tag("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, class_="axis"))
    if name_x:
        made.append(tag("text", esc(name_x), x=x.end, y=y.start + 37, class_="tick end name"))
    return "".join(made)


def room(scale: Scale, least: float, most: int = 5) -> float:
    """Width for the numbers left of a vertical scale."""
    return max(least, 12 + 7.2 * max(map(len, _named(scale, scale.ticks(most))), default=0))


def _named(scale: Scale, marks: Sequence[float]) -> list[str]:
    return [plain(mark) for mark in marks] if scale.log and len(powers(scale.low, scale.high)) > 1 else aligned(marks)
