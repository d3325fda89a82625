"""Sweeps of cheap programs on the real SLURM, and waiting for what becomes of them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.made import copied, run_dir, spec_of, sweep

from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Batch, State
from trimtab.launch.submit import submit
from trimtab.spec.launch import ClusterSpec, LaunchSpec, ResourceSpec, SweepSpec

if TYPE_CHECKING:
    from launch.conftest import Slurm


def wait(true: object, seconds: float, what: str, every: float = 0.5) -> None:
    """Fail when it does not come true."""
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, f"no {what} after {seconds:.0f} s"
        time.sleep(every)


def prepared(
    slurm: Slurm, path: Path, program: str, seeds: Sequence[int], *, steps: int = 5, overrides: Sequence[str] = (),
    launch: LaunchSpec | None = None, asked: ResourceSpec | None = None, runs_per_job: int = 1,
    alpha: ClusterSpec | None = None,
) -> tuple[SweepFolder, SweepSpec]:  # fmt: skip
    """A sweep for alpha; nothing is submitted yet."""
    clusters = {"alpha": replace(alpha or ClusterSpec(), conf=str(slurm.conf("alpha")))}
    classes = {"default": asked or ResourceSpec(minutes=5, cpus=1)}
    launch = replace(launch or LaunchSpec(), clusters=clusters, classes=classes, signal_lead=30)
    spec: SweepSpec = spec_of(program, launch, runs_per_job=runs_per_job)
    folder = sweep(path, spec, seeds, steps, overrides)
    copied(folder)
    found = replace(folder.sweep(), environment={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"})
    folder.write_sweep(found)
    return folder, spec


def sent(folder: SweepFolder, spec: SweepSpec) -> Batch:
    """Submit all of its runs."""
    (batch,) = submit(folder, spec, folder.sweep().runs, print)
    return batch


def log(folder: SweepFolder, i: int = 0) -> str:
    path = run_dir(folder, i) / "log.txt"
    return path.read_text() if path.exists() else ""


def gone(slurm: Slurm) -> bool:
    return not slurm.jobs("alpha")


def hurry(slurm: Slurm, batch: Batch) -> None:
    """Have a requeued job start soon; at once its node would take it for the one that it has just ended."""
    if "PENDING BeginTime" in slurm.client("alpha", "squeue", "-ho", "%T %r", "-j", str(batch.job)):
        time.sleep(2)
        command = ["scontrol", "update", f"JobId={batch.job}", "StartTime=now"]
        subprocess.run(command, env=slurm.use("alpha"), capture_output=True, timeout=60)  # it may have begun by now


def completed(slurm: Slurm, folder: SweepFolder, batch: Batch, i: int = 0, seconds: float = 120) -> None:
    """Wait for the i-th run's end."""
    name = folder.sweep().runs[i].dir

    def ended() -> bool:
        hurry(slurm, batch)
        found = folder.result(name)
        return found is not None and found.state is State.completed

    wait(ended, seconds, f"completed run; log: {log(folder, i)} {folder.log(batch.id, 0)}")


def starts_of(folder: SweepFolder, i: int = 0) -> list[int]:
    """The step from which each start went on."""
    return [int(line.split()[2]) for line in (run_dir(folder, i) / "starts.txt").read_text().splitlines()]
