"""Jobs on a real SLURM: several nodes, preemption, requeues, time limits, a node that is lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launch.made import packed, result
from launch.on_slurm import completed, gone, log, prepared, sent, starts_of, wait

from trimtab.launch.attempts import history
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Batch, State
from trimtab.spec.launch import LaunchSpec, Packing, ResourceSpec

if TYPE_CHECKING:
    from launch.conftest import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def started(
    slurm: Slurm, path: Path, program: str, seeds: Sequence[int], *, steps: int = 5, overrides: Sequence[str] = (),
    launch: LaunchSpec | None = None, asked: ResourceSpec | None = None, runs_per_job: int = 1,
) -> tuple[SweepFolder, Batch]:  # fmt: skip
    """A sweep, submitted to alpha."""
    folder, spec = prepared(
        slurm, path, program, seeds, steps=steps, overrides=overrides, launch=launch, asked=asked,
        runs_per_job=runs_per_job,
    )  # fmt: skip
    return folder, sent(folder, spec)


def test_two_nodes_meet_by_gloo(slurm: Slurm, tmp_path: Path) -> None:
    asked = ResourceSpec(minutes=5, cpus=1, nodes=2, tasks_per_node=2)
    folder, batch = started(slurm, tmp_path / "s", "program:all_reduce", [1, 2], steps=3, asked=asked, runs_per_job=2)
    for i in range(2):
        completed(slurm, folder, batch, i)
        assert result(folder, i).objective == 1 + 2 + 3 + 4
        assert log(folder, i).count("== attempt") == 1 and "rank 0 of 4" in log(folder, i)
    state = ("sacct", "-nXo", "state", "-j", str(batch.job))  # the books know of an end later than the queue
    wait(lambda: "COMPLETED" in slurm.client("alpha", *state), 30, "the job's end in the books")
    assert gone(slurm)


def test_a_preempted_run_goes_on_where_it_was(slurm: Slurm, tmp_path: Path) -> None:
    asked = ResourceSpec(minutes=5, cpus=8)
    folder, batch = started(slurm, tmp_path / "s", "program:steps", [2], steps=60, overrides=["tick=0.2"], asked=asked)
    wait(lambda: "step 7 " in log(folder), 60, "seventh step")
    slurm.client(
        "alpha", "sbatch", "-p", "urgent", "-N", "2", "-c", "8", "-t", "1", "-o", "/dev/null", "--wrap", "sleep 1"
    )
    completed(slurm, folder, batch)
    assert result(folder, 0).objective == 60 * 61
    assert starts_of(folder)[0] == 0 and starts_of(folder)[1] >= 7
    found = [one.state for one in history(folder, folder.sweep().runs[0].dir)]
    assert found[-1] is State.completed and set(found[:-1]) == {State.preempted}


def test_a_time_limit_is_told_from_a_preemption_and_the_run_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    asked = ResourceSpec(minutes=1, cpus=1)
    folder, batch = started(
        slurm, tmp_path / "s", "program:steps", [1], steps=150, overrides=["tick=0.5"], asked=asked
    )  # fmt: skip
    completed(slurm, folder, batch, seconds=240)
    found = [one.state for one in history(folder, folder.sweep().runs[0].dir)]
    assert found[-1] is State.completed and set(found[:-1]) == {State.timed_out}
    assert result(folder, 0).objective == 150 * 151 / 2


def test_a_requeue_by_hand_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    folder, batch = started(slurm, tmp_path / "s", "program:steps", [1], steps=60, overrides=["tick=0.2"])
    wait(lambda: "step 7 " in log(folder), 60, "seventh step")
    slurm.client("alpha", "scontrol", "requeue", str(batch.job))
    completed(slurm, folder, batch)
    assert result(folder, 0).objective == 60 * 61 / 2 and starts_of(folder)[1] >= 5


def test_a_cancelled_run_saves_and_stays_away(slurm: Slurm, tmp_path: Path) -> None:
    folder, batch = started(slurm, tmp_path / "s", "program:steps", [1], steps=100, overrides=["tick=0.2"])
    wait(lambda: "step 2 " in log(folder), 60, "second step")
    slurm.client("alpha", "scancel", str(batch.job))
    wait(lambda: gone(slurm), 60, "end of the job")
    time.sleep(2)
    assert gone(slurm) and len(starts_of(folder)) == 1
    assert "CANCELLED" in slurm.client("alpha", "sacct", "-nXo", "state%20", "-j", str(batch.job))


def test_a_lost_node_leaves_one_result(slurm: Slurm, tmp_path: Path) -> None:
    """Its slurmd dies; what runs there is a ghost that makes room for the requeued job on the other node."""
    folder, batch = started(slurm, tmp_path / "s", "program:steps", [1], steps=400, overrides=["tick=0.2"])
    wait(lambda: "step 2 " in log(folder), 60, "second step")
    node = slurm.client("alpha", "squeue", "-ho", "%N").strip()
    slurm.stop(node)
    slurm.client("alpha", "scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    completed(slurm, folder, batch, seconds=180)
    assert result(folder, 0).objective == 400 * 401 / 2
    assert [one.state for one in history(folder, folder.sweep().runs[0].dir)] == [State.completed]


def test_runs_of_one_job_side_by_side(slurm: Slurm, tmp_path: Path) -> None:
    folder, batch = started(
        slurm, tmp_path / "s", "program:odd_seeds_are_killed", [1, 2, 4], runs_per_job=3,
        launch=packed(Packing.side_by_side),
    )  # fmt: skip
    wait(lambda: gone(slurm), 60, "end of the job")
    assert [result(folder, i).state for i in range(3)] == [State.out_of_memory, State.completed, State.completed]
    assert "FAILED" in slurm.client("alpha", "sacct", "-nXo", "state", "-j", str(batch.job))
