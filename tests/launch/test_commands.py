"""``trimtab sweep status|watch|logs|cancel|resume|collect`` on recorded clusters and on local sweeps."""

from __future__ import annotations

import argparse
import csv
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch import made
from launch.conftest import Slurm
from launch.recorded import NAMES, Cluster, ended, on, row, sent, sweep, sweep_of_four

from trimtab.launch import commands, table
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Batch, PlannedRun, Result, RunStatus, State, Sweep
from trimtab.launch.states import Row
from trimtab.report.sources import load
from trimtab.spec.launch import Backend, ClusterSpec, LaunchSpec, ResourceSpec


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    """A sweep of four runs with 6 combinations in multirun/s."""
    return sweep_of_four(tmp_path, monkeypatch)


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


def test_a_sweep_without_a_name_is_called_by_its_folder(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch)
    folder.write_sweep(replace(folder.sweep(), sweep="sweep"))
    assert sweep("status") == 1 and capsys.readouterr().out.startswith("s: 6 combinations")
    assert sweep("status", "--json") == 1 and json.loads(capsys.readouterr().out)["sweep"] == "s"
    assert sweep("collect", "--json") == 1 and json.loads(capsys.readouterr().out)["sweep"] == "s"


def column(table: str, i: int) -> list[str]:
    return [line.split()[i] for line in table.splitlines()[2:]]


def test_a_program_without_rewards_shows_its_objectives(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = sent(folder, "a", "7", [0], [1])
    ended(folder, batch, 0, State.completed, objective=1234.5)
    on(monkeypatch, a=Cluster(row(batch, "RUNNING", 1)))
    assert sweep("status") == 0
    assert column(capsys.readouterr().out, 4) == [
        "objective",
        "1234.5",
        "-",
        "-",
        "-",
    ]
    folder.run(NAMES[1]).mkdir()
    (folder.run(NAMES[1]) / "status.json").write_text('{"state": "running", "reward": 0.25}')
    assert sweep("status") == 0
    assert column(capsys.readouterr().out, 4) == ["reward", "-", "0.250", "-", "-"]


def test_a_job_that_died_without_a_word_is_told_by_the_end_of_its_log(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, _ = (sent(folder, "a", str(7 + i), [i]) for i in range(3))
    folder.log(one.id, 0).write_bytes(b"x" * 9000 + b"\nLmod: no such module: cuda/99\xff\n\n  \n")
    folder.log(two.id, 0).write_text("step 3\n")
    on(monkeypatch, a=Cluster(books=[Row("7", None, "FAILED", "exit code 1:0", name=one.id),
                                     Row("8", None, "NODE_FAIL", name=two.id)]))  # fmt: skip
    assert sweep("status") == 1
    lines = [line.partition(" - ")[2].strip("- ") for line in capsys.readouterr().out.splitlines()[3:]]
    assert lines == [
        "lost: its job ended as FAILED, exit code 1:0 without a word of the run; the last line of its job's log: "
        "Lmod: no such module: cuda/99�",
        "node_failed: NODE_FAIL", "lost: not in the queue nor in sacct's books", "unsubmitted"]  # fmt: skip


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


def test_logs_of_the_job_of_any_attempt(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = sent(folder, "a", "7", [0, 1], [2]), sent(folder, "b", "7", [0], attempt=2)
    a = Cluster(row(old, "COMPLETING", 1), books=[row(old, "TIMEOUT", 0)])
    on(monkeypatch, a=a, b=Cluster(row(new, "RUNNING")))
    folder.run(NAMES[0]).mkdir()
    (folder.run(NAMES[0]) / "log.txt").write_text("all attempts\n")
    for batch, slot in ((old, 0), (old, 1), (new, 0)):
        folder.log(batch.id, slot).write_text(f"{batch.cluster} {slot}\n")
    for words, shown in ((["b:7"], "all attempts\n"), (["b:7", "--job"], "b 0\n"), (["a:7_1"], "a 1\n")):
        assert sweep("logs", *words) == 0
        assert capsys.readouterr().out == shown
    assert sweep("logs", "a:7_0") == 0  # of two runs: run 0 went on elsewhere, and one log holds both
    assert capsys.readouterr().out == "a 0\n"
    assert sweep("logs", "a:8") == 1 and "no run is called a:8" in capsys.readouterr().err


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


def test_a_key_that_ends_a_command_ends_it_without_a_traceback() -> None:
    def interrupted(options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    assert commands.surviving(interrupted)(argparse.Namespace()) == 130


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
    followed: list[Path] = []
    monkeypatch.setattr(commands, "follow", lambda at, *rest, **options: followed.append(at.path))
    assert sweep("resume", "--wait") == 0 and len(submitted) == 1
    assert followed == [folder.path], "who lost the one that followed can follow again"


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
    made.until(lambda: sweep("logs", path, first["dir"]) == 0 and "step 1 of seed 1" in capsys.readouterr().out, 60)
    slurm.stop("beta")
    began = time.monotonic()
    seen = found()
    assert time.monotonic() - began < 5  # its clients would try for 9 s
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
