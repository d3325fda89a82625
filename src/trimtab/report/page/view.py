"""What every part of the page needs to know: the comparison, the runs, a look for each setting, names for metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.report.colours import Look, looks
from trimtab.report.curves import Axis, Curve
from trimtab.report.model import Comparison, Row, Run, Setting
from trimtab.report.page.svg import MARKERS, tag
from trimtab.report.page.text import esc, shorts, visible
from trimtab.report.score import tail_mean

SHOWN = 8
"""Settings that figures show at first, where there are more; the page says so, and the rest is a button away."""


@dataclass(frozen=True)
class Metric:
    """A metric's name for people, and its unit."""

    key: str
    title: str
    unit: str = ""

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


KNOWN = {m.key: m for m in (
    Metric("eval/reward", "Evaluation reward"),
    Metric("eval/reward_greedy", "Evaluation reward, greedy"),
    Metric("eval/pass_at_k", "Evaluation pass@k", "share"),
    Metric("train/reward", "Training reward"),
    Metric("train/reward_weighted", "Training reward, weighted by the correction"),
    Metric("train/mis_k3_kl", "Mismatch KL (k3)", "nats"),
    Metric("train/mis_ess", "Effective sample size", "share"),
    Metric("train/mis_kept_token_fraction", "Kept tokens", "share"),
    Metric("train/clip_fraction_high", "Clipped above", "share of tokens"),
    Metric("train/clip_fraction_low", "Clipped below", "share of tokens"),
    Metric("train/tis_clipfrac", "Weights at their bound", "share of tokens"),
    Metric("train/mis_rs_catastrophic_seq_fraction", "Vetoed responses", "share"),
    Metric("train/entropy", "Entropy", "nats"),
    Metric("train/response_length", "Response length", "tokens"),
    Metric("train/grad_norm", "Gradient norm"),
    Metric("train/train_rollout_logprob_abs_diff", "Trainer against engine, mean |log-ratio|", "nats"),
    Metric("train/mis_kl", "Mismatch KL (k1)", "nats"),
    Metric("train/ppo_kl", "KL to the anchor", "nats"),
    Metric("train/truncated_fraction", "Cut at the length limit", "share of responses"),
    Metric("train/mis_chi2_token", "χ² of token weights"),
    Metric("train/lag", "Policy lag", "updates"),
    Metric("perf/tokens_per_second", "Throughput", "tokens/s"),
)}  # fmt: skip
SMALL = ("train/mis_ess", "train/mis_kept_token_fraction", "train/clip_fraction_high", "train/clip_fraction_low",
         "train/tis_clipfrac", "train/mis_rs_catastrophic_seq_fraction", "train/entropy", "train/response_length",
         "train/grad_norm")  # fmt: skip
MISMATCH = "train/mis_k3_kl"
AXES = {Axis.step: "step", Axis.tokens: "response tokens", Axis.wall: "wall time, s"}
MOST_METRICS = 16
MOST_NAME = 72
"""Characters of a setting's name where it stands among others; all of it is in its title, and in the table."""


def metric_of(key: str) -> Metric:
    """Its name for people, or the key as it is."""
    return KNOWN.get(key, Metric(key, key))


@dataclass(frozen=True)
class View:
    """``order``: the rows as the table has them, best first; ``index``: a setting's number, its colour's class too.

    ``short``: names that fit beside others, all different.
    """

    comparison: Comparison
    runs: tuple[Run, ...]
    order: tuple[Row, ...]
    index: Mapping[str, int]
    looks: Mapping[str, Look]
    metrics: tuple[str, ...]
    short: Mapping[str, str]

    @property
    def settings(self) -> tuple[Setting, ...]:
        return tuple(row.setting for row in self.order)

    @property
    def base(self) -> Row | None:
        return next((row for row in self.order if row.setting.label == self.comparison.baseline), None)

    def shown(self, label: str) -> bool:
        """Whether figures show the setting at first: the best, and the baseline."""
        return self.index[label] < SHOWN or label == self.comparison.baseline

    def look(self, label: str) -> Look:
        return self.looks[label]

    def class_of(self, label: str) -> str:
        return f"c{self.index[label]}"


def view(comparison: Comparison, runs: Sequence[Run]) -> View:
    """Order the settings and decide what there is to draw."""
    last = len(comparison.rows) + 1
    order = sorted(comparison.rows, key=lambda row: row.rank if row.rank is not None else last)
    labels = [row.setting.label for row in order]
    there = {name for run in runs for name, column in run.columns.items() if np.isfinite(column).any()}
    wanted = dict.fromkeys([comparison.metric, *KNOWN])
    others = sorted(name for name in there - set(wanted) if name.startswith("eval/"))
    metrics = tuple(name for name in [*wanted, *others] if name in there)[:MOST_METRICS]
    return View(
        comparison=comparison,
        runs=tuple(runs),
        order=tuple(order),
        index={label: i for i, label in enumerate(labels)},
        looks=looks([row.setting.label for row in comparison.rows]),
        metrics=metrics,
        short=shorts(labels, MOST_NAME),
    )


def tail(run: Run, metric: str, last: int) -> float:
    """Mean of the last finite values of a metric after step 0; NaN without any."""
    found = tail_mean(run, metric, last)
    return math.nan if found is None else found


def injected(setting: Setting) -> str:
    """The mismatch put in on purpose, such as ``logit_noise 0.1``; empty: none."""
    return ", ".join(sorted({run.injected for run in setting.runs if run.injected}))


def everywhere(v: View) -> str:
    """The injected mismatch that all settings have alike; said once, at the top."""
    found = {injected(setting) for setting in v.settings}
    return found.pop() if len(found) == 1 else ""


def settled(found: Curve, axis: Axis) -> Curve:
    """Without the end where runs drop out one after the other: there a mean jumps by who is left, not by learning.

    Runs end at the same step, but not at the same token or second; at most the last 5% of the axis are cut.
    """
    if axis is Axis.step or len(found.x) < 3:
        return found
    mark = found.x[0] + 0.95 * (found.x[-1] - found.x[0])
    at = int(np.searchsorted(found.x, mark))
    keep = np.arange(len(found.x)) < at
    keep[at:] = np.cumsum(found.n[at:] < found.n[max(at - 1, 0)]) == 0
    return Curve(found.x[keep], found.mean[keep], found.low[keep], found.high[keep], found.n[keep])


# -- pieces of markup that return everywhere -------------------------------------------------------------------------


def swatch(v: View, label: str) -> str:
    """The setting's line and marker."""
    body = tag("path", d="M1 7H27", class_="line") + tag(
        "path", d=MARKERS[v.look(label).marker], transform="translate(14 7)", class_="dot"
    )
    return tag("svg", body, class_=f"swatch {v.class_of(label)}", viewBox="0 0 28 14", width=28, height=14,
               aria_hidden="true")  # fmt: skip


def name(v: View, label: str, badge: bool = True) -> str:
    """A setting by swatch and label; the injected mismatch and the baseline are marked."""
    setting = next(s for s in v.settings if s.label == label)
    marks = tag("span", "baseline", class_="badge") if label == v.comparison.baseline else ""
    if injected(setting) and not everywhere(v):
        marks += tag("span", "injected: " + esc(injected(setting)), class_="badge injected")
    full = label if v.short[label] != visible(label) else None
    text = tag("bdi", esc(v.short[label] or "(all runs)"), class_="name", title=full)
    return swatch(v, label) + text + (marks if badge else "")


def section(id_: str, title: str, *body: str, lead: str = "") -> str:
    """A part of a tab with its heading."""
    lead = tag("p", lead, class_="lead") if lead else ""
    return tag("section", tag("h2", esc(title), id=f"h-{id_}"), lead, *body, id=id_, aria_labelledby=f"h-{id_}")
