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
    """One sentence over all comparisons, as HTML, with the seeds that it lacks."""
    rows, base = compared(v), esc(short(v.comparison.baseline, 80))
    by = {verdict: [row for row in rows if row.difference.verdict is verdict] for verdict in Verdict}
    if not v.order:
        return "No run has metrics: there is nothing to compare"
    if not rows:
        return "One setting only: there is nothing to compare it with" + _lost(v, v.order)
    if v.base is None:
        return "No baseline among these runs, so nothing was tested" + _lost(v, rows)
    best = by[Verdict.better]
    if len(best) == 1:
        return f"<bdi>{esc(short(best[0].setting.label, 80))}</bdi> is better than <bdi>{base}</bdi>" + _lost(v, best)
    if best:
        return f"{len(best)} of {count(len(rows), 'setting')} are better than <bdi>{base}</bdi>" + _lost(v, best)
    if len(by[Verdict.worse]) == len(rows):
        others = f"{'all ' if len(rows) > 1 else ''}{count(len(rows), 'other setting')}"
        return f"<bdi>{base}</bdi> is better than {others}" + _lost(v, rows)
    if by[Verdict.untested] and not by[Verdict.undecided] and not by[Verdict.worse]:
        return f"Too few seeds to test anything against <bdi>{base}</bdi>" + _lost(v, rows)
    return f"Undecided: no setting is shown to be better than <bdi>{base}</bdi>" + _lost(v, rows)


def _lost(v: View, rows: Sequence[Row]) -> str:
    """`` (3 of its 6 seeds failed)`` of the one setting spoken of; else by name, or how many settings lack seeds."""
    base = [v.base] if v.base is not None and all(row is not v.base for row in rows) else []
    found = [row for row in (*rows, *base) if row.lost]
    if not found:
        return ""
    if len(found) > 2:
        return f" ({len(found)} settings lack seeds)"
    parts = [
        esc(row.lost) if len(rows) == 1 and row is rows[0] else f"<bdi>{esc(short(row.setting.label, 60))}</bdi>: "
        f"{esc(row.lost)}"
        for row in found
    ]  # fmt: skip
    return f" ({'; '.join(parts)})"


def standing(v: View) -> str:
    """What is compared, in one line."""
    c = v.comparison
    runs = sum(len(row.setting.runs) for row in v.order)
    seeds = len({run.seed for run in v.runs if run.seed is not None})
    at = "" if c.at is None else f", at step {c.at}, the last that every setting reaches"
    return (
        f"{count(len(v.order), 'setting')}, {count(runs, 'run')}, {count(seeds, 'seed')}. Score: mean of the last "
        f"{count(c.last, 'value')} of <code>{esc(c.metric)}</code>{at}. "
        f"Baseline: <bdi>{esc(c.baseline or 'none')}</bdi>."
    )


def sentence(v: View, row: Row) -> str:
    """One comparison, as HTML: verdict, size, interval, pairs, p value, and the seeds that it lacks."""
    difference = row.difference
    lost = f"; {esc(difference.claim)}" if difference.claim else ""
    interval, base = difference.interval, f"<bdi>{esc(v.comparison.baseline)}</bdi>"
    if difference.verdict is Verdict.untested:
        why = interval.why or "fewer than two seeds in common with the baseline"
        return f"{name(v, row.setting.label)} was not tested against {base}: {esc(why)}{lost}."
    decimals = places([interval.mean, interval.low or 0.0, interval.high or 0.0])
    size = fixed(interval.mean, decimals, sign=True)
    across = bounds(interval.low, interval.high, decimals, sign=True)
    surely = f"95% interval {across}, {count(interval.n, 'pair')} of seeds, {p_value(difference.p_corrected)} corrected"
    match difference.verdict:
        case Verdict.better:
            return f"{name(v, row.setting.label)} is <strong>better</strong> than {base} by {size} ({surely}){lost}."
        case Verdict.worse:
            return f"{name(v, row.setting.label)} is <strong>worse</strong> than {base} by {size} ({surely}){lost}."
        case Verdict.undecided:
            return (
                f"{name(v, row.setting.label)} against {base} is <strong>undecided</strong>: {size} ({surely}); "
                f"{_why(row)}{lost}."
            )


def _why(row: Row) -> str:
    interval = row.difference.interval
    if interval.low is None or interval.high is None:
        return esc(interval.why or "too few seeds for an interval")
    if interval.low <= 0.0 <= interval.high:
        return "the interval holds 0"
    without = f"the interval alone leaves out 0 (p = {number(row.difference.p)})"
    if row.difference.claim and row.difference.p != row.difference.p_lost:
        return f"{without}, but it is over the seeds that are left"
    return f"{without}, but not after the correction"


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
