"""The ladder as text, JSON and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from trimtab.lab.parity.model import Rung, Section, Verdict, changes, healthy

COLUMNS = (
    "section",
    "rung",
    "compared",
    "verdict",
    "value",
    "error",
    "bound",
    "unit",
    "count",
    "cause",
    "what",
    "mend",
    "side",
    "follows",
    "note",
)
WIDTH = 110


def number(value: float | None) -> str:
    """``0.00123`` as ``1.23e-03``, ``0.123`` as ``0.123``; a dash for nothing."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.3g}"


def told(rung: Rung) -> str:
    """The verdict with its figures: ``differs by 0.034 ± 0.002``."""
    match rung.verdict:
        case Verdict.differs if rung.unit == "p-value":
            return f"differs (p = {number(rung.value)})"
        case Verdict.differs if rung.value is not None:
            return f"differs by {_sized(rung)}"
        case Verdict.differs:
            return "differs"
        case Verdict.rounding if rung.value is not None:
            return f"rounding, {_sized(rung)}"
        case Verdict.rounding:
            return "rounding"
        case Verdict.equal if rung.unit == "p-value":
            return f"equal within noise (p = {number(rung.value)})"
        case Verdict.equal if rung.value is not None and rung.bound is not None:
            return f"equal within noise ({number(rung.value)}, noise up to {number(rung.bound)})"
        case Verdict.equal | Verdict.off | Verdict.untestable:
            return rung.verdict.value


def _sized(rung: Rung) -> str:
    error = "" if rung.error is None or math.isnan(rung.error) else f" ± {rung.error:.2g}"
    return f"{number(rung.value)}{error} {rung.unit}"


def as_text(rungs: Sequence[Rung], about: Sequence[str]) -> list[str]:
    """The lines of the table, and what to change."""
    lines = list(about)
    width = max((len(rung.name) for rung in rungs), default=0)
    for section in Section:
        those = [rung for rung in rungs if rung.section is section]
        if not those:
            continue
        lines += ["", section.value]
        for rung in those:
            mark = "x" if rung.fault and not rung.follows else "." if rung.fault else " "
            lines.append(f"{mark} {rung.name:<{width}}  {told(rung)}")
            text = rung.cause.text if rung.cause is not None and rung.fault else rung.note
            lines += [f"  {'':<{width}}    {part}" for part in wrap(text, max(40, WIDTH - width - 6))]
    return [*lines, "", *conclusion(rungs)]


def conclusion(rungs: Sequence[Rung]) -> list[str]:
    """What to change, in order; or that nothing has to be."""
    found = changes(rungs)
    if healthy(rungs):
        coarse = any(rung.verdict is Verdict.rounding for rung in rungs)
        more = "; what is left is rounding, which a correction may be switched on for" if coarse else ""
        return [f"Nothing to change: no rung differs{more}."]
    if not found:
        return ["A rung differs, but no cause was found that could be changed."]
    lines = ["What to change, in order, before any correction is switched on:"]
    for i, rung in enumerate(found, 1):
        assert rung.cause is not None
        lines.append(f"  {i}. [{rung.cause.side}] {rung.cause.mend}")
        lines += [f"       {part}" for part in wrap(f"because {rung.cause.text}", WIDTH - 8)]
    return lines


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def plain(rung: Rung) -> dict[str, Any]:
    """A rung as JSON holds it; what is not a number there is null."""
    cause = rung.cause
    return {
        "section": rung.section.name,
        "rung": rung.name,
        "compared": rung.compared,
        "verdict": rung.verdict.name,
        "value": finite(rung.value),
        "error": finite(rung.error),
        "bound": finite(rung.bound),
        "unit": rung.unit,
        "count": rung.count,
        "cause": cause.name if cause is not None else None,
        "what": cause.text if cause is not None else None,
        "mend": cause.mend if cause is not None else None,
        "side": cause.side if cause is not None else None,
        "follows": rung.follows,
        "note": rung.note,
    }


def document(rungs: Sequence[Rung], overrides: Sequence[str], engine: Mapping[str, Any]) -> dict[str, Any]:
    """What parity.json holds."""
    return {
        "healthy": healthy(rungs),
        "changes": [plain(rung) for rung in changes(rungs)],
        "rungs": [plain(rung) for rung in rungs],
        "overrides": list(overrides),
        "engine": {
            key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in engine.items()
        },
    }


def as_csv(rungs: Sequence[Rung]) -> str:
    """A line for each rung."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain(rung) for rung in rungs)
    return out.getvalue()
