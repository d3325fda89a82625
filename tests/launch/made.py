"""Sweeps of cheap programs, as the planner leaves them on disk; and jobs of theirs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from trimtab.config import config_hash, to_yaml
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import PlannedRun, Result, Sweep
from trimtab.spec import RunSpec
from trimtab.spec.launch import LaunchSpec, Packing, SweepSpec

SRC, HERE = Path(__file__).parents[2] / "src", Path(__file__).parent
SEARCH = f"{SRC}{os.pathsep}{HERE}"


def spec_of(program: str, launch: LaunchSpec | None = None, **options: object) -> SweepSpec:
    """Options of a sweep whose runs call one of ``program.py``."""
    return replace(SweepSpec(), **options, launch=replace(launch or LaunchSpec(), program=program))  # type: ignore[arg-type]


def sweep(
    path: Path, spec: SweepSpec, seeds: Sequence[int], steps: int = 5, overrides: Sequence[str] = (),
    base: RunSpec | None = None,
) -> SweepFolder:  # fmt: skip
    """A sweep over seeds, ready to be started."""
    folder = SweepFolder(path)
    folder.frozen.mkdir(parents=True)
    folder.batches.mkdir()
    runs = []
    for seed in seeds:
        one = replace(base or RunSpec(), seed=seed, steps=steps)
        run = PlannedRun(f"standard_{config_hash(one)}_s{seed}", config_hash(one), seed, tuple(overrides))
        folder.config(run.dir).write_text(to_yaml(one))
        runs.append(run)
    plain = asdict(spec)
    plain["launch"]["packing"] = spec.launch.packing.value
    plain["launch"]["backend"] = spec.launch.backend.value
    folder.write_sweep(Sweep(path.name, tuple(runs), len(runs), plain, {"commit": "abc"}, {"PYTHONPATH": SEARCH}, 0.0))
    return folder


def packed(packing: Packing) -> LaunchSpec:
    return replace(LaunchSpec(), packing=packing)


def result(folder: SweepFolder, i: int) -> Result:
    """The result of the sweep's i-th run."""
    found = folder.result(folder.sweep().runs[i].dir)
    assert found is not None
    return found


def run_dir(folder: SweepFolder, i: int) -> Path:
    return folder.run(folder.sweep().runs[i].dir)


def job(folder: SweepFolder, batch: str, **environment: str) -> subprocess.Popen[str]:
    """A job's process, as a cluster starts it."""
    command = [sys.executable, "-u", "-P", "-m", "trimtab.launch.job", str(folder.path), batch]
    return subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": SEARCH} | environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until it holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def copied(folder: SweepFolder) -> None:
    """The copy of the code that the jobs of a cluster import, with the cheap programs."""
    shutil.copytree(SRC / "trimtab", folder.code / "src" / "trimtab", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "program.py", folder.code / "src")
