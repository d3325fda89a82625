"""The real program and the real client against a double of the server: a sweep of which one run fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

pytest.importorskip("wandb")

from e2e.program import VARIED, Program
from wandb_server import WandbServer

pytestmark = pytest.mark.slow


def fails_at(run_dir: Path) -> int:
    (given,) = [text for text in yaml.safe_load((run_dir / "overrides.yaml").read_text()) if "fail_at" in text]
    return int(given.split("=")[1])


@pytest.mark.parametrize("launcher", [(), ("hydra/launcher=basic",)], ids=["as it is", "in one process"])
def test_the_runs_of_a_sweep_stay_apart_and_each_ends_as_it_did(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    sweep = ("debug=smoke", *VARIED, "-m", "+task.options.fail_at=0,20,1000", "steps=2", "hydra.sweep.dir=three")
    with WandbServer() as server:
        env = server.env | {"HOME": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path / "wc")}
        program = Program(tmp_path, tmp_path / "cache")
        done = program.call(*sweep, *launcher, "tracker=wandb", "tracker.finish_seconds=60", env=env)
        folders = sorted((path.parent for path in (tmp_path / "three").rglob("wandb.json")), key=fails_at)
        assert done.returncode == 1 and [fails_at(folder) for folder in folders] == [0, 20, 1000], done.stderr
        runs = [server.run(json.loads((folder / "wandb.json").read_text())["id"]) for folder in folders]
        assert len(server.runs) == 3 and server.unknown == []
    assert [run.state for run in runs] == ["finished", "failed", "finished"]
    assert [run.summary["state"] for run in runs] == ["completed", "failed", "completed"]
    assert [str(run.display_name).rsplit("fail_at=")[-1] for run in runs] == ["0", "20", "1000"]
    assert {run.group for run in runs} == {"three"}
    for folder, run in zip(folders, runs, strict=True):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        wanted = [(record["step"], record.get("train/reward")) for record in map(json.loads, lines)]
        assert [(row["train/step"], row.get("train/reward")) for row in run.rows] == wanted
