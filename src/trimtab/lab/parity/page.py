"""The ladder as one HTML page, which ends with what to change."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.lab.frame import document, section, table
from trimtab.lab.parity.model import Rung, Section, Verdict, changes, healthy
from trimtab.lab.parity.tables import told
from trimtab.report.page.svg import tag
from trimtab.report.page.text import esc, visible

CSS = """
.ladder .verdict{font-weight:600}.ladder thead th{text-align:left!important}
.ladder .v-differs{color:var(--bad)}.ladder .v-follows,.ladder .v-off,.ladder .v-untestable{color:var(--soft)}
.ladder .v-equal{color:var(--good,var(--ink))}
.ladder table{width:100%;table-layout:fixed;min-width:0}
.ladder td,.ladder tbody th{vertical-align:top;text-align:left;white-space:normal;overflow-wrap:anywhere}
.ladder td p,.changes p{margin:.15rem 0}.ladder .why{color:var(--soft);font-size:.9em}
.changes li{margin:.6rem 0}.changes code{white-space:pre-wrap}
"""
LEADS = {
    Section.semantics: "What the log-probs mean: of which distribution, of which token, and whether tokens follow it.",
    Section.path: "Whether the way an answer is computed changes it: batches, caches, chunks.",
    Section.weights: "Whether the engine has the trainer's weights after each hand-over; every weight moves by 4 % of "
    "its tensor's size, handed over as in a run, and verified by scoring.",
    Section.numerics: "What the number formats cost on each side. Rounding is no fault: corrections are for it.",
}


def headline(rungs: Sequence[Rung]) -> str:
    """The result in a sentence."""
    found = changes(rungs)
    if healthy(rungs):
        coarse = any(rung.verdict is Verdict.rounding for rung in rungs)
        return "Engine and trainer agree" + (" within the rounding of their dtypes" if coarse else "")
    if not found:
        return "Engine and trainer disagree, and no cause was found"
    first = found[0].cause
    assert first is not None
    text = visible(first.text)
    return f"Engine and trainer disagree: {text[:200]}" + ("" if len(found) == 1 else f" (and {len(found) - 1} more)")


def page(rungs: Sequence[Rung], about: Sequence[str], overrides: Sequence[str], engine: Mapping[str, Any]) -> str:
    """The page as text, to be written as UTF-8; it needs no network, no script and no other file."""
    parts = [
        section(part.name, part.value.capitalize(), tag("div", _table(those), class_="ladder"), lead=LEADS[part])
        for part in Section
        if (those := [rung for rung in rungs if rung.section is part])
    ]
    words = shlex.join(["trimtab", "parity", *overrides])
    settings = [(key, json.dumps(value) if not isinstance(value, str) else value) for key, value in engine.items()]
    parts.append(
        section(
            "setup",
            "What was run",
            tag("p", tag("code", esc(words)), class_="run"),
            table(("engine's own settings", "in effect"), settings),
        )
    )
    parts.append(section("changes", "What to change, in order, before any correction is switched on", _changes(rungs)))
    return document("trimtab parity: engine against trainer", headline(rungs), about, "".join(parts), CSS)


def _table(rungs: Sequence[Rung]) -> str:
    rows = []
    for rung in rungs:
        kind = "follows" if rung.fault and rung.follows else rung.verdict.name
        why = esc(rung.cause.text) if rung.cause is not None and rung.fault else esc(rung.note)
        rows.append(
            (
                esc(rung.name),
                tag("span", esc(told(rung)), class_=f"verdict v-{kind}") + (tag("p", why) if why else ""),
                tag("span", esc(rung.compared), class_="why"),
            )
        )
    return table(("rung", "verdict", "compared"), rows, html=True)


def _changes(rungs: Sequence[Rung]) -> str:
    found = changes(rungs)
    if not found:
        return tag("p", "Nothing." if healthy(rungs) else "No cause was found that could be changed.")
    items = []
    for rung in found:
        assert rung.cause is not None
        items.append(
            tag(
                "li",
                tag("p", tag("strong", esc(rung.cause.side)), " ", tag("code", esc(rung.cause.mend))),
                tag("p", esc(rung.cause.text)),
                tag("p", esc(f"{rung.section.value}: {rung.name}, {told(rung)}"), class_="why"),
            )
        )
    return tag("ol", *items, class_="changes")
