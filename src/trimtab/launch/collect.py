"""``trimtab sweep collect``: the results of a sweep as a table for other programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.files import write_text
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import RunStatus, State, Sweep

FIRST = ("run", "state", "objective", "reward", "step", "steps", "attempt", "seed", "config_hash", "cluster", "job",
         "reason", "started", "ended", "seconds")  # fmt: skip


def collected(folder: SweepFolder, runs: Sequence[RunStatus]) -> list[dict[str, Any]]:
    """One entry a distinct run. ``started``, ``ended`` (s since 1970) are those of the attempt that counts."""
    found = []
    for run in runs:
        result = folder.result(run.run.dir) if run.state in (State.completed, State.failed) else None
        ours = result if result is not None and run.attempt == result.attempt else None
        found.append({
            "run": run.run.dir, "state": run.state.value, "objective": run.objective, "reward": run.reward,
            "step": run.step, "steps": run.steps, "attempt": run.attempt, "seed": run.run.seed,
            "config_hash": run.run.config_hash, "cluster": run.cluster, "job": run.job, "reason": run.reason,
            "started": ours.started if ours else None, "ended": ours.ended if ours else None,
            "seconds": round(ours.ended - ours.started, 3) if ours else None,
            "overrides": list(run.run.overrides), "causes": dict(run.causes),
        })  # fmt: skip
    return found


def options_of(entry: Mapping[str, Any]) -> dict[str, str]:
    """Override to value, for the columns that the table has none for yet."""
    pairs = (str(item).lstrip("+~").partition("=") for item in entry["overrides"])
    return {key: value for key, _, value in pairs if key not in FIRST}


def write(out: Path, sweep: Sweep, entries: Sequence[Mapping[str, Any]]) -> Path:
    """Write results.csv and results.json into ``out``; the path of the latter."""
    out.mkdir(parents=True, exist_ok=True)
    keys = dict.fromkeys(key for entry in entries for key in options_of(entry))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*FIRST, *keys])
    for entry in entries:
        given = options_of(entry)
        table.writerow(
            ["" if entry[key] is None else entry[key] for key in FIRST] + [given.get(key, "") for key in keys]
        )
    write_text(out / "results.csv", text.getvalue())
    head = {"sweep": sweep.sweep, "combinations": sweep.combinations, "code": dict(sweep.code)}
    write_text(out / "results.json", json.dumps({**head, "runs": list(entries)}, ensure_ascii=False) + "\n")
    return out / "results.json"
