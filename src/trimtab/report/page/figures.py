"""Figures that stand still: reward against mismatch, small multiples, parallel coordinates, compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.report.curves import Axis, Curve, lonely
from trimtab.report.model import Run
from trimtab.report.page.svg import Scale, axes, coordinate, line, marker, path, room, span, tag
from trimtab.report.page.text import aligned, big, duration, esc, fixed, number, short
from trimtab.report.page.view import MISMATCH, SMALL, View, everywhere, injected, metric_of, name, section, tail
from trimtab.report.score import scores_of

Curves = Mapping[tuple[str, str, Axis], Curve]
"""(setting, metric, axis) to its curve, thinned out."""


def group(v: View, label: str, *body: str) -> str:
    """What belongs to one setting: its colour, and hidden along with it."""
    hidden = "" if v.shown(label) else " off"
    return tag("g", *body, class_=v.class_of(label) + hidden, data_s=v.index[label])


# -- reward against mismatch -----------------------------------------------------------------------------------------


def scatter(v: View) -> str:
    """Each run's score against its mismatch KL."""
    metric, last = v.comparison.metric, v.comparison.last
    spots = {
        row.setting.label: [(tail(run, MISMATCH, last), _score(v, run), run) for run in row.setting.runs]
        for row in v.order
    }
    flat = [(x, y) for found in spots.values() for x, y, _ in found if math.isfinite(x) and math.isfinite(y)]
    title, about = "Reward against mismatch", "How far trainer and engine are apart, and what the policy earns."
    if not flat:
        return section("scatter", title, tag("p", f"No run logs both <code>{MISMATCH}</code> and the score."))
    xs, ys = [x for x, _ in flat], [y for _, y in flat]
    log = min(xs) > 0 and max(xs) / min(xs) > 20
    low, high = (min(xs) / 1.4, max(xs) * 1.4) if log else span(xs, floor=0.0)
    y = Scale(*span(ys), 352, 14)
    x = Scale(low, high, room(y, 52), 546, log)
    drawn = [axes(x, y, "mismatch KL (k3) in nats, " + ("log scale" if log else "mean of the last values"))]
    for label, found in spots.items():
        there = [(a, b, run) for a, b, run in found if math.isfinite(a) and math.isfinite(b)]
        setting = next(s for s in v.settings if s.label == label)
        ring = " ring" if injected(setting) and not everywhere(v) else ""
        body = [
            marker(v.look(label).marker, x(a), y(b), f"dot soft{ring}", _told(label, run, a, b), size=1.25)
            for a, b, run in there
        ]
        drawn.append(group(v, label, *body))
    some = any(map(injected, v.settings)) and not everywhere(v)
    lead = about + (" Rings: runs with an injected mismatch." if some else "")
    chart = _chart(drawn, 560, 394, f"Scatter of score against mismatch KL, {len(flat)} runs")
    return section("scatter", title, heading(metric_of(metric).heading), chart, lead=lead)


def _told(label: str, run: Run, gap: float, value: float) -> str:
    extra = f", injected {run.injected}" if run.injected else ""
    return f"{short(label, 80)}, seed {run.seed}: KL {number(gap)}, score {fixed(value, 4)}{extra}"


def _score(v: View, run: Run) -> float:
    value = scores_of(v.comparison).get(id(run))
    return math.nan if value is None else value


def heading(text: str) -> str:
    """A figure's y axis."""
    return tag("p", esc(text), class_="yname")


def _chart(drawn: Sequence[str], width: int, height: int, about: str) -> str:
    made = tag("svg", *drawn, viewBox=f"0 0 {width} {height}", class_="chart", role="img", tabindex=0, data_points="",
               aria_label=about + ". Arrow keys go from point to point.")  # fmt: skip
    return tag("div", made, class_="figure")


# -- small multiples -------------------------------------------------------------------------------------------------


def multiples(v: View, curves: Curves) -> str:
    """One small panel a metric, over steps."""
    made, lacking = [], []
    for key in SMALL:
        found = {s.label: curves[s.label, key, Axis.step] for s in v.settings if (s.label, key, Axis.step) in curves}
        if found:
            made.append(_panel(v, key, found))
        else:
            lacking.append(metric_of(key).title.lower())
    note = tag("p", "Logged by no run: " + esc(", ".join(lacking)) + ".", class_="note") if lacking else ""
    lead = "Means over seeds, by step; every panel has its own scale. A title opens the metric in the large figure."
    return section("health", "Health of the training", tag("div", *made, class_="multiples"), note, lead=lead)


def _panel(v: View, key: str, found: Mapping[str, Curve]) -> str:
    metric = metric_of(key)
    steps = [value for curve in found.values() for value in (curve.x[0], curve.x[-1])]
    y = Scale(*span([value for curve in found.values() for value in curve.mean], floor=0.0), 128, 10)
    x = Scale(min(steps), max(max(steps), min(steps) + 1), room(y, 46, 3), 312)
    drawn = [axes(x, y, "", most_x=3, most_y=3)]
    for label, curve in found.items():
        dots = [marker("circle", x(curve.x[i]), y(curve.mean[i]), "dot", size=0.7) for i in lonely(curve.mean)]
        drawn.append(group(v, label, tag("path", d=line(curve.x, curve.mean, x, y), class_="line thin"), *dots))
    last = "; ".join(f"{v.short[label]}: {number(_last(curve))}" for label, curve in list(found.items())[:12])
    chart = tag("svg", *drawn, viewBox="0 0 320 152", class_="chart", role="img",
                aria_label=f"{metric.title} by step. Last values: {last}")  # fmt: skip
    button = tag("button", esc(metric.title), tag("span", esc(metric.unit)), type="button", data_open=key)
    return tag("figure", tag("figcaption", button), chart)


def _last(curve: Curve) -> float:
    finite = [float(value) for value in curve.mean if math.isfinite(value)]
    return finite[-1] if finite else math.nan


# -- parallel coordinates --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Measures of parallel coordinates: where the first axis stands, how far apart they are, room at the right."""

    class_: str
    left: float
    step: float
    right: float
    title: int
    value: int


def parallel(v: View) -> str:
    """One line a setting, through the values of what differs to its score; drawn for wide and for slim screens."""
    keys = v.comparison.keys
    title = "Settings to score"
    if not keys or len(v.order) < 2:
        return section("parallel", title, tag("p", "The runs differ in nothing but their seed."))
    wide = Plan("wide", 80, max(150.0, 640.0 / len(keys)), 90, 22, 18)
    slim = Plan("slim", 30, max(124.0, 264.0 / len(keys)), 64, 16, 14)
    lead = "Each line is a setting; on an axis of settings lines stand a little apart so that none covers another."
    charts = [_coordinates(v, keys, plan) for plan in (wide, slim)]
    return section("parallel", title, tag("div", *charts, class_="figure scroll", tabindex=0, role="region",
                                            aria_label="Parallel coordinates"), lead=lead)  # fmt: skip


def _coordinates(v: View, keys: Sequence[str], plan: Plan) -> str:
    top, bottom = 46.0, 330.0
    rows = [row for row in v.order if math.isfinite(row.interval.mean)]
    y = Scale(*span([row.interval.mean for row in rows]), bottom, top)
    end = plan.left + len(keys) * plan.step
    drawn, place, names = list[str](), dict[str, tuple[float, dict[str, float]]](), list[str]()
    for i, key in enumerate(keys):
        at = plan.left + i * plan.step
        values = _sorted({row.setting.values.get(key, "–") for row in v.order})
        gap = (bottom - top) / max(len(values) - 1, 1)
        place[key] = (at, {value: bottom - j * gap if len(values) > 1 else (top + bottom) / 2
                           for j, value in enumerate(values)})  # fmt: skip
        drawn.append(_axis(at, top, bottom, short(key, plan.title), first=i == 0))
        names += [
            tag("text", esc(short(value, plan.value)), tag("title", esc(value)), x=at + 7,
                y=place[key][1][value] - 5, class_="tick value")
            for value in values[:: math.ceil(len(values) / 20)]
        ]  # fmt: skip
    drawn.append(_axis(end, top, bottom, "score"))
    marks = y.ticks(6)
    drawn += [tag("text", text, x=end + 10, y=y(at) + 4, class_="tick")
              for at, text in zip(marks, aligned(marks), strict=True)]  # fmt: skip
    lines = []
    for i, row in enumerate(reversed(rows)):
        shift = (i / max(len(rows) - 1, 1) - 0.5) * 12
        points = [(place[key][0], place[key][1][row.setting.values.get(key, "–")] + shift) for key in keys]
        spot, label = (end, y(row.interval.mean)), row.setting.label
        dot = marker(v.look(label).marker, *spot, "dot", f"{short(label, 100)}: {fixed(row.interval.mean, 4)}")
        lines.append(group(v, label, tag("path", d=path([*points, spot]), class_="line"), dot))
    width = math.ceil(end + plan.right)
    return tag("svg", *drawn, *lines, *names, viewBox=f"0 0 {width} 360", class_=f"chart {plan.class_}", role="img",
               tabindex=0, width=width, data_points="",
               aria_label=f"Parallel coordinates over {', '.join(keys)} to the score")  # fmt: skip


def _axis(at: float, top: float, bottom: float, title: str, first: bool = False) -> str:
    """``first``: its title starts at the axis, as left of it there is no room."""
    return tag("line", x1=at, x2=at, y1=top - 10, y2=bottom + 10, class_="axis") + tag(
        "text",
        esc(title),
        x=at - 6 if first else at,
        y=top - 22,
        class_="tick first name" if first else "tick mid name",
    )


def _sorted(values: set[str]) -> list[str]:
    """Numbers by size, then texts."""

    def by(value: str) -> tuple[int, float, str]:
        try:
            return 0, float(value), value
        except ValueError:
            return 1, 0.0, value

    return sorted(values, key=by)


# -- compute ---------------------------------------------------------------------------------------------------------


def compute(v: View) -> str:
    """What a run of each setting cost, as numbers with bars."""
    keys = list(dict.fromkeys(key for row in v.order for key in row.cost))
    if not keys:
        return section("compute", "Compute", tag("p", "No run says what it cost."))
    most = {key: max((row.cost.get(key, 0.0) for row in v.order), default=0.0) or 1.0 for key in keys}
    titles = {"seconds": "Wall time", "tokens": "Response tokens", "steps": "Steps"}
    heads = [
        tag("th", "Setting", scope="col", class_="setting"),
        *[tag("th", esc(titles.get(k, k)), scope="col") for k in keys],
    ]
    if {"seconds", "tokens"} <= set(keys):
        heads.append(tag("th", "Tokens a second", scope="col", class_="num"))
    rows = []
    for row in v.order:
        cells = [tag("th", name(v, row.setting.label), scope="row", class_="setting")]
        cells += [_bar(row.cost.get(key), most[key], key, titles.get(key, key)) for key in keys]
        if {"seconds", "tokens"} <= set(keys):
            seconds, tokens = row.cost.get("seconds", math.nan), row.cost.get("tokens", math.nan)
            cells.append(tag("td", number(tokens / seconds) if seconds > 0 else "–", class_="num",
                             data_label="Tokens a second"))  # fmt: skip
        rows.append(tag("tr", *cells, class_=v.class_of(row.setting.label)))
    made = tag(
        "table",
        tag("thead", tag("tr", *heads)),
        tag("tbody", *rows),
        class_="compute",
        aria_label="Cost of a run by setting",
    )
    return section("compute", "Compute", tag("div", made, class_="scroll", tabindex=0, role="region",
                                               aria_label="Compute"), lead="Means over a setting's runs.")  # fmt: skip


def _bar(value: float | None, most: float, key: str, title: str) -> str:
    if value is None or not math.isfinite(value):
        return tag("td", "–", data_label=title)
    text = duration(value) if key == "seconds" else big(value)
    filled = tag("rect", width=coordinate(100 * value / most), height=8, rx=2, class_="bar")
    bar = tag("svg", filled, width=100, height=8, viewBox="0 0 100 8", aria_hidden="true")
    return tag("td", bar, tag("span", text), data_label=title)


def _marked(v: View, label: str) -> str:
    setting = next(s for s in v.settings if s.label == label)
    return tag("span", "injected", class_="badge injected") if injected(setting) and not everywhere(v) else ""


def legend(v: View) -> str:
    """A toggle for each setting, over all figures of the page."""
    buttons = [
        tag("button", name(v, label, badge=False) + _marked(v, label), type="button",
            aria_pressed="true" if v.shown(label) else "false", data_s=v.index[label])
        for label in v.index
    ]  # fmt: skip
    shown = sum(v.shown(label) for label in v.index)
    note = "" if shown == len(v.index) else f"Shown at first: {shown} of {len(v.index)}, the best and the baseline."
    all_ = tag("button", "all", type="button", data_all="true") + tag("button", "none", type="button", data_all="false")
    return tag("div", tag("div", *buttons, class_="keys"), tag("div", all_, tag("span", note), class_="quiet allnone"),
               class_="legend", role="group", aria_label="Settings in the figures")  # fmt: skip
