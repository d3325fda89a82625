"""A probe's figures in SVG: scatter, histogram, along position, by length, by entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trimtab.lab.bootstrap import Estimate
from trimtab.lab.curves import Bin, Token
from trimtab.lab.frame import chart, figure
from trimtab.lab.probe import Probed
from trimtab.lab.tables import stretch
from trimtab.report.page.svg import MARKERS, Scale, area, axes, coordinate, line, path, room, span, tag
from trimtab.report.page.text import aligned, esc, number, short, visible

MOST_DOTS, MARKED, SINGLE, BINS = 6000, 12, 3, 61
WIDTH = 560


def scatter(probed: Probed) -> str:
    """Both probabilities of each token, with the diagonal; the worst tokens stand out."""
    pairs = probed.pairs
    at = pairs.scored_N.nonzero()[:, 0]
    p, q = pairs.rollout_N[at].exp().numpy(), pairs.trainer_N[at].exp().numpy()
    far = np.argsort(-np.abs(p - q), kind="stable")
    keep = np.concatenate([far[: MOST_DOTS // 2], far[MOST_DOTS // 2 :: max(1, 2 * len(far) // MOST_DOTS)]])
    x, y = Scale(0.0, 1.0, 52, 520), Scale(0.0, 1.0, 482, 14)
    dots = "".join(f"M{coordinate(x(float(p[i])))} {coordinate(y(float(q[i])))}h0" for i in keep)
    marks = [_spot(x(t.rollout), y(t.trainer), _told(probed, t)) for t in probed.worst[:MARKED]]
    drawn = [
        axes(x, y, "probability in the engine"),
        tag("line", x1=x(0), y1=y(0), x2=x(1), y2=y(1), class_="diagonal"),
        tag("g", tag("path", d=dots, class_="dots"), class_="c0"),
        tag("g", *marks, class_="c1"),
    ]
    left_out = len(far) - len(keep)
    note = f"{left_out} tokens near the diagonal are not drawn." if left_out > 0 else ""
    about = f"Scatter of {len(at)} tokens: probability in the trainer against that in the engine, with the diagonal"
    return figure("Probability in the trainer", chart(drawn, WIDTH, 526, about), note=note)


def _told(probed: Probed, token: Token) -> str:
    text = visible(probed.context(token)[1])[:40]
    return f"{text}: {token.rollout:.3f} in the engine, {token.trainer:.3f} in the trainer"


def histogram(probed: Probed) -> str:
    """How many tokens have which Δp; the counts on a log axis."""
    dp = probed.pairs.difference_N[probed.pairs.scored_N].numpy()
    if not len(dp):
        return ""
    reach = max(float(np.abs(dp).max()), 1e-9)
    counts, edges = np.histogram(dp, bins=BINS, range=(-reach, reach))
    top = max(int(counts.max()), 2)
    y = Scale(0.5, top * 1.6, 300, 14, log=True)
    x = Scale(-reach, reach, room(y, 52), 546)
    bars = [
        tag("rect", tag("title", f"{number(low)} to {number(high)}: {n} tokens"), x=x(low), y=y(n),
            width=max(x(high) - x(low) - 1, 0.5), height=y(0.5) - y(n), class_="bar")
        for n, low, high in zip(counts.tolist(), edges.tolist(), edges[1:].tolist(), strict=False) if n
    ]  # fmt: skip
    drawn = [axes(x, y, "Δp = trainer − engine"), tag("g", *bars, class_="c0")]
    about = f"Histogram of the probability difference of {len(dp)} tokens; {counts.max()} lie in the fullest bin"
    return figure("Tokens (log scale)", chart(drawn, WIDTH, 342, about))


def singles(probed: Probed) -> str:
    """Δp along single responses: those with the largest gap, one each."""
    rows = list(dict.fromkeys(token.row for token in probed.worst))[:SINGLE]
    pairs = probed.pairs
    dp = pairs.difference_N.numpy()
    reach = max((abs(t.difference) for t in probed.worst), default=0.0) or 1e-9
    made = []
    for i, row in enumerate(rows):
        at = np.flatnonzero((pairs.row_N == row).numpy())
        length = len(at)
        y = Scale(-reach * 1.06, reach * 1.06, 128, 10)
        x = Scale(0.0, max(length - 1, 1), room(y, 56, 3), 546)
        sticks = "".join(
            f"M{coordinate(x(t))} {coordinate(y(0))}V{coordinate(y(v))}"
            for t, v in enumerate(dp[at].tolist()) if math.isfinite(v) and v != 0
        )  # fmt: skip
        name = short(probed.samples[row].prompt.problem.id, 40)
        drawn = [
            axes(x, y, "token of the response" if i == len(rows) - 1 else "", _whole(length), 3),
            tag("line", x1=x.start, x2=x.end, y1=y(0), y2=y(0), class_="zero"),
            tag("g", tag("path", d=sticks, class_="sticks"), class_="c0"),
        ]
        made.append(figure(f"Δp in response {row} ({name}), {length} tokens",
                           chart(drawn, WIDTH, 170, f"Δp along response {row}, {length} tokens")))  # fmt: skip
    return "".join(made)


def along(probed: Probed) -> str:
    """Mean |d| along the response."""
    bins = probed.positions
    if not bins:
        return ""
    xs = [(b.low + b.high - 1) / 2 for b in bins]
    y = Scale(*_from_zero([b.abs_mean for b in bins]), 250, 14)
    x = Scale(0.0, max(bins[-1].high - 1, 1), room(y, 56), 546)
    drawn = [axes(x, y, "token of the response", _whole(bins[-1].high)), _curve(xs, [b.abs_mean for b in bins], x, y)]
    ends = f"{number(bins[0].abs_mean.value)} at the start, {number(bins[-1].abs_mean.value)} at the end"
    return figure("Mean |d| in nats, with its 95 % interval", chart(drawn, WIDTH, 292, f"Mean |d| by position: {ends}"))


def lengths(probed: Probed) -> str:
    """How the summed log-ratio grows with the length; the dashed line is √length, growth of independent errors."""
    found = [p for p in probed.prefixes if p.rms.value > 0 and math.isfinite(p.rms.value)]
    if len(found) < 2:
        return ""
    values = [p.rms for p in found]
    low = min(v.value for v in values) / 2
    y = Scale(low, max(_high(v) for v in values) * 1.4, 300, 14, log=True)
    x = Scale(1.0, max(found[-1].length, 2), room(y, 60), 546, log=True)
    xs = [float(p.length) for p in found]
    bounded = [Estimate(v.value, max(v.low, low), v.high) for v in values]
    first = found[0]
    root = [first.rms.value * math.sqrt(t / first.length) for t in xs]
    guide = path((x(a), y(b)) for a, b in zip(xs, root, strict=True) if b <= y.high)
    drawn = [axes(x, y, "tokens of the response so far (log scale)"), tag("path", d=guide, class_="guide"),
             _curve(xs, bounded, x, y)]  # fmt: skip
    about = f"Root mean square of the summed log-ratio: {number(values[-1].value)} at {found[-1].length} tokens"
    return figure("Root mean square of Σ d in nats (log scale)", chart(drawn, WIDTH, 342, about),
                  note="Dashed: growth with the square root of the length, as of independent errors.")  # fmt: skip


def entropies(probed: Probed) -> str:
    """Mean |d| by the entropy of the position."""
    bins = probed.entropies
    if not bins:
        return ""
    y = Scale(*_from_zero([b.abs_mean for b in bins]), 250, 14)
    left = room(y, 56)
    step = (546 - left) / len(bins)
    drawn = [_rungs(y, left, 546)]
    for i, b in enumerate(bins):
        at = left + (i + 0.5) * step
        drawn.append(_bar(b, at, step, y))
        drawn.append(tag("text", stretch(b.low, b.high).replace(" to ", "–"), x=at, y=y.start + 19, class_="tick mid"))
    drawn.append(tag("text", "entropy of the position in nats", x=546.0, y=y.start + 39, class_="tick end name"))
    about = "Mean |d| by entropy: " + "; ".join(f"{stretch(b.low, b.high)}: {number(b.abs_mean.value)}" for b in bins)
    return figure("Mean |d| in nats, with its 95 % interval", chart(drawn, WIDTH, 294, about))


def _bar(b: Bin, at: float, step: float, y: Scale) -> str:
    tip = tag("title", f"{stretch(b.low, b.high)}: {b.tokens} tokens, mean |d| {number(b.abs_mean.value)}")
    top = y(b.abs_mean.value)
    bar = tag("rect", tip, x=at - step * 0.34, y=top, width=step * 0.68, height=max(y.start - top, 0.5), class_="bar")
    if not b.abs_mean.bounded:
        return tag("g", bar, class_="c0")
    whisker = tag("line", x1=at, x2=at, y1=y(b.abs_mean.low), y2=y(b.abs_mean.high), class_="axis")
    return tag("g", bar, whisker, class_="c0")


def _whole(length: float) -> int:
    """So many marks along ``length`` tokens that none stands between two."""
    return min(6, max(1, int(length) - 1))


def _rungs(y: Scale, left: float, right: float) -> str:
    """Grid lines and numbers of a vertical axis alone."""
    made = []
    marks = y.ticks()
    for value, text in zip(marks, aligned(marks), strict=True):
        made.append(tag("line", x1=left, x2=right, y1=y(value), y2=y(value), class_="grid"))
        made.append(tag("text", text, x=left - 8, y=y(value) + 4, class_="tick end"))
    return "".join([*made, tag("line", x1=left, x2=right, y1=y.start, y2=y.start, class_="axis")])


def _spot(x: float, y: float, tip: str) -> str:
    place = f"translate({coordinate(x)} {coordinate(y)})"
    return tag("path", tag("title", esc(tip)), d=MARKERS["circle"], transform=place, class_="dot")


def _curve(xs: Sequence[float], ys: Sequence[Estimate], x: Scale, y: Scale) -> str:
    at, middle = np.asarray(xs, dtype=float), np.array([e.value for e in ys])
    band = area(at, np.array([e.low for e in ys]), np.array([e.high for e in ys]), x, y)
    dots = [_spot(x(a), y(b), f"{number(a)}: {number(b)}") for a, b in zip(xs, middle.tolist(), strict=True)]
    return tag("g", tag("path", d=band, class_="band"), tag("path", d=line(at, middle, x, y), class_="line"), *dots,
               class_="c0")  # fmt: skip


def _high(e: Estimate) -> float:
    return e.high if e.bounded and math.isfinite(e.high) else e.value


def _from_zero(values: Sequence[Estimate]) -> tuple[float, float]:
    return 0.0, span([0.0, *map(_high, values)])[1]
