"""Several tasks of one run: rank numbers, meeting places that never collide, and ends that all ranks learn of."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from launch.made import job, result, run_dir, spec_of, sweep, until

from trimtab.launch.attempts import history
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Slot, State
from trimtab.launch.ranks import PORTS, Meeting, Place, free_port, tasks_of_nodes


def batch(folder: SweepFolder, cluster: str = "alpha") -> str:
    runs = tuple((run.dir, 1) for run in folder.sweep().runs)
    return folder.write_batch(replace(folder.new_batch(cluster, "default", [Slot(runs)]), job="1")).id


def task(folder: SweepFolder, batch: str, rank: int, world: int, **more: str) -> subprocess.Popen[str]:
    """One task of a job, with what srun sets for it: two tasks a node."""
    return job(
        folder, batch, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank % 2), SLURM_NODEID=str(rank // 2),
        SLURM_STEP_NUM_TASKS=str(world), SLURM_STEP_TASKS_PER_NODE=f"2(x{world // 2})", OMP_NUM_THREADS="1", **more,
    )  # fmt: skip


def test_tasks_of_nodes() -> None:
    assert tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]
    assert tasks_of_nodes("4") == [4]
    assert tasks_of_nodes("1,2(x2)") == [1, 2, 2]


def test_a_place_is_read_from_what_srun_sets() -> None:
    seen = {
        "SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }  # fmt: skip
    assert Place.here(seen) == Place(3, 4, 1, 2, 1)
    assert Place.here({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == Place()
    assert Place(3, 4, 1, 2, 1).environment("n1", 20001) == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "MASTER_ADDR": "n1", "MASTER_PORT": "20001",
    }  # fmt: skip


def test_ports_are_free_and_never_given_twice() -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(free_port, ["same key"] * 16))  # all of them begin at the same port
    ports = [port for port, _ in found]
    assert len(set(ports)) == 16 and all(port in PORTS for port in ports)
    for _, lock in found:
        os.close(lock)
    port, lock = free_port("same key")
    assert port == min(ports)
    os.close(lock)
    with socket.create_server(("", port)):
        other, lock = free_port("same key")
        os.close(lock)
        assert other != port


def test_the_verdict_is_of_all_ranks(tmp_path: Path) -> None:
    ranks = [Meeting(tmp_path, Place(rank, 3)) for rank in range(3)]
    ranks[0].end(0, State.completed, 0.5, "")
    ranks[1].end(0, State.completed, 9.0, "")
    assert ranks[0].verdict(0, 0.2) == (State.failed, None, "no word from rank 2")
    ranks[2].end(0, State.failed, None, "ValueError: two")
    ranks[0].end(0, State.failed, None, "ConnectionError: two is gone")
    assert ranks[0].verdict(0, 0.2) == (State.failed, None, "rank 2: ValueError: two")
    ranks[1].end(0, State.preempted, None, "SIGUSR2")  # two's error came of one's stop
    assert ranks[0].verdict(0, 0.2) == (State.preempted, None, "rank 1: SIGUSR2")
    for rank in range(3):
        ranks[rank].end(1, State.completed, float(rank), "")
    assert ranks[0].verdict(1, 0.2) == (State.completed, 0.0, "")


def test_a_rank_joins_once_rank_0_has_begun_or_skips(tmp_path: Path) -> None:
    first, second = Meeting(tmp_path, Place(0, 2)), Meeting(tmp_path, Place(1, 2))
    assert second.join(0, lambda: True) is None
    mine = first.begin(0, "key")
    theirs = second.join(0, lambda: False)
    assert theirs is not None
    assert {**mine, "RANK": "1"} == theirs | {"LOCAL_RANK": mine["LOCAL_RANK"]}
    first.skip(1)
    assert second.join(1, lambda: False) == {}
    first.close()


@pytest.mark.slow
def test_two_groups_on_one_host_meet_among_themselves(tmp_path: Path) -> None:
    folders = [sweep(tmp_path / name, spec_of("program:all_reduce"), [1], steps=3) for name in ("a", "b")]
    ids = [batch(folder) for folder in folders]
    tasks = [task(f, id, rank, 2) for f, id in zip(folders, ids, strict=True) for rank in (1, 0)]
    printed = [one.communicate(timeout=60)[0] for one in tasks]
    assert [one.returncode for one in tasks] == [0] * 4, printed
    assert [result(folder, 0).objective for folder in folders] == [3.0, 3.0]
    said = [(run_dir(folder, 0) / "log.txt").read_text().splitlines()[-1] for folder in folders]
    ports = {line.split(" at ")[1].split(":")[0] for line in said}
    assert len(ports) == 2
    assert all(len(history(folder, folder.sweep().runs[0].dir)) == 1 for folder in folders)
    assert all((run_dir(folder, 0) / "log.txt").read_text().count("== attempt") == 1 for folder in folders)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_ends_the_run_for_all(tmp_path: Path, failing: int) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:all_reduce"), [1], steps=3, overrides=[f"at={failing}"])
    one = batch(folder)
    tasks = [task(folder, one, rank, 2) for rank in range(2)]
    printed = [each.communicate(timeout=60)[0] for each in tasks]
    found = result(folder, 0)
    assert found.state is State.failed, printed
    assert found.error == "ValueError: rank 0 fails" if failing == 0 else "rank 1: ValueError: rank 1 fails"


def test_the_local_backend_is_one_task_even_inside_a_step_of_srun(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:steps"), [1])
    only = task(folder, batch(folder, "local"), 1, 2)
    only.communicate(timeout=20)
    assert result(folder, 0).state is State.completed


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_for_all(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:hung_without_rank_1"), [1])
    one = batch(folder)
    tasks = [task(folder, one, rank, 2) for rank in range(2)]
    for each in tasks:
        each.communicate(timeout=60)
    words = "rank 1: killed by SIGKILL; most likely the memory ran out"
    assert (result(folder, 0).state, result(folder, 0).error) == (State.out_of_memory, words)


@pytest.mark.slow
def test_ranks_that_are_stopped_end_as_preempted(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:deaf"), [1])
    one = batch(folder)
    tasks = [task(folder, one, rank, 2) for rank in range(2)]
    until(lambda: (run_dir(folder, 0) / "begun").exists())
    for each in tasks:
        each.send_signal(signal.SIGUSR2)
    for each in tasks:
        each.communicate(timeout=60)
    assert result(folder, 0).state is State.preempted
