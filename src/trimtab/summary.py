"""The end of a run in a few numbers: summary.json and the table on the console."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trimtab.config import config_hash
from trimtab.folder import RunFolder
from trimtab.rollout.inject import label
from trimtab.spec import RunSpec
from trimtab.track import alarms_of, read_metrics, summary_table
from trimtab.train.alarms import Kind, advice

TAIL = 10  # steps at either end that "before" and "after" are means of


def mean_of(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Mean of a metric over the rows that have a finite value of it."""
    values = [row[name] for row in rows if isinstance(row.get(name), int | float) and math.isfinite(row[name])]
    return sum(values) / len(values) if values else None


def mismatch_of(spec: RunSpec, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The gap put in on purpose, and ``kl``: the mismatch KL (k3, nats a token) over the run's first steps.

    Later steps would mix in what training made of it. ``kl`` is that of the natural gap where ``kind`` is none.
    """
    return {
        "kind": spec.mismatch.kind.value,
        "strength": spec.mismatch.strength,
        "label": label(spec.mismatch),
        "kl": mean_of(steps[:TAIL], "train/mis_k3_kl"),
    }


def alarms_raised(rows: Sequence[dict[str, Any]], overrides: Sequence[str], weights: str = "") -> list[dict[str, Any]]:
    """Each kind of alarm that was raised, with its steps and the command that looks for its cause; first ones first.

    ``weights``: the run's folder, if it has a checkpoint for the command to look at.
    """
    found = alarms_of(rows)
    told = [{"kind": kind} | steps | {"run": advice(Kind(kind), overrides, weights)} for kind, steps in found.items()]
    return sorted(told, key=lambda alarm: (alarm["first"], alarm["kind"]))


def summarise(folder: RunFolder, spec: RunSpec, seconds: float, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Before and after, from metrics.jsonl alone; ``objective``: the last evaluation, else the last training reward."""
    rows = read_metrics(folder.metrics) if folder.metrics.exists() else []
    steps = [row for row in rows if row["step"] > 0]
    evaluated = [row["eval/reward"] for row in rows if "eval/reward" in row]
    names = ("train/reward", "train/mis_kl", "train/mis_k3_kl", "train/mis_ess", "train/mis_kept_token_fraction")
    after = {name: mean_of(steps[-TAIL:], name) for name in names}
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "before": {name: mean_of(steps[:TAIL], name) for name in names},
        "after": after,
        "eval_before": evaluated[0] if evaluated else None,
        "eval_after": evaluated[-1] if evaluated else None,
        "objective": evaluated[-1] if evaluated else after["train/reward"],
        "nonfinite_steps": steps[-1].get("train/nonfinite_steps", 0) if steps else 0,
        "all_rejected_steps": steps[-1].get("train/all_rejected_steps", 0) if steps else 0,
        "seconds": round(seconds, 1),
        "mismatch": mismatch_of(spec, steps),
        "alarms": alarms_raised(steps, overrides, str(folder.path) if any(folder.checkpoints.glob("step_*")) else ""),
        "config_hash": config_hash(spec),
        "seed": spec.seed,
    }


def show(summary: dict[str, Any], folder: RunFolder) -> None:
    """The small table at the end."""
    before, after = summary["before"], summary["after"]
    rows = {
        "evaluation reward": (summary["eval_before"], summary["eval_after"]),
        "training reward": (before["train/reward"], after["train/reward"]),
        "mismatch KL (k3)": (before["train/mis_k3_kl"], after["train/mis_k3_kl"]),
        "effective sample size": (before["train/mis_ess"], after["train/mis_ess"]),
        "kept tokens": (before["train/mis_kept_token_fraction"], after["train/mis_kept_token_fraction"]),
    }
    alarms = [
        f"alarm {told['kind']}: {told['steps']} steps from {told['first']} to {told['last']}. Run: {told['run']}"
        for told in summary["alarms"]
    ]
    summary_table(rows, footer=(f"{summary['steps']} steps in {summary['seconds']} s; files: {folder.path}", *alarms))
