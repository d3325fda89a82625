"""``trimtab sweep status|watch|logs|cancel|resume|collect`` on recorded clusters and on local sweeps."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch import made
from launch.conftest import Slurm

from trimtab import cli
from trimtab.errors import TrimtabError
from trimtab.launch import cancel as cancel_module
from trimtab.launch import commands, table
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Batch, PlannedRun, Result, RunStatus, Slot, State, Sweep
from trimtab.launch.states import Row
from trimtab.report.sources import load
from trimtab.spec.launch import Backend, ClusterSpec, LaunchSpec, ResourceSpec


class Cluster:
    """A queue and books; ``scancel`` ends what it is given, but for ``deaf`` jobs, which are requeued once."""

    def __init__(self, *rows: Row, books: Sequence[Row] = (), deaf: Sequence[str] = (), away: bool = False) -> None:
        self.queue, self.books, self.deaf, self.away = list(rows), list(books), list(deaf), away
        self.cancelled: list[str] = []

    def squeue(self) -> list[Row]:
        if self.away:
            raise TrimtabError("no route to host")
        return self.queue

    def sacct(self, jobs: Sequence[str]) -> list[Row]:
        if self.away:
            raise TrimtabError("no route to host")
        return [row for row in self.books if row.job in jobs]

    def scancel(self, job: str) -> None:
        self.cancelled.append(job)
        number, _, index = job.partition("_")
        hit = [row for row in self.queue if row.job == number and (not index or row.index == int(index))]
        for row in hit:
            if job in self.deaf:
                self.deaf.remove(job)
                continue
            self.queue.remove(row)
            self.books.append(Row(row.job, row.index, "CANCELLED by 0", name=row.name))


NAMES = [f"algo_{i:016x}_s0" for i in (0xAAAAAAAA00000000, 0xBBBBBBBB00000000, 0xCCCCCCCC00000000, 0xDDDDDDDD00000000)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    """A sweep of four runs with 6 combinations in multirun/s."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cancel_module, "POLL", 0.01)
    at = SweepFolder(Path("multirun/s"))
    at.batches.mkdir(parents=True)
    runs = tuple(
        PlannedRun(n, n.split("_")[1], 0, (f"optim.lr={i}", "task.name=a,b", "seed=0")) for i, n in enumerate(NAMES)
    )
    at.write_sweep(Sweep("bounds", runs, 6, {"launch": {"backend": "slurm"}}, {"commit": "abc"}, {}, 0.0))
    return at


def sent(at: SweepFolder, cluster: str, job: str, *slots: Sequence[int], attempt: int = 1) -> Batch:
    batch = at.new_batch(cluster, "default", [Slot(tuple((NAMES[i], attempt) for i in slot)) for slot in slots])
    return at.write_batch(replace(batch, job=job, array=len(slots) > 1, created=time.time() - 500))


def row(batch: Batch, word: str, slot: int | None = None, reason: str = "None") -> Row:
    return Row(str(batch.job), slot, word, reason, name=f"x-{batch.id}")


def ended(at: SweepFolder, batch: Batch, i: int, state: State, attempt: int = 1, **more: object) -> None:
    at.write_result(NAMES[i], Result(batch.id, attempt, state, 10.0, 12.5, **more))  # type: ignore[arg-type]


def on(monkeypatch: pytest.MonkeyPatch, **clusters: Cluster) -> None:
    monkeypatch.setattr(commands, "clusters_of", lambda spec: clusters)


def sweep(*arguments: str) -> int:
    return cli.main(["sweep", *arguments])


# -- status ----------------------------------------------------------------------------------------------------------


def test_status_is_one_line_a_run(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = sent(folder, "a", "7", [0], [1]), sent(folder, "b", "7", [2])
    ended(folder, a, 0, State.completed, objective=0.5)
    ended(folder, b, 2, State.failed, error="ValueError: lr is 2")
    (folder.run(NAMES[0]) / "status.json").write_text('{"state": "completed", "step": 9, "steps": 9, "reward": 0.25}')
    on(monkeypatch, a=Cluster(row(a, "PENDING", 1, "Priority")), b=Cluster())
    assert sweep("status") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "bounds: 6 combinations, 4 distinct: 1 completed, 1 pending, 1 failed, 1 unsubmitted"
    assert [line.split() for line in out[2:]] == [
        ["run", "where", "try", "step", "reward", "state"],
        ["algo_aaaaaaaa_s0", "a:7_0", "1", "9/9", "0.250", "completed"],
        ["algo_bbbbbbbb_s0", "a:7_1", "1", "-", "-", "pending:", "Priority"],
        ["algo_cccccccc_s0", "b:7", "1", "-", "-", "failed:", "ValueError:", "lr", "is", "2"],
        ["algo_dddddddd_s0", "-", "-", "-", "-", "unsubmitted"]]  # fmt: skip
    assert sweep("status", "multirun/s", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"completed": 1, "pending": 1, "failed": 1, "unsubmitted": 1}
    assert [(run["state"], run["cluster"], run["job"]) for run in found["runs"]][2] == ("failed", "b", "7")
    assert found["runs"][0]["objective"] == 0.5 and found["runs"][0]["overrides"][1] == "task.name=a,b"


@pytest.mark.parametrize(("states", "code"), [
    (["completed", "completed"], 0), (["completed", "running", "pending", "unsubmitted"], 0),
    (["completed", "unsubmitted"], 1), (["completed", "preempted"], 1), (["running", "unknown"], 1),
    (["running", "failed"], 1), (["completed", "cancelled"], 1), (["lost"], 1)])  # fmt: skip
def test_exit_codes(states: list[str], code: int) -> None:
    run = PlannedRun("a", "b", 0, ())
    assert table.exit_code([RunStatus(run, State(state)) for state in states]) == code


def test_an_unreachable_cluster_is_said(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = sent(folder, "a", "7", [0]), sent(folder, "b", "7", [1])
    on(monkeypatch, a=Cluster(row(a, "RUNNING")), b=Cluster(away=True))
    assert sweep("status") == 1
    out = capsys.readouterr().out
    assert "note: b cannot be reached: no route to host; its jobs stay unknown" in out
    assert "unknown: its cluster cannot be reached" in out and " running" in out and b.id not in out


@pytest.mark.parametrize("arguments", [["status", "nowhere"], ["status", "empty"], ["logs", "multirun/s", "zzz"]])
def test_what_is_not_there(
    folder: SweepFolder, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch)
    Path("empty").mkdir()
    assert sweep(*arguments) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "arguments", [["status", "--wrong"], ["watch", "--every", "0"], ["cancel", "--pending", "--failed"]]
)
def test_wrong_command_lines_end_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sweep(*arguments)
    assert ended.value.code == 2


def test_the_default_is_the_newest_sweep(folder: SweepFolder, capsys: pytest.CaptureFixture[str]) -> None:
    newer = SweepFolder(Path("multirun/newer"))
    newer.path.mkdir()
    newer.write_sweep(Sweep("", (), 0, {}, {}, {}, 1.0))
    os.utime(folder.sweep_json, (0, 0))
    assert sweep("status") == 0
    assert capsys.readouterr().out.startswith("newer: 0 runs")


# -- watch -----------------------------------------------------------------------------------------------------------


def test_watch_ends_when_nothing_is_live(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = sent(folder, "a", "7", [0], [1], [2], [3])
    cluster = Cluster(*(row(batch, "RUNNING", i) for i in range(4)))
    on(monkeypatch, a=cluster)

    def end() -> None:
        for i in range(4):
            ended(folder, batch, i, State.completed)
        cluster.queue.clear()

    timer = threading.Timer(0.3, end)
    timer.start()
    assert sweep("watch", "--every", "0.05") == 0
    timer.join()
    lines = capsys.readouterr().out.splitlines()
    assert "4 running" in lines[0] and "4 completed" in lines[-1] and "100%" in lines[-1]


# -- logs ------------------------------------------------------------------------------------------------------------


def test_logs(folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    batch = sent(folder, "a", "7", [0, 1])
    on(monkeypatch, a=Cluster(row(batch, "RUNNING")))
    folder.run(NAMES[0]).mkdir()
    (folder.run(NAMES[0]) / "log.txt").write_bytes(b"".join(b"line %d \xff\n" % i for i in range(20)) + b"end")
    folder.log(batch.id, 0).write_text("module load\n")
    assert sweep("logs") == 0
    out = capsys.readouterr().out
    assert out.count("==>") == 4 and "line 16" in out and "line 15" not in out and "module load" in out
    assert sweep("logs", "algo_aaaaaaaa_s0") == 0
    assert "line 0 " in capsys.readouterr().out
    assert sweep("logs", "multirun/s", NAMES[0], "-n", "2") == 0
    assert capsys.readouterr().out.endswith("line 19 �\nend\n")
    assert sweep("logs", "aaaaaaaa", "--job") == 0
    assert capsys.readouterr().out == "module load\n"
    assert sweep("logs", "dddd") == 1
    assert "has printed nothing yet: it is unsubmitted" in capsys.readouterr().err
    assert sweep("logs", "algo_") == 1
    assert "fits 4 runs" in capsys.readouterr().err


def test_logs_follow_to_the_end_of_the_run(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = sent(folder, "a", "7", [0])
    cluster = Cluster(row(batch, "RUNNING"))
    on(monkeypatch, a=cluster)
    monkeypatch.setattr("trimtab.launch.logs.ASK", 0.05)
    monkeypatch.setattr("trimtab.launch.logs.LOOK", 0.01)
    folder.run(NAMES[0]).mkdir()
    log = folder.run(NAMES[0]) / "log.txt"
    log.write_text("one\n")

    def more() -> None:
        with log.open("a") as file:
            for text in ("tw", "o\n", "three"):
                file.write(text)
                file.flush()
                time.sleep(0.05)
        ended(folder, batch, 0, State.completed)
        cluster.queue.clear()

    writer = threading.Timer(0.1, more)
    writer.start()
    assert sweep("logs", "aaaa", "-f") == 0
    writer.join()
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


# -- cancel ----------------------------------------------------------------------------------------------------------


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


# -- resume, collect -------------------------------------------------------------------------------------------------


def test_resume_submits_what_is_missing_or_failed_and_nothing_live(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = sent(folder, "a", "7", [0], [1], [2])
    ended(folder, batch, 0, State.completed)
    ended(folder, batch, 1, State.failed, error="x")
    a = Cluster(row(batch, "SUSPENDED", 2))
    on(monkeypatch, a=a)
    submitted: list[list[str]] = []

    def submit(at: SweepFolder, spec: object, runs: Sequence[PlannedRun], say: object) -> list[Batch]:
        submitted.append([run.dir for run in runs])
        new = [sent(at, "a", str(20 + NAMES.index(run.dir)), [NAMES.index(run.dir)], attempt=2) for run in runs]
        a.queue += [row(one, "PENDING") for one in new]
        return new

    monkeypatch.setattr(commands, "submitter", lambda: submit)
    assert sweep("resume", "--dry-run") == 0 and submitted == []
    assert capsys.readouterr().out.splitlines() == [f"resumed: {NAMES[1]}", f"resumed: {NAMES[3]}"]
    assert sweep("resume") == 0 and submitted == [[NAMES[1], NAMES[3]]]
    assert json.loads((folder.run(NAMES[1]) / "ended.json").read_text()) == {"1": "failed"}
    assert sweep("resume") == 0 and len(submitted) == 1
    assert "1 completed, 2 pending, 1 suspended" in capsys.readouterr().out


def test_collect(folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = sent(folder, "a", "7", [0]), sent(folder, "a", "8", [1])
    ended(folder, old, 0, State.completed, objective=0.5)
    again = sent(folder, "a", "9", [1], attempt=2)
    stale = Result(new.id, 1, State.completed, 1.0, time.time(), 9.0)  # written after the second attempt was sent
    folder.write_result(NAMES[1], stale)
    on(monkeypatch, a=Cluster(row(again, "RUNNING")))
    assert sweep("collect", "--out", "out") == 0
    rows = list(csv.DictReader(Path("out/results.csv").read_text().splitlines()))
    assert [(r["run"], r["state"], r["objective"], r["optim.lr"], r["task.name"]) for r in rows[:2]] == [
        (NAMES[0], "completed", "0.5", "0", "a,b"), (NAMES[1], "running", "", "1", "a,b")]  # fmt: skip
    assert [r["seconds"] for r in rows[:2]] == ["2.5", ""] and len(rows) == 4
    capsys.readouterr()
    assert sweep("collect", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["combinations"] == 6 and found["runs"][0]["objective"] == 0.5
    assert (folder.path / "results.csv").exists()


def test_a_local_sweep_from_start_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = made.spec_of("program:odd_seeds_fail")
    at = made.sweep(tmp_path / "s", spec, seeds=[0, 1, 2])
    assert sweep("status", str(at.path)) == 1
    assert sweep("resume", str(at.path), "--run", at.sweep().runs[0].dir) == 0
    assert sweep("resume", str(at.path)) == 1
    out = capsys.readouterr().out
    assert "3 runs: 2 completed, 1 failed" in out and "failed: ValueError: seed 1 is odd" in out
    assert sweep("logs", str(at.path), at.sweep().runs[1].dir) == 0
    assert "seed 1 is odd" in capsys.readouterr().out
    assert sweep("collect", str(at.path), "--json") == 1
    assert [r["objective"] for r in json.loads(capsys.readouterr().out)["runs"]] == [0.0, None, 2.0]


@pytest.mark.slurm
def test_resume_on_two_clusters_whose_numbers_are_equal(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters = {name: ClusterSpec(conf=str(slurm.conf(name)), max_jobs=4) for name in slurm.clusters}
    launch = LaunchSpec(Backend.slurm, clusters=clusters, classes={"default": ResourceSpec(minutes=5, cpus=1)})
    at = made.sweep(tmp_path / "s", made.spec_of("program:steps", launch), range(1, 9), 400, ["+tick=0.1"])
    (at.code / "src").mkdir(parents=True)
    (at.code / "src" / "trimtab").symlink_to(made.SRC / "trimtab")
    (at.code / "src" / "program.py").symlink_to(made.HERE / "program.py")
    path = str(at.path)
    innocent = {name: slurm.client(name, "sbatch", "--parsable", "--wrap", "sleep 300").strip() for name in clusters}
    assert sweep("resume", path) == 0

    def found() -> dict[str, Any]:
        capsys.readouterr()
        sweep("status", path, "--json")
        return json.loads(capsys.readouterr().out)

    made.until(lambda: found()["counts"] == {"running": 8}, 60)
    runs = found()["runs"]
    assert {run["cluster"] for run in runs} == set(clusters)
    first = runs[0]
    assert sweep("cancel", path, "--run", first["dir"]) == 0
    assert found()["counts"] == {"running": 7, "cancelled": 1}
    assert sweep("resume", path, "--run", first["dir"]) == 0
    made.until(lambda: found()["counts"] == {"running": 8}, 60)
    assert found()["runs"][0]["attempt"] == 2
    assert sweep("logs", path, first["dir"]) == 0
    assert "step 1 of seed 1" in capsys.readouterr().out
    slurm.stop("beta")
    seen = found()
    assert {run["cluster"] for run in seen["runs"] if run["state"] == "unknown"} == {"beta"}
    assert any("beta cannot be reached" in remark for remark in seen["remarks"]) and "running" in seen["counts"]
    assert sweep("cancel", path) == 1  # beta's are left
    slurm.start("beta")
    slurm.ready("beta")
    assert sweep("cancel", path) == 0
    assert found()["counts"] == {"cancelled": 8}
    assert {name: slurm.jobs(name) for name in clusters} == {name: [job] for name, job in innocent.items()}


def test_compare_reads_a_launcher_s_sweep_and_names_what_is_missing(folder: SweepFolder) -> None:
    runs = load([str(folder.path)])
    assert sorted(run.name for run in runs) == NAMES
    assert {run.state.value for run in runs} == {"missing"}
