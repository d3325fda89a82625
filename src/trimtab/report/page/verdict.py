"""The verdict in sentences: which setting is better than the baseline, by how much, how surely, or why that is open."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.report.model import Row, Verdict
from trimtab.report.page.svg import tag
from trimtab.report.page.text import bounds, count, esc, fixed, number, p_value, places, short
from trimtab.report.page.view import View, name, section

SIGNS = {Verdict.better: "▲", Verdict.worse: "▼", Verdict.undecided: "◇", Verdict.untested: "·"}
WORDS = {Verdict.better: "better", Verdict.worse: "worse", Verdict.undecided: "undecided", Verdict.untested: "untested"}
OPEN = 6
"""Sentences of one verdict that stand open; more of them fold away, counted."""


def compared(v: View) -> list[Row]:
    """The rows that are held against the baseline, largest difference first."""
    rows = [row for row in v.order if row.setting.label != v.comparison.baseline]
    return sorted(rows, key=lambda row: -row.difference.interval.mean if row.difference.pairs else float("inf"))


def headline(v: View) -> str:
    """One sentence over all comparisons, as HTML."""
    rows, base = compared(v), esc(short(v.comparison.baseline, 80))
    by = {verdict: [row for row in rows if row.difference.verdict is verdict] for verdict in Verdict}
    if not v.order:
        return "No run has metrics: there is nothing to compare"
    if not rows:
        return "One setting only: there is nothing to compare it with"
    if v.base is None:
        return "No baseline among these runs, so nothing was tested"
    best = by[Verdict.better]
    if len(best) == 1:
        return f"<bdi>{esc(short(best[0].setting.label, 80))}</bdi> is better than <bdi>{base}</bdi>"
    if best:
        return f"{len(best)} of {count(len(rows), 'setting')} are better than <bdi>{base}</bdi>"
    if len(by[Verdict.worse]) == len(rows):
        return f"<bdi>{base}</bdi> is better than {'all ' if len(rows) > 1 else ''}{count(len(rows), 'other setting')}"
    if by[Verdict.untested] and not by[Verdict.undecided] and not by[Verdict.worse]:
        return f"Too few seeds to test anything against <bdi>{base}</bdi>"
    return f"Undecided: no setting is shown to be better than <bdi>{base}</bdi>"


def standing(v: View) -> str:
    """What is compared, in one line."""
    c = v.comparison
    runs = sum(len(row.setting.runs) for row in v.order)
    seeds = len({run.seed for run in v.runs if run.seed is not None})
    return (
        f"{count(len(v.order), 'setting')}, {count(runs, 'run')}, {count(seeds, 'seed')}. Score: mean of the last "
        f"{count(c.last, 'value')} of <code>{esc(c.metric)}</code>. Baseline: <bdi>{esc(c.baseline or 'none')}</bdi>."
    )


def sentence(v: View, row: Row) -> str:
    """One comparison, as HTML: verdict, size, interval, pairs, p value."""
    difference = row.difference
    interval, base = difference.interval, f"<bdi>{esc(v.comparison.baseline)}</bdi>"
    if difference.verdict is Verdict.untested:
        why = interval.why or "fewer than two seeds in common with the baseline"
        return f"{name(v, row.setting.label)} was not tested against {base}: {esc(why)}."
    decimals = places([interval.mean, interval.low or 0.0, interval.high or 0.0])
    size = fixed(interval.mean, decimals, sign=True)
    across = bounds(interval.low, interval.high, decimals, sign=True)
    surely = f"95% interval {across}, {count(interval.n, 'pair')} of seeds, {p_value(difference.p_corrected)} corrected"
    match difference.verdict:
        case Verdict.better:
            return f"{name(v, row.setting.label)} is <strong>better</strong> than {base} by {size} ({surely})."
        case Verdict.worse:
            return f"{name(v, row.setting.label)} is <strong>worse</strong> than {base} by {size} ({surely})."
        case Verdict.undecided:
            return (
                f"{name(v, row.setting.label)} against {base} is <strong>undecided</strong>: {size} ({surely}); "
                f"{_why(row)}."
            )


def _why(row: Row) -> str:
    interval = row.difference.interval
    if interval.low is None or interval.high is None:
        return esc(interval.why or "too few seeds for an interval")
    if interval.low <= 0.0 <= interval.high:
        return "the interval holds 0"
    return f"the interval alone leaves out 0 (p = {number(row.difference.p)}), but not after the correction"


def verdicts(v: View) -> str:
    """The sentences, better ones first."""
    rows = compared(v)
    blocks = [_block(v, [row for row in rows if row.difference.verdict is verdict], verdict) for verdict in
              (Verdict.better, Verdict.worse, Verdict.undecided, Verdict.untested)]  # fmt: skip
    notes = (
        tag("ul", *[tag("li", esc(note)) for note in v.comparison.notes], class_="note") if v.comparison.notes else ""
    )
    return section("verdict", "Verdict", *blocks, notes) if rows or notes else ""


def _block(v: View, rows: Sequence[Row], verdict: Verdict) -> str:
    if not rows:
        return ""
    items = [
        tag("li", tag("span", SIGNS[verdict], class_=f"sign {verdict.value}", aria_hidden="true"),
            tag("span", sentence(v, row)))
        for row in rows
    ]  # fmt: skip
    made = tag("ul", *items[:OPEN], class_="verdicts")
    if len(items) > OPEN:
        more = f"{count(len(items) - OPEN, 'more setting')} {WORDS[verdict]}"
        made += tag("details", tag("summary", more), tag("ul", *items[OPEN:], class_="verdicts"))
    return made
