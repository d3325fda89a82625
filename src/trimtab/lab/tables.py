"""A probe's outcome as text for a terminal, JSON and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from trimtab.lab.bootstrap import Estimate
from trimtab.lab.curves import Bin
from trimtab.lab.gap import APART, CLOSE, QUANTILES
from trimtab.lab.probe import Probed
from trimtab.report.page.text import visible
from trimtab.spec import Level, Mismatch, RunSpec

LEVEL_FIGURES = ("k1", "k3", "chi2", "ess", "weight_mean", "abs_mean")
SHOWN_WORST = 8


# -- what was measured -----------------------------------------------------------------------------------------------


def sides(spec: RunSpec) -> str:
    """Engine against trainer in a line."""
    rollout, policy = spec.rollout, spec.policy
    head = {True: " with fp32 head", False: ""}
    model = visible(policy.path) if policy.path is not None else policy.kind.value
    gap = spec.mismatch
    injected = "" if gap.kind is Mismatch.none else f", injected: {gap.kind.value} {gap.strength:g}"
    return (
        f"{rollout.engine.value} {rollout.dtype.value}{head[rollout.fp32_head]} against trainer {policy.dtype.value}"
        f"{head[policy.fp32_head]}; {model}, T={rollout.temperature:g}{injected}"
    )


def size(probed: Probed) -> str:
    """How much was sampled, and what could not be compared."""
    counts = probed.gap.counts
    rest = {
        "not the policy's own": counts.masked,
        "without a log-prob from the engine": counts.missing_rollout,
        "without one from the trainer": counts.missing_trainer,
        "of probability 0 on one side": counts.infinite,
        "empty responses": counts.empty,
    }
    told = "".join(f", {n} {what}" for what, n in rest.items() if n)
    return (
        f"{counts.responses} responses, {counts.tokens} tokens ({counts.scored} compared{told}); "
        f"prompts: {visible(probed.source)}; sampled at {probed.speed:,.0f} tokens/s"
    )


def label(name: str) -> str:
    """A figure's name as people read it."""
    if name == f"dp_below_{CLOSE}":
        return f"share |Δp| < {CLOSE}"
    if name.startswith("dp_from_"):
        return f"share |Δp| ≥ {name.removeprefix('dp_from_')}"
    return {
        "dp_mean": "mean Δp",
        "dp_abs_mean": "mean |Δp|",
        "dp_max": "largest |Δp|",
        "log_ratio_mean": "mean d",
        "log_ratio_std": "std of d",
        "log_ratio_abs_mean": "mean |d|",
        "log_ratio_min": "smallest d",
        "log_ratio_max": "largest d",
    }.get(name, f"{name.removeprefix('log_ratio_p')} % quantile of d")


DIFFERENCES = (f"dp_below_{CLOSE}", *(f"dp_from_{b}" for b in APART), "dp_mean", "dp_abs_mean", "dp_max")
LOG_RATIOS = ("log_ratio_mean", "log_ratio_std", "log_ratio_abs_mean", "log_ratio_min",
              *(f"log_ratio_{name}" for name in QUANTILES), "log_ratio_max")  # fmt: skip


# -- text ------------------------------------------------------------------------------------------------------------


def told(name: str, value: float) -> str:
    """A figure's value: shares in percent, the rest with three digits."""
    if math.isnan(value):
        return "-"
    if name.startswith(("dp_below_", "dp_from_")):
        return f"{value:.2%}"
    return f"{value:.3g}" if not name.endswith(("ess", "weight_mean")) else f"{value:.4f}"


def with_interval(name: str, figure: Estimate) -> tuple[str, str]:
    """The value, and its interval or nothing."""
    interval = f"{told(name, figure.low)} to {told(name, figure.high)}" if figure.bounded else ""
    return told(name, figure.value), interval


def as_text(probed: Probed) -> list[str]:
    """The lines for a terminal."""
    gap = probed.gap
    lines = [sides(probed.spec), size(probed), ""]
    lines += columns(
        [("d = log p trainer - log p rollout", "", "95 % interval"),
         *((label(name), *with_interval(name, gap[name])) for name in (*DIFFERENCES, *LOG_RATIOS))]
    )  # fmt: skip
    lines += ["", *columns([("level", "k1", "k3", "chi2", "ESS", "mean w", "mean |log w|"), *levels(probed)])]
    lines += ["", *columns([("entropy", "tokens", "mean |d|", "mean |Δp|", "|Δp| ≥ 0.01"), *entropy_rows(probed)])]
    lines += ["", *columns([("length", "responses", "rms of sum d", "mean |sum d|", "sequence ESS"), *grown(probed)])]
    lines += ["", *columns([("worst tokens", "p rollout", "p trainer", "d", "after"), *worst_rows(probed)], last=True)]
    return lines


def levels(probed: Probed) -> list[tuple[str, ...]]:
    """A row for each level."""
    names = {level: [f"{level.value}_{figure}" for figure in LEVEL_FIGURES] for level in Level}
    return [(level.value, *(told(name, probed.gap[name].value) for name in found)) for level, found in names.items()]


def stretch(low: float, high: float) -> str:
    """``0.1 to 0.5``."""
    return f"{low:g} up" if math.isinf(high) else f"{low:g} to {high:g}"


def entropy_rows(probed: Probed) -> list[tuple[str, ...]]:
    """A row for each stretch of entropy."""
    return [
        (stretch(b.low, b.high), str(b.tokens), f"{b.abs_mean.value:.3g}", f"{b.dp_abs_mean.value:.3g}",
         f"{b.dp_from_001.value:.2%}")
        for b in probed.entropies
    ]  # fmt: skip


def grown(probed: Probed) -> list[tuple[str, ...]]:
    """A row for each length."""
    return [
        (str(p.length), str(p.responses), f"{p.rms.value:.3g}", f"{p.abs_mean.value:.3g}", told("ess", p.ess.value))
        for p in probed.prefixes
    ]


def worst_rows(probed: Probed) -> list[tuple[str, ...]]:
    """The worst tokens, with what stands before them."""
    found = list[tuple[str, ...]]()
    for token in probed.worst[:SHOWN_WORST]:
        before, own, _ = probed.context(token)
        shown = visible(before.replace("\n", "⏎"))[-40:]
        found.append((visible(own.replace("\n", "⏎"))[:20] or "(special)", f"{token.rollout:.3f}",
                      f"{token.trainer:.3f}", f"{token.log_ratio:+.3f}", f"…{shown}"))  # fmt: skip
    return found


def columns(rows: Sequence[Sequence[str]], last: bool = False) -> list[str]:
    """Rows in columns: the first to the left, the others to the right; ``last``: that one to the left too."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def cell(i: int, text: str) -> str:
        return text.ljust(widths[i]) if i == 0 or (last and i == len(widths) - 1) else text.rjust(widths[i])

    return ["  ".join(cell(i, text) for i, text in enumerate(row)).rstrip() for row in rows]


# -- files -----------------------------------------------------------------------------------------------------------


def finite(value: Any) -> Any:
    """As JSON holds it: what is no number is null, an infinite one is 1e999's text."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def document(probed: Probed) -> dict[str, Any]:
    """What --json prints and probe.json holds; NaN is null, infinities are "inf" and "-inf"."""
    tokens = []
    for token in probed.worst:
        before, own, after = probed.context(token)
        tokens.append({**asdict(token), "difference": token.difference, "before": before, "text": own, "after": after})
    whole = {
        "overrides": list(probed.overrides),
        "sides": sides(probed.spec),
        "prompts": probed.source,
        "engine": dict(probed.engine),
        "tokens_per_second": probed.speed,
        "counts": asdict(probed.gap.counts),
        "figures": {name: asdict(figure) for name, figure in probed.gap.figures.items()},
        "bootstrap": {"draws": probed.gap.draws, "level": 0.95, "over": "responses", "seed": probed.spec.seed},
        "by_position": [asdict(b) for b in probed.positions],
        "by_entropy": [asdict(b) for b in probed.entropies],
        "by_length": [asdict(p) for p in probed.prefixes],
        "worst": tokens,
    }
    plain: dict[str, Any] = finite(whole)
    return plain


def as_csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A CSV file; floats to the last bit."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(head)
    lines.writerows([repr(x) if isinstance(x, float) else x for x in row] for row in rows)
    return text.getvalue()


def figures_csv(probed: Probed) -> str:
    """A line for each figure."""
    return as_csv(("figure", "value", "low", "high"),
                  ((name, f.value, f.low, f.high) for name, f in probed.gap.figures.items()))  # fmt: skip


def curves_csv(probed: Probed) -> str:
    """The gap by position, entropy and length, a line a stretch."""
    rows: list[tuple[Any, ...]] = []
    groups: tuple[tuple[str, Sequence[Bin]], ...] = (("position", probed.positions), ("entropy", probed.entropies))
    for kind, bins in groups:
        for b in bins:
            for name, f in (("abs_mean", b.abs_mean), ("mean", b.mean), ("dp_abs_mean", b.dp_abs_mean),
                            ("dp_from_0.01", b.dp_from_001)):  # fmt: skip
                rows.append((kind, float(b.low), float(b.high), b.tokens, name, f.value, f.low, f.high))
    for p in probed.prefixes:
        for name, f in (("rms", p.rms), ("abs_mean", p.abs_mean), ("ess", p.ess)):
            rows.append(("length", float(p.length), float(p.length), p.responses, name, f.value, f.low, f.high))
    return as_csv(("by", "from", "to", "count", "figure", "value", "low", "high"), rows)


def tokens_csv(probed: Probed) -> str:
    """A line for each response token."""
    pairs = probed.pairs
    ids = [token for sample in probed.samples for token in sample.ids]
    texts = [text for pieces in probed.pieces for text in pieces]
    entropy = [math.nan] * len(ids) if pairs.entropy_N is None else pairs.entropy_N.tolist()
    values = (pairs.row_N, pairs.position_N, pairs.rollout_N, pairs.trainer_N, pairs.log_ratio_N, pairs.difference_N)
    row, position, rollout, trainer, log_ratio, difference = (value.tolist() for value in values)
    names = ("response", "position", "prompt", "id", "text", "rollout_logp", "trainer_logp", "log_ratio", "difference",
             "entropy")  # fmt: skip
    prompts = [probed.samples[r].prompt.problem.id for r in row]
    return as_csv(
        names,
        zip(row, position, prompts, ids, texts, rollout, trainer, log_ratio, difference, entropy, strict=True),
    )
