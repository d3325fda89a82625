"""Alarms read back from metrics.jsonl: for status.json, the summary and comparisons."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from composing import composed

from trimtab.build import raised
from trimtab.folder import RunFolder, StatusTracker
from trimtab.report.model import Run, RunState
from trimtab.report.problems import alarms
from trimtab.summary import summarise
from trimtab.track import alarms_of

ROWS = [
    {"step": 1, "train/alarms": 0},
    {"step": 2, "train/alarms": 1, "alarm/kl": 1.0},
    {"step": 3, "train/alarms": 2, "alarm/kl": 1.0, "alarm/ess_drop": 1.0},
    {"step": 4, "train/alarms": 0},
    {"step": 5, "train/alarms": 1, "alarm/kl": 1.0},
]
KL, DROP = {"first": 2, "last": 5, "steps": 3}, {"first": 3, "last": 3, "steps": 1}


def test_first_and_last_step_of_each_kind() -> None:
    assert alarms_of(ROWS) == {"kl": KL, "ess_drop": DROP}
    assert alarms_of(ROWS[:1]) == {}


def test_the_summary_names_them_with_what_to_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    told = summarise(RunFolder(tmp_path, "auto"), composed(), 1.0, ["seed=3", "run_dir=x"])["alarms"]
    assert told == [
        {"kind": "kl", **KL, "run": "trimtab parity seed=3"},
        {"kind": "ess_drop", **DROP, "run": "trimtab probe seed=3"},
    ]


def test_the_status_counts_on_after_a_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    with RunFolder(tmp_path, "auto") as folder:
        tracker = StatusTracker(folder, 5, lambda: raised(folder))
        tracker.start({}, "id", "name", tmp_path)
        assert json.loads(folder.status.read_text())["alarms"] == {"kl": 2, "ess_drop": 1}
        tracker.log(4, {})
        tracker.log(5, {"alarm/kl": 1.0})
        assert json.loads(folder.status.read_text())["alarms"] == {"kl": 3, "ess_drop": 1}


def test_a_comparison_lists_them_as_a_problem() -> None:
    step = np.arange(1, 6)
    columns = {"alarm/kl": np.array([np.nan, 1, 1, np.nan, 1]), "train/reward": np.ones(5)}
    run = Run("r", {}, 0, RunState.completed, step, columns, injected="logit_noise 0.3")
    (told,) = alarms(run)
    assert (told.kind, told.run) == ("alarm", "r")
    assert told.text == (
        "training raised kl at 3 steps, first 2; its gap is on purpose (logit_noise 0.3); its score counts"
    )
    assert list(alarms(Run("r", {}, 0, RunState.completed, step, {"train/reward": np.ones(5)}))) == []
