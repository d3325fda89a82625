"""A comparison as CSV, as Markdown and as JSON; whatever names hold, a reader's program takes it for text."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.report.curves import Axis, axis_of
from trimtab.report.model import Comparison, Difference, Interval, Problem, Row, Run, Verdict
from trimtab.report.page.text import visible
from trimtab.report.score import REWARD, default_last, score, scores_of, tail_mean
from trimtab.report.statistics import ALPHA

FORMAT = 1  # of comparison.json; grows when a field changes its meaning
WEIGHTED = "train/reward_weighted"
SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$])")
FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")
PLAIN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
MEANING = {
    Verdict.better: "better",
    Verdict.worse: "worse",
    Verdict.undecided: "undecided",
    Verdict.untested: "–",
}

# -- numbers as text -------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 3) -> str:
    """``digits`` digits after the point, or significant ones where that would show nothing; a dash for no value."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0 or 0.01 <= abs(value) < 1e5:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}g}"


def written(interval: Interval, values: Sequence[float], sign: bool) -> list[str]:
    """``values`` with so many digits that two of the interval's half width show."""
    half = None if interval.low is None or interval.high is None else (interval.high - interval.low) / 2
    if half is None or half == 0 or not 1e-7 <= half < 1e5:
        texts = [number(value) for value in values]
    else:
        texts = [f"{value:.{max(1 - math.floor(math.log10(half)), 2)}f}" for value in values]
    return [f"+{text}" if sign and value > 0 else text for text, value in zip(texts, values, strict=True)]


def interval_text(interval: Interval, sign: bool = False) -> str:
    """``0.512 [0.480, 0.544]``, or the mean alone where there is no interval."""
    if interval.low is None or interval.high is None:
        return written(interval, [interval.mean], sign)[0]
    mean, low, high = written(interval, [interval.mean, interval.low, interval.high], sign)
    return f"{mean} [{low}, {high}]"


def narrow_text(interval: Interval, sign: bool = False) -> str:
    """``0.512 ±0.032``."""
    mean = written(interval, [interval.mean], sign)[0]
    if interval.low is None or interval.high is None:
        return mean
    return f"{mean} ±{written(interval, [(interval.high - interval.low) / 2], False)[0]}"


def p_text(p: float | None) -> str:
    """Three digits; below 0.001 as that."""
    if p is None:
        return "–"
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def verdict_text(row: Row, baseline: str) -> str:
    """In a word."""
    return "baseline" if row.setting.label == baseline else MEANING[row.difference.verdict]


# -- Markdown --------------------------------------------------------------------------------------------------------


def md(value: object) -> str:
    """Text for a Markdown table's cell or list: nothing in it is markup, HTML or a line's end."""
    text = visible(value).replace("\n", " ").replace("\t", " ")
    text = SPECIAL.sub(r"\\\1", text)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"(?i)(https?|www)([:.])", r"\1&#8203;\2", text).replace("@", "&#64;")


def markdown(comparison: Comparison) -> str:
    """The summary: how it was scored, the table of settings, problems and notes."""
    lines = [f"# Comparison by {md(comparison.metric)}", "", *_method(comparison), ""]
    heads = ["rank", "setting", "n", "mean [95% t interval]"]
    if len(comparison.rows) > 1:
        heads += ["difference [95%]", "p, corrected", "verdict"]
    beside = [name for name in (REWARD, WEIGHTED) if name != comparison.metric
              and any(name in row.other for row in comparison.rows)]  # fmt: skip
    heads += [*map(md, beside), "time", "tokens"]
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(_cells(row, comparison, beside)) + " |" for row in comparison.rows]
    lines += ["", *_reasons(comparison)]
    for title, items in (("Problems", [problem_text(p) for p in comparison.problems]),
                         ("Notes", [md(note) for note in comparison.notes]),
                         ("Sources", [md(source) for source in comparison.sources])):  # fmt: skip
        if items:
            lines += [f"## {title}", "", *(f"- {item}" for item in items), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _method(comparison: Comparison) -> list[str]:
    """How the numbers came about."""
    text = f"Score of a run: mean of its last {comparison.last} values of {md(comparison.metric)}, fixed beforehand."
    if comparison.baseline:
        tested = sum(row.difference.p_corrected is not None for row in comparison.rows)
        text += (f" Differences are to **{md(comparison.baseline)}**, seed by seed (paired t test); p is corrected for "
                 f"{tested} comparison{'s' * (tested != 1)} (Holm); better or worse: p ≤ {ALPHA}.")  # fmt: skip
        if any(row.lost for row in comparison.rows):
            text += (" Seeds were lost: p is the larger one of the seeds that are left and of all, the lost ones "
                     "counted against the verdict (for better the setting's at the worst score of all runs, the "
                     "baseline's at the best; for worse the other way round).")  # fmt: skip
    if comparison.at is not None:
        text += f" Runs are of different lengths: scored at step {comparison.at}, the last that every setting reaches."
    return [text]


def _cells(row: Row, comparison: Comparison, beside: Sequence[str]) -> list[str]:
    seeds = str(len(row.scores)) if not row.lost else f"{len(row.scores)} of {row.expected} ({md(row.lost)})"
    injected = sorted({run.injected for run in row.setting.runs if run.injected})
    label = md(row.setting.label) + (f" (injected mismatch: {md(', '.join(injected))})" if injected else "")
    cells = [str(row.rank) if row.rank is not None else "–", label, seeds, interval_text(row.interval)]
    if len(comparison.rows) > 1:
        difference = row.difference
        cells += [interval_text(difference.interval, sign=True), p_text(difference.p_corrected),
                  verdict_text(row, comparison.baseline)]  # fmt: skip
    cells += [interval_text(row.other[name]) if name in row.other else "–" for name in beside]
    return [*cells, seconds_text(row.cost.get("seconds")), count_text(row.cost.get("tokens"))]


def seconds_text(seconds: float | None) -> str:
    """``75 s``, ``1.2 h``."""
    if seconds is None:
        return "–"
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def count_text(count: float | None) -> str:
    """``1.2M``."""
    if count is None:
        return "–"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def _reasons(comparison: Comparison) -> list[str]:
    """Why intervals and tests are not there, each reason once with its settings."""
    found: dict[str, list[str]] = {}
    for row in comparison.rows:
        for what, why in (("interval", row.interval.why), ("difference", row.difference.interval.why)):
            if why and why not in ("the baseline", "there is no other setting"):
                found.setdefault(f"no {what}: {why}", []).append(row.setting.label)
    for row in comparison.rows:
        if row.difference.claim:
            found.setdefault(f"{MEANING[row.difference.verdict]}: {row.difference.claim}".removeprefix("–: "),
                             []).append(row.setting.label)  # fmt: skip
    lines = [f"- {md(', '.join(labels))}: {md(why)}" for why, labels in found.items()]
    return [*lines, ""] if lines else []


def problem_text(problem: Problem) -> str:
    """One problem on one line."""
    return f"**{md(problem.kind)}** {md(problem.run)}: {md(problem.text)}"


# -- JSON ------------------------------------------------------------------------------------------------------------


def as_json(comparison: Comparison) -> dict[str, Any]:
    """All of it for programs; non-finite numbers are null."""
    return {
        "format": FORMAT,
        "metric": comparison.metric,
        "last": comparison.last,
        "lower_is_better": comparison.lower,
        "alpha": ALPHA,
        "correction": "holm",
        "baseline": comparison.baseline,
        "at_step": comparison.at,
        "keys": list(comparison.keys),
        "settings": [_row_json(row, comparison) for row in comparison.rows],
        "problems": [{"kind": p.kind, "run": p.run, "text": p.text} for p in comparison.problems],
        "notes": list(comparison.notes),
        "sources": list(comparison.sources),
    }


def _row_json(row: Row, comparison: Comparison) -> dict[str, Any]:
    return {
        "label": row.setting.label,
        "values": dict(row.setting.values),
        "is_baseline": row.setting.label == comparison.baseline,
        "rank": row.rank,
        "seeds": len(row.scores),
        "seeds_expected": row.expected,
        "seeds_lost": row.lost,
        "scores": {str(seed): _finite(score) for seed, score in row.scores.items()},
        "mean": _interval_json(row.interval),
        "difference": _difference_json(row.difference),
        "robust": None if row.robust is None else _interval_json(row.robust),
        "other": {name: _interval_json(interval) for name, interval in row.other.items()},
        "cost": {name: _finite(value) for name, value in row.cost.items()},
        "warning": row.warning,
        "runs": [_run_json(run, value) for run, value in zip(row.setting.runs, row.run_scores, strict=True)],
    }


def _interval_json(interval: Interval) -> dict[str, Any]:
    return {"mean": _finite(interval.mean), "low": _finite(interval.low), "high": _finite(interval.high),
            "n": interval.n, "why": interval.why}  # fmt: skip


def _difference_json(difference: Difference) -> dict[str, Any]:
    return {
        **_interval_json(difference.interval),
        "p": _finite(difference.p),
        "p_with_lost_seeds": _finite(difference.p_lost),
        "p_corrected": _finite(difference.p_corrected),
        "verdict": difference.verdict.value,
        "claim": difference.claim,
        "pairs": [[seed, _finite(value)] for seed, value in difference.pairs],
    }


def _run_json(run: Run, value: float | None) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": None if run.path is None else str(run.path),
        "run_id": run.run_id,
        "seed": run.seed,
        "state": run.state.value,
        "error": run.error,
        "attempt": run.attempt,
        "injected": run.injected,
        "last_step": _last_step(run),
        "score": _finite(value),
        "nonfinite": dict(run.nonfinite),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _last_step(run: Run) -> int | None:
    return int(run.step[-1]) if len(run.step) else None


# -- CSV -------------------------------------------------------------------------------------------------------------


def cell(value: object) -> str:
    """A CSV cell: full precision, empty for nothing; text that a spreadsheet would run as a formula gets a quote.

    Such text begins, after spaces, with ``= + - @``, a tab or a line's end (wide forms of the signs too). A number as
    text, as a setting's -0.5, stays as it is.
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, float | int):
        return repr(float(value)) if isinstance(value, float) else str(value)
    text = visible(value)
    risky = FORMULA.match(str(value)) is not None and PLAIN_NUMBER.fullmatch(text) is None
    return f"'{text}" if risky else text


def table_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """Lines of CSV under the union of the rows' columns."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([cell(column) for column in columns])
    writer.writerows([cell(row.get(column)) for column in columns] for row in rows)
    return out.getvalue()


def settings_csv(comparison: Comparison) -> str:
    """One line for each setting."""
    found = []
    for row in comparison.rows:
        difference = row.difference
        line: dict[str, object] = {
            "setting": row.setting.label, **{f"config.{key}": value for key, value in row.setting.values.items()},
            "rank": row.rank, "seeds": len(row.scores), "seeds_expected": row.expected, "seeds_lost": row.lost,
            "mean": row.interval.mean, "low": row.interval.low, "high": row.interval.high,
            "why_no_interval": row.interval.why, "difference": difference.interval.mean,
            "difference_low": difference.interval.low, "difference_high": difference.interval.high,
            "pairs": len(difference.pairs), "p": difference.p,
            "p_with_lost_seeds": difference.p_lost, "p_corrected": difference.p_corrected,
            "verdict": verdict_text(row, comparison.baseline).replace("–", Verdict.untested.value),
            "iqm": row.robust.mean if row.robust else None, "iqm_low": row.robust.low if row.robust else None,
            "iqm_high": row.robust.high if row.robust else None,
            "claim": difference.claim, "warning": row.warning,
        }  # fmt: skip
        line |= dict(row.cost)
        for name, interval in row.other.items():
            line |= {name: interval.mean, f"{name} low": interval.low, f"{name} high": interval.high}
        found.append(line)
    return table_csv(found)


def runs_csv(comparison: Comparison, runs: Sequence[Run]) -> str:
    """One line for each run, those that don't count included."""
    setting = {id(run): row.setting for row in comparison.rows for run in row.setting.runs}
    scores = scores_of(comparison)
    problems: dict[str, list[str]] = {}
    for problem in comparison.problems:
        problems.setdefault(problem.run, []).append(f"{problem.kind}: {problem.text}")
    names = sorted({name for row in comparison.rows for name in row.other})
    found = []
    for run in runs:
        at = setting.get(id(run))
        line: dict[str, object] = {
            "run": run.name, "setting": at.label if at else None,
            **{f"config.{key}": value for key, value in (at.values.items() if at else ())},
            "seed": run.seed, "state": run.state.value, "counts": "yes" if at else "superseded",
            "score": scores[id(run)] if at else score(
                run, comparison.metric, comparison.last, goal=run.planned).value,
            "attempt": run.attempt,
            "last_step": _last_step(run), "planned_steps": run.planned,
            "seconds": _end(run, Axis.wall), "tokens": _end(run, Axis.tokens), "injected": run.injected,
            "nonfinite_values": int(np.sum(list(run.nonfinite.values()), dtype=np.int64)), "error": run.error,
            "problems": "; ".join(problems.get(run.name, ())), "run_id": run.run_id,
            "path": str(run.path) if run.path is not None else None,
        }  # fmt: skip
        line |= {name: tail_mean(run, name, default_last(name)) for name in names}
        found.append(line)
    return table_csv(found)


def _end(run: Run, axis: Axis) -> float | None:
    along = axis_of(run, axis)
    return float(along[-1]) if along is not None and len(along) else None


def files(folder: Path, comparison: Comparison, runs: Sequence[Run]) -> dict[Path, str]:
    """What ``trimtab compare`` writes beside the page."""
    from json import dumps

    return {
        folder / "runs.csv": runs_csv(comparison, runs),
        folder / "settings.csv": settings_csv(comparison),
        folder / "summary.md": markdown(comparison),
        folder / "comparison.json": dumps(as_json(comparison), allow_nan=False, indent=1) + "\n",
    }
