"""Clusters that do not answer: each costs one short wait, at the same time as the others, once a command."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.launch.clusters import Cluster, Unreachable
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import PlannedRun, Slot, State, Sweep
from trimtab.launch.states import Row
from trimtab.launch.status import survey
from trimtab.spec.launch import ClusterSpec


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose commands come first in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def stand_in(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho {name} $* >>{folder}/calls\n{body}\n")
    (folder / name).chmod(0o755)


def test_a_question_to_a_dead_controller_ends_as_soon_as_a_ping_says_so(bin: Path) -> None:
    stand_in(bin, "squeue", "exec sleep 9")
    stand_in(bin, "sbatch", "exec sleep 9")
    stand_in(bin, "scontrol", "[ $1 = ping ] || exec sleep 9; echo 'Slurmctld(primary) at far1 is DOWN'; exit 1")
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"far: Slurmctld\(primary\) at far1 is DOWN") as caught:
        Cluster("far", ClusterSpec()).squeue()
    with pytest.raises(Unreachable, match="DOWN"):
        Cluster("far", ClusterSpec()).test_only("#!/bin/sh\n")
    with pytest.raises(Unreachable, match="DOWN"):
        Cluster("far", ClusterSpec()).capacity()
    assert time.monotonic() - began < 8 and not caught.value.sent


@pytest.mark.parametrize(
    "ping", ["echo 'Slurmctld(primary) at a is DOWN'; echo 'Slurmctld(backup) at b is UP'", "exit 3", "exec sleep 60"]
)
def test_one_that_is_only_slow_is_waited_for(bin: Path, ping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.launch.clusters.ALARM", 0.2)
    stand_in(bin, "squeue", "sleep 1; echo '7@N/A@RUNNING@None@x@y'")
    stand_in(bin, "sbatch", "cat >/dev/null; sleep 1; echo 'sbatch: Job 1 to start at 2026-01-01T00:00:00'")
    stand_in(bin, "scontrol", ping)  # one of two is up; no answer that is understood; none at all
    assert Cluster("far", ClusterSpec()).squeue() == [Row("7", None, "RUNNING", "None", "x", "y")]
    assert Cluster("far", ClusterSpec()).test_only("#!/bin/sh\n") is not None


def test_what_changes_something_is_not_ended_by_a_ping(bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.launch.clusters.ALARM", 0.1)
    stand_in(bin, "sbatch", "cat >/dev/null; sleep 0.5; echo 12")
    stand_in(bin, "scancel", "sleep 0.5")
    stand_in(bin, "scontrol", "echo 'Slurmctld(primary) at far1 is DOWN'; exit 1")
    cluster = Cluster("far", ClusterSpec())
    assert cluster.sbatch("#!/bin/sh\n") == "12"
    cluster.scancel("12")
    assert "scontrol" not in (bin / "calls").read_text()


class Slow:
    """A cluster that answers after a while; ``asked`` counts the questions."""

    def __init__(self) -> None:
        self.asked = 0

    def squeue(self) -> Sequence[Row]:
        self.asked += 1
        time.sleep(0.5)
        return [Row("7", None, "RUNNING", name="trimtab-none")]

    def sacct(self, jobs: Sequence[str]) -> Sequence[Row]:
        return []


def test_clusters_are_asked_side_by_side(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    runs = tuple(PlannedRun(f"r{i}", f"{i:016x}", i, ()) for i in range(6))
    folder.write_sweep(Sweep("s", runs, 6, {}, {}, {}, 0.0))
    clusters = {f"c{i}": Slow() for i in range(6)}
    for run, name in zip(runs, clusters, strict=True):
        batch = folder.new_batch(name, "default", [Slot(((run.dir, 1),))])
        folder.write_batch(replace(batch, job="7"))
    began = time.monotonic()
    seen = survey(folder, clusters)
    assert time.monotonic() - began < 1.5
    assert {run.state for run in seen.runs} == {State.pending} and seen.remarks == []
    assert [cluster.asked for cluster in clusters.values()] == [1] * 6
