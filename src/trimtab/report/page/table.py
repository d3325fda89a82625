"""The table of settings: every seed as a dot, mean, interval, paired difference, training reward, cost; problems."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.report.model import Interval, Row
from trimtab.report.page.svg import Scale, marker, span, tag
from trimtab.report.page.text import aligned, big, bounds, count, duration, esc, fixed, number, p_value, places, visible
from trimtab.report.page.verdict import SIGNS, WORDS
from trimtab.report.page.view import View, metric_of, name, section

WIDE, TALL = 250, 30
BESIDE = ("eval/reward_greedy", "train/reward", "train/reward_weighted", "train/mis_k3_kl")
HEADS = {"eval/reward_greedy": "Greedy reward", "train/mis_k3_kl": "Mismatch KL, nats",
         "train/reward": "Training reward, raw", "train/reward_weighted": "Training reward, weighted"}  # fmt: skip


def table(v: View) -> str:
    """The settings by rank."""
    if not v.order:
        return ""
    scores = [x for row in v.order for x in (*row.scores.values(), *_ends(row.interval))]
    gaps = [x for row in v.order for x in (0.0, row.difference.interval.mean, *_ends(row.difference.interval))]
    rulers = Rulers(Scale(*span(scores), 8, WIDE - 8), Scale(*span(gaps), 8, WIDE - 8))
    others = [key for key in BESIDE if any(key in row.other for row in v.order)]
    heads = [
        _head("Rank"), _head("Setting", "setting"), _head("Score of every seed, mean" + _ruler(rulers.score), raw=True),
        _head("Paired difference to the baseline" + _ruler(rulers.gap), raw=True),
        *[_head(HEADS.get(key, metric_of(key).title), "num") for key in others], _head("Cost of a run", "num"),
    ]  # fmt: skip
    rows = [_row(v, row, rulers, others) for row in v.order]
    body = tag("thead", tag("tr", *heads, role="row"), role="rowgroup") + tag("tbody", *rows, role="rowgroup")
    caption = tag("caption", "By rank. A dot is a seed; the bar is the 95% t interval; the tall line is the mean; "
                  "dashed is the baseline. Small strokes under a difference: its pairs of seeds.")  # fmt: skip
    made = tag("table", caption, body, class_="settings", role="table")
    note = tag("p", f"Rank is by {esc(metric_of(v.comparison.metric).title.lower())}, never by training reward: what a "
               "correction weights or rejects changes the training reward's meaning.", class_="note")  # fmt: skip
    return section("settings", "Settings", tag("div", made, class_="scroll", tabindex=0, role="region",
                                                 aria_label="Table of settings"), note)  # fmt: skip


@dataclass(frozen=True)
class Rulers:
    """The common scales of all rows, and the decimals that fit them."""

    score: Scale
    gap: Scale


def _ends(interval: Interval) -> list[float]:
    return [v for v in (interval.low, interval.high) if v is not None]


def _decimals(interval: Interval) -> int:
    """By the row's own interval: a wild neighbour must not round a difference to +0.00."""
    return places([interval.mean, *_ends(interval)])


def _head(text: str, class_: str = "", raw: bool = False) -> str:
    return tag("th", text if raw else esc(text), scope="col", class_=class_ or None, role="columnheader")


def _cell(label: str, body: str, class_: str = "") -> str:
    return tag("td", body, data_label=label, class_=class_ or None, role="cell")


def _ruler(scale: Scale) -> str:
    marks = scale.ticks(4)
    drawn = [
        tag("line", x1=scale(at), x2=scale(at), y1=13, y2=18, class_="axis")
        + tag("text", text, x=scale(at), y=10, class_="tick mid")
        for at, text in zip(marks, aligned(marks), strict=True)
    ]
    return tag("svg", *drawn, class_="ruler", viewBox=f"0 0 {WIDE} 18", width=WIDE, height=18, aria_hidden="true")


def _row(v: View, row: Row, rulers: Rulers, others: list[str]) -> str:
    warning = "; ".join(part for part in row.warning.split("; ") if not part.startswith("injected mismatch"))
    cells = [
        _cell("Rank", "–" if row.rank is None else str(row.rank), "rank"),
        tag("th", name(v, row.setting.label), _full(v, row.setting.label),
            tag("p", esc(warning), class_="warning") if warning else "",
            scope="row", role="rowheader", class_="setting"),
        _cell("Score of every seed, mean", _ruler(rulers.score) + _strip(v, row, rulers.score)
              + _mean(row, _decimals(row.interval)), "drawn"),
        _cell("Paired difference to the baseline",
              _forest(v, row, rulers.gap) + _paired(v, row, _decimals(row.difference.interval)), "drawn"),
    ]  # fmt: skip
    for key in others:
        other = row.other.get(key)
        text = "–" if other is None else number(other.mean)
        cells.append(_cell(HEADS.get(key, metric_of(key).title), text, "num"))
    cells.append(_cell("Cost of a run", cost(row.cost), "num"))
    return tag("tr", *cells, class_=v.class_of(row.setting.label), role="row")


def _full(v: View, label: str) -> str:
    """All of a name that is shortened, for who has no pointer to rest on it."""
    if v.short[label] == visible(label):
        return ""
    return tag("details", tag("summary", "full name"), tag("bdi", esc(label)), class_="full")


def _mean(row: Row, decimals: int) -> str:
    fine = row.interval
    seeds = f"{fine.n} of {count(row.expected, 'seed')}" if row.expected > fine.n else count(fine.n, "seed")
    within = bounds(fine.low, fine.high, decimals)
    robust = row.robust
    iqm = (
        ""
        if robust is None
        else _small(f"IQM {fixed(robust.mean, decimals)}, bootstrap {bounds(robust.low, robust.high, decimals)}")
    )
    beside = tag("span", within or esc(fine.why), class_="quiet") + " " + tag("span", seeds, class_="seeds")
    return tag("p", tag("b", fixed(fine.mean, decimals)), " ", beside, class_="told") + iqm


def _small(text: str) -> str:
    return tag("small", esc(text)) if text else ""


def cost(costs: Mapping[str, float]) -> str:
    """Wall time, then what else there is."""
    parts = [duration(value) if key == "seconds" else f"{big(value)} {esc(key)}" for key, value in costs.items()]
    return (parts[0] if parts else "–") + "".join(tag("small", part) for part in parts[1:])


def _strip(v: View, row: Row, x: Scale) -> str:
    label, middle = row.setting.label, TALL / 2
    drawn = []
    if v.base is not None and math.isfinite(v.base.interval.mean):
        at = x(v.base.interval.mean)
        drawn.append(tag("line", x1=at, x2=at, y1=0, y2=TALL, class_="baseline"))
    fine = row.interval
    if fine.low is not None and fine.high is not None:
        drawn.append(tag("rect", x=x(fine.low), y=middle - 5, width=max(x(fine.high) - x(fine.low), 1.0), height=10,
                         rx=2, class_="interval"))  # fmt: skip
    if math.isfinite(fine.mean):
        drawn.append(tag("line", x1=x(fine.mean), x2=x(fine.mean), y1=3, y2=TALL - 3, class_="mean"))
    for i, (seed, score) in enumerate(sorted(row.scores.items())):
        place = middle + (i % 3 - 1) * (3.0 if len(row.scores) > 6 else 0.0)
        drawn.append(marker(v.look(label).marker, x(score), place, "dot", f"seed {seed}: {fixed(score, 4)}"))
    seeds = "; ".join(f"seed {seed}: {fixed(score, 4)}" for seed, score in sorted(row.scores.items()))
    return _figure(drawn, f"Scores of {label}. {seeds or 'no run has a score'}")


def _figure(drawn: list[str], about: str) -> str:
    return tag("svg", *drawn, class_="strip", viewBox=f"0 0 {WIDE} {TALL}", width=WIDE, height=TALL,
               role="img", tabindex=0, data_points="", aria_label=about)  # fmt: skip


def _forest(v: View, row: Row, gap: Scale) -> str:
    if row.setting.label == v.comparison.baseline or not row.difference.pairs:
        return ""
    interval, middle = row.difference.interval, TALL / 2
    drawn = [tag("line", x1=gap(0.0), x2=gap(0.0), y1=0, y2=TALL, class_="baseline")]
    if interval.low is not None and interval.high is not None:
        drawn.append(tag("line", x1=gap(interval.low), x2=gap(interval.high), y1=middle, y2=middle, class_="whisker"))
    drawn.append(tag("circle", cx=gap(interval.mean), cy=middle, r=4, class_="dot",
                     data_tip=f"mean difference {fixed(interval.mean, 4, sign=True)}"))  # fmt: skip
    for seed, value in row.difference.pairs:
        if gap.low <= value <= gap.high:
            drawn.append(tag("line", x1=gap(value), x2=gap(value), y1=middle + 6, y2=middle + 11, class_="pair",
                             data_tip=f"seed {seed}: {fixed(value, 4, sign=True)}"))  # fmt: skip
    pairs = "; ".join(f"seed {seed}: {fixed(value, 4, sign=True)}" for seed, value in row.difference.pairs)
    return _ruler(gap) + _figure(drawn, f"Differences of {row.setting.label} to the baseline. {pairs}")


def _paired(v: View, row: Row, decimals: int) -> str:
    if row.setting.label == v.comparison.baseline:
        return tag("span", "the baseline", class_="quiet")
    difference, fine = row.difference, row.difference.interval
    word = tag("span", SIGNS[difference.verdict] + " " + WORDS[difference.verdict],
               class_=f"word {difference.verdict.value}")  # fmt: skip
    if not difference.pairs:
        return word + _small(fine.why or "no seed in common with the baseline")
    within = bounds(fine.low, fine.high, decimals, sign=True)
    p = "" if difference.p is None else f"{p_value(difference.p_corrected)} corrected, "
    size = tag("p", tag("b", fixed(fine.mean, decimals, sign=True)), " ",
               tag("span", within or esc(fine.why), class_="quiet"), class_="told")  # fmt: skip
    return size + tag("p", word, " ", tag("span", f"{esc(p)}{count(fine.n, 'pair')}", class_="quiet"), class_="told")


# -- problems --------------------------------------------------------------------------------------------------------


def problems(v: View) -> str:
    """Every run and setting with something wrong, by kind; none is left out."""
    found = v.comparison.problems
    if not found:
        text = "None: every expected run is there, completed, with finite metrics, and no setting lacks a seed."
        return section("problems", "Problems", tag("p", text))
    kinds = dict.fromkeys(problem.kind for problem in found)
    made = []
    for kind in kinds:
        rows = [problem for problem in found if problem.kind == kind]
        items = [
            tag("li", tag("bdi", esc(p.run), class_="name") if p.run else "", " ", tag("span", esc(p.text)))
            for p in rows
        ]
        made.append(tag("h3", esc(kind), tag("span", str(len(rows)), class_="count")))
        made.append(tag("ul", *items, class_="problems"))
    return section("problems", "Problems", *made)
