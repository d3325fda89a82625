"""A project of W&B read through the real client from a double of its server; each client in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from wandb_server import ENTITY, WandbServer

pytest.importorskip("wandb")
SRC = Path(__file__).parents[2] / "src"

WRITE = """
import wandb
quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
for seed in (0, 1):
    with wandb.init(project="p", group="g", id=f"id{seed}", name=f"n{seed}", settings=quiet, reinit="finish_previous",
                    config={"seed": seed, "algo": {"name": "bypass"}}) as run:
        for step in (0, 1, 2, 3, 1):
            run.log({"train/step": step, "eval/reward": 0.5 + seed + step})
        run.log({"train/step": 1, "eval/reward": 9.0})
wandb.teardown()
"""
READ = """
import json, sys
from trimtab.errors import TrimtabError
from trimtab.report.sources import load
try:
    runs = load(sys.argv[1:])
except TrimtabError as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
else:
    print(json.dumps([[r.run_id, r.name, r.seed, r.state.value, r.config["algo.name"], r.step.tolist(),
                       r.columns["eval/reward"].tolist()] for r in runs]))
"""


def child(folder: Path, env: dict[str, str], code: str, *arguments: str) -> str:
    """What a program prints, in a folder of its own."""
    full = {**os.environ, "PYTHONPATH": str(SRC), **env}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=folder, env=full, capture_output=True, text=True,
                          timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_runs_of_a_project_and_of_a_group(tmp_path: Path) -> None:
    def read(*addresses: str) -> Any:
        return json.loads(child(tmp_path, server.env, READ, *addresses).splitlines()[-1])

    with WandbServer() as server:
        child(tmp_path, server.env, WRITE)
        runs = read(f"wandb:{ENTITY}/p")
        assert [run[:5] for run in runs] == [
            ["id0", "n0", 0, "completed", "bypass"],
            ["id1", "n1", 1, "completed", "bypass"],
        ]
        assert runs[0][5:] == [[0, 1, 2, 3], [0.5, 9.0, 2.5, 3.5]], "of a step that comes again the last row counts"
        assert read(f"wandb:{ENTITY}/p/g") == runs
        assert read(f"wandb:{ENTITY}/p/another").startswith("DataError: no run at")
        assert server.unknown == []
