"""How a setting looks in every figure: colour for light and dark, marker and dash, so that none says it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Each at least 4.5 : 1 against white (first) and against a near-black background (second).
PALETTE = (
    ("#0b62c4", "#6cb2ff"),  # blue
    ("#b84a08", "#ff9d5c"),  # orange
    ("#0a7547", "#4fd69a"),  # green
    ("#a3248f", "#f08ae0"),  # magenta
    ("#755800", "#e3c14d"),  # olive
    ("#007385", "#45cfe0"),  # teal
    ("#c1272d", "#ff8080"),  # red
    ("#5b4bc4", "#b3a6ff"),  # violet
)
MARKERS = ("circle", "square", "diamond", "triangle", "down", "plus", "hexagon", "cross")
DASHES = ("", "6 3", "2 2", "8 3 2 3")  # as SVG's stroke-dasharray; empty: solid


@dataclass(frozen=True)
class Look:
    """``light``, ``dark``: colours on a light and on a dark background; ``marker``: one of ``MARKERS``."""

    light: str
    dark: str
    marker: str
    dash: str

    @property
    def colour(self) -> str:
        """For paper: that on a light background."""
        return self.light


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """A look for each label, in the labels' order. It depends on the set of labels alone, not on who leads."""
    places = {label: place for place, label in enumerate(sorted(set(labels)))}
    return {label: look(places[label]) for label in dict.fromkeys(labels)}


def look(place: int) -> Look:
    """The look at ``place``; 64 of them are different."""
    turn, at = divmod(place, len(PALETTE))
    light, dark = PALETTE[at]
    return Look(light, dark, MARKERS[(at + turn) % len(MARKERS)], DASHES[turn % len(DASHES)])
