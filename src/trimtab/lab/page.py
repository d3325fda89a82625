"""A probe's page: one HTML file with the figures of the gap."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence

from trimtab.lab import figures
from trimtab.lab.bootstrap import Estimate
from trimtab.lab.frame import document, section, table
from trimtab.lab.probe import Probed
from trimtab.lab.tables import (
    DIFFERENCES,
    LEVEL_FIGURES,
    LOG_RATIOS,
    entropy_rows,
    grown,
    label,
    levels,
    sides,
    size,
    told,
    with_interval,
)
from trimtab.report.page.svg import tag
from trimtab.report.page.text import MINUS, esc, number
from trimtab.spec import Level

LEVELS_LEAD = (
    "Importance weights w = exp(log-ratio) of tokens, of whole responses, and of a response's mean. k1 and k3 estimate "
    "KL(engine ‖ trainer); chi² = E[w²] − 1; ESS is the effective share of the sample; the mean of w is 1 when the "
    "engine samples from its whole support."
)


def page(probed: Probed, title: str = "") -> str:
    """The page as text, to be written as UTF-8; it needs no network, no script and no other file."""
    kicker = title or "trimtab probe: the gap between engine and trainer"
    body = "".join([
        section("pairs", "Both probabilities of each token", figures.scatter(probed), lead="On the dashed diagonal "
                "engine and trainer agree. Orange: the tokens with the largest difference."),
        section("spread", "How large the differences are", figures.histogram(probed), _figures(probed, DIFFERENCES)),
        section("ratios", "Log-ratios", _figures(probed, LOG_RATIOS), lead="d = log p(trainer) − log p(engine) of the "
                "same token, in nats."),
        section("levels", "What importance weights make of it", _levels(probed), lead=LEVELS_LEAD),
        section("worst", "The worst tokens", _worst(probed)),
        section("position", "Along the response", figures.singles(probed), figures.along(probed)),
        section("length", "By length", figures.lengths(probed), table(
            ("tokens so far", "responses", "rms of Σ d", "mean |Σ d|", "ESS"), grown(probed),
            caption="The log-ratio of a response up to a length, over the responses that are that long.")),
        section("entropy", "By the entropy of the position", figures.entropies(probed), table(
            ("nats", "tokens", "mean |d|", "mean |Δp|", "|Δp| ≥ 0.01"), entropy_rows(probed),
            caption="Entropy of the trainer's distribution at the token.")),
        section("setup", "What was run", _setup(probed)),
    ])  # fmt: skip
    return document(kicker, headline(probed), [sides(probed.spec), size(probed)], body)


def headline(probed: Probed) -> str:
    """The gap in a sentence."""
    gap = probed.gap
    if not gap.counts.scored:
        return "No token has a log-prob from both sides"
    close, apart = gap["dp_below_0.001"].value, gap["dp_from_0.1"].value
    return (
        f"{close:.1%} of tokens agree within 0.001; {apart:.2%} differ by 0.1 or more in probability, "
        f"the worst by {number(gap['dp_max'].value)}"
    )


def _figures(probed: Probed, names: Sequence[str]) -> str:
    rows = [(label(name), *map(_signed, with_interval(name, probed.gap[name]))) for name in names]
    return table(("", "", "95 % interval, over responses"), rows)


def _levels(probed: Probed) -> str:
    names = ("level", "k1", "k3", "chi²", "ESS", "mean w", "mean |log w|")
    rows = []
    for level, row in zip(Level, levels(probed), strict=True):
        cells = []
        for name, text in zip(LEVEL_FIGURES, row[1:], strict=True):
            key = f"{level.value}_{name}"
            cells.append(esc(_signed(text)) + tag("small", esc(_signed(_interval(key, probed.gap[key])))))
        rows.append((esc(row[0]), *cells))
    return table(names, rows, caption="Small: 95 % intervals by resampling responses.", html=True)


def _interval(name: str, figure: Estimate) -> str:
    return f"{told(name, figure.low)} to {told(name, figure.high)}" if figure.bounded else ""


def _worst(probed: Probed) -> str:
    rows = []
    for token in probed.worst:
        before, own, after = probed.context(token)
        text = f"{_inline(before)}<mark>{_inline(own) or '(special)'}</mark>{_inline(after)}"
        entropy = "–" if math.isnan(token.entropy) else f"{token.entropy:.2f}"
        rows.append((
            tag("span", text, class_="context"),
            f"{token.rollout:.3f}", f"{token.trainer:.3f}", _signed(f"{token.difference:+.3f}"),
            number(token.log_ratio), entropy, esc(f"{token.row}:{token.position}"),
        ))  # fmt: skip
    names = ("token in its context", "engine", "trainer", "Δp", "d", "entropy", "response:token")
    return table(names, rows, caption="Probabilities of the marked token, largest |Δp| first.", html=True)


def _inline(text: str) -> str:
    return esc(text.replace("\n", "⏎"))


def _signed(text: str) -> str:
    return text.replace("-", MINUS)


def _setup(probed: Probed) -> str:
    words = ["trimtab", "probe", *probed.overrides, f"--prompts={probed.source}", f"--responses={len(probed.samples)}"]
    rows = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in probed.engine.items()]
    again = tag("p", tag("code", esc(shlex.join(words))), class_="run")
    return again + table(("engine's own settings", "in effect"), rows, caption="As the engine itself reports them.")
