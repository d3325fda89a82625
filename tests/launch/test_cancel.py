"""``trimtab sweep cancel``: the right jobs, on the right cluster, and none of anybody else's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launch.recorded import NAMES, Cluster, ended, on, row, sent, sweep, sweep_of_four

from trimtab.launch.files import SweepFolder
from trimtab.launch.model import State
from trimtab.launch.states import Row


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    """A sweep of four runs with 6 combinations in multirun/s."""
    return sweep_of_four(tmp_path, monkeypatch)


def test_cancel_ends_this_sweep_s_jobs_and_no_others(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, three = sent(folder, "a", "7", [0], [1]), sent(folder, "b", "7", [2]), sent(folder, "b", "8", [3])
    a = Cluster(row(one, "RUNNING", 0), row(one, "PENDING", 1), Row("8", None, "RUNNING", name="innocent"))
    b = Cluster(row(two, "RUNNING"), Row("8", None, "RUNNING", name="innocent"), books=[row(three, "NODE_FAIL")])
    on(monkeypatch, a=a, b=b)
    assert sweep("cancel", "--dry-run") == 0 and a.cancelled == b.cancelled == []
    assert sweep("cancel") == 0
    assert (a.cancelled, b.cancelled) == (["7"], ["7"])
    assert capsys.readouterr().out.splitlines()[-3:] == [
        f"cancelled: a:7_0 ({NAMES[0]})", f"cancelled: a:7_1 ({NAMES[1]})", f"cancelled: b:7 ({NAMES[2]})"]  # fmt: skip
    assert sweep("status", "--json") == 1
    assert [run["state"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["cancelled"] * 3 + ["node_failed"]
    assert sweep("cancel") == 0 and "nothing of" in capsys.readouterr().out


def test_cancel_some(folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = sent(folder, "a", "7", [0], [1]), sent(folder, "a", "9", [2, 3])
    a = Cluster(row(one, "RUNNING", 0), row(one, "PENDING", 1), row(two, "RUNNING"))
    ended(folder, two, 2, State.failed, error="x")
    on(monkeypatch, a=a)
    assert sweep("cancel", "--run", NAMES[1]) == 0 and a.cancelled == ["7_1"]
    assert sweep("cancel", "--failed") == 0 and a.cancelled == ["7_1", "9"]
    assert sweep("cancel", "--pending") == 0 and a.cancelled == ["7_1", "9"]
    three = sent(folder, "a", "11", [1, 2], attempt=2)
    a.queue.append(row(three, "PENDING"))
    capsys.readouterr()
    assert sweep("cancel", "--run", NAMES[1]) == 0 and a.cancelled == ["7_1", "9"]
    assert f"left: a:11 ({NAMES[1]}, {NAMES[2]}): {NAMES[1]} shares it with {NAMES[2]}" in capsys.readouterr().out
    assert sweep("cancel", "--pending") == 0 and a.cancelled == ["7_1", "9", "11"]


def test_cancel_again_what_its_cluster_requeues(folder: SweepFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    one = sent(folder, "a", "7", [0])
    a = Cluster(row(one, "PENDING"), deaf=["7"])
    on(monkeypatch, a=a)
    assert sweep("cancel") == 0 and a.cancelled == ["7", "7"] and a.queue == []


def test_cancel_finds_a_job_of_an_earlier_attempt(folder: SweepFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = sent(folder, "a", "7", [0]), sent(folder, "b", "7", [0], attempt=2)
    a, b = Cluster(row(old, "RUNNING")), Cluster(row(new, "RUNNING"))
    on(monkeypatch, a=a, b=b)
    assert sweep("cancel") == 0 and (a.cancelled, b.cancelled) == (["7"], ["7"])


def test_cancel_says_what_it_cannot_reach(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, _ = sent(folder, "a", "7", [0]), sent(folder, "b", "7", [1])
    a = Cluster(row(one, "RUNNING"))
    on(monkeypatch, a=a, b=Cluster(away=True))
    assert sweep("cancel", "--json") == 1 and a.cancelled == ["7"]
    assert "b: no route to host" in json.loads(capsys.readouterr().out)["failed"]


def test_cancel_a_local_job(folder: SweepFolder, capsys: pytest.CaptureFixture[str]) -> None:
    batch = sent(folder, "local", "0", [0])
    with subprocess.Popen([sys.executable, "-c", "input()", batch.id], stdin=subprocess.PIPE) as process:
        folder.write_batch(replace(batch, job=str(process.pid)))
        assert sweep("cancel") == 0
        assert process.wait(10) == -signal.SIGTERM
    assert sweep("status", "--json") == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]["state"] == "cancelled"


def test_jobs_that_no_run_needs_are_said_and_ended_too(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, again = (
        sent(folder, "a", "7", [0], [1]),
        sent(folder, "a", "9", [2]),
        sent(folder, "b", "3", [2], attempt=2),
    )
    for batch, i in ((one, 0), (one, 1)):
        ended(folder, batch, i, State.completed)
    a = Cluster(
        row(one, "PENDING", 0, "launch failed requeued held"), row(one, "RUNNING", 1), row(two, "SUSPENDED"),
        Row("70", None, "PENDING", name=f"trimtab-{two.id}"), Row("71", None, "PENDING", name=f"after-{two.id}"),
    )  # fmt: skip
    on(monkeypatch, a=a, b=Cluster(row(again, "RUNNING")))
    assert sweep("status") == 0
    said = "3 jobs are in the queue that no run needs: a:7_0, a:9, a:70"
    why = "(PENDING; SUSPENDED; launch failed requeued held); trimtab sweep cancel ends them"
    assert f"note: {said} {why}" in capsys.readouterr().out
    assert sweep("status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["remarks"] == [f"{said} {why}"]
    assert sweep("cancel", "--run", NAMES[3]) == 0 and a.cancelled == []
    assert sweep("cancel", "--run", NAMES[0]) == 0 and a.cancelled == ["7_0"]
    assert sweep("cancel", "--pending") == 0 and a.cancelled == ["7_0", "70"]
    assert sweep("cancel") == 0 and a.cancelled == ["7_0", "70", "7", "9"]
    assert [left.name for left in a.queue] == [f"after-{two.id}"]
    assert sweep("status") == 1 and "that no run needs" not in capsys.readouterr().out


def test_a_job_that_is_named_is_ended_and_no_other_of_its_run(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = sent(folder, "a", "7", [0], [1]), sent(folder, "b", "7", [0, 1], attempt=2)
    a, b = Cluster(row(old, "RUNNING", 0), row(old, "RUNNING", 1)), Cluster(row(new, "RUNNING"))
    on(monkeypatch, a=a, b=b)
    assert sweep("cancel", "--run", "a:7_0") == 0 and (a.cancelled, b.cancelled) == (["7_0"], [])
    assert sweep("cancel", "--run", "b:7") == 0 and (a.cancelled, b.cancelled) == (["7_0"], ["7"])


def test_a_cluster_that_is_none_of_the_choice_is_not_asked(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, _ = sent(folder, "a", "7", [0]), sent(folder, "b", "7", [1])
    on(monkeypatch, a=Cluster(row(one, "RUNNING")), b=Cluster(away=True))
    assert sweep("cancel", "--run", NAMES[0], "--json") == 1  # the survey says so, the cancel needs it not
    assert json.loads(capsys.readouterr().out) == {
        "cancelled": [f"a:7 ({NAMES[0]})"], "left": [],
        "failed": ["b cannot be reached: no route to host; its jobs stay unknown",
                   "b: sacct does not answer: no route to host"]}  # fmt: skip
