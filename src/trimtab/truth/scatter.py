"""The bias-variance plot as plain numbers: points, labels that don't cover each other, one colour a family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.truth.measure import Estimate

# One colour for each family, the same on every plot; told apart with red-green blindness too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56a0d3", "#7a3e9d", "#a0522d", "#5b6770", "#c2185b")
FAMILIES = ("verl", "miles", "slime", "nemo_rl", "trl", "areal", "pipelinerl", "prime_rl", "trimtab")


def family(name: str) -> str:
    """``verl`` of ``verl/bypass_pg_is``; the name itself of a method without a family."""
    return name.split("/")[0]


def colours(names: Sequence[str]) -> dict[str, str]:
    """Colour of each method."""
    others = sorted({family(name) for name in names} - set(FAMILIES))
    order = [*FAMILIES, *others]
    return {name: COLOURS[order.index(family(name)) % len(COLOURS)] for name in names}


@dataclass(frozen=True)
class Point:
    """Methods that fall on one place: ``x`` = bias, ``y`` = standard deviation of one sequence's gradient."""

    x: float
    y: float
    names: tuple[str, ...]


def points(found: Mapping[str, Estimate], merge: float = 0.006) -> list[Point]:
    """Methods nearer than ``merge`` of the plot to a point's first one belong to that point, which stands there."""
    places = {name: (at.bias if at.bias > 1e-12 else 0.0, math.sqrt(at.variance)) for name, at in found.items()}
    near = [merge * (max(values) - min(values)) for values in zip(*places.values(), strict=True)]
    made: list[Point] = []
    for name, (x, y) in places.items():
        at = next((i for i, p in enumerate(made) if abs(p.x - x) <= near[0] and abs(p.y - y) <= near[1]), None)
        if at is None:
            made.append(Point(x, y, (name,)))
        else:
            made[at] = Point(made[at].x, made[at].y, (*made[at].names, name))
    return made


def span(values: Sequence[float], least: float | None = None) -> tuple[float, float]:
    """A range that holds the values with room around; it starts at ``least`` if that is given."""
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return (low - room if least is None else least), high + room


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within the range."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


Box = tuple[float, float, float, float]
FAR = 12.0
"""A label farther from its dot than this is joined to it by a line."""
TURNS = tuple(math.pi * i / 8 for i in (0, 8, 1, 15, 7, 9, 2, 14, 6, 10, 3, 13, 5, 11, 4, 12))
AROUND = tuple((gap, turn) for gap in (7.0, 16.0, 26.0, 38.0, 52.0) for turn in TURNS)


@dataclass(frozen=True)
class Label:
    """Where a label stands: left end and middle; ``joint``: the end of the line to its dot, None if it is near."""

    left: float
    middle: float
    joint: tuple[float, float] | None


def place_labels(
    dots: Sequence[tuple[float, float]], widths: Sequence[float], height: float, frame: Box
) -> list[Label]:
    """Labels around their dots, each at the nearest place where it covers no dot and no label before it.

    In pixels (or points), y up or down alike; ``frame`` (left, top, right, bottom) is kept to.
    """
    taken: list[Box] = [(x - 4, y - 4, x + 4, y + 4) for x, y in dots]
    found = []
    for (x, y), width in zip(dots, widths, strict=True):
        tried = []
        for gap, turn in AROUND:
            near = (x + gap * math.cos(turn), y + gap * math.sin(turn))  # the label's nearest edge
            left = near[0] - width / 2 * (1 - math.cos(turn))
            middle = near[1] + height / 2 * math.sin(turn)
            box = (left, middle - height / 2, left + width, middle + height / 2)
            outside = sum(max(d, 0.0) for d in (frame[0] - box[0], frame[1] - box[1], box[2] - frame[2],
                                                box[3] - frame[3]))  # fmt: skip
            cost = sum(_overlap(box, other) for other in taken) + 100 * outside + 0.2 * gap
            tried.append((cost, box, near if gap > FAR else None))
        _, best, joint = min(tried, key=lambda one: one[0])
        taken.append(best)
        found.append(Label(best[0], (best[1] + best[3]) / 2, joint))
    return found


def _overlap(a: Box, b: Box) -> float:
    return max(min(a[2], b[2]) - max(a[0], b[0]), 0.0) * max(min(a[3], b[3]) - max(a[1], b[1]), 0.0)


def short(names: Sequence[str], numbers: Mapping[str, int], most: int = 3) -> str:
    """``4, 9, 12 +3``: the numbers that stand for the methods of a point."""
    shown = ", ".join(str(numbers[name]) for name in names[:most])
    return shown if len(names) <= most else f"{shown} +{len(names) - most}"
