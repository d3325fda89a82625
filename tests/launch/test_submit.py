"""Submission over two real clusters: nothing twice, nothing lost, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from launch.conftest import Slurm, wait_until

from trimtab.errors import TrimtabError
from trimtab.launch.clusters import Cluster
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import PlannedRun, Slot, State, Sweep
from trimtab.launch.status import statuses
from trimtab.launch.submit import clusters_of, preflight, recover, scripts, submit, submitting
from trimtab.spec.launch import ClusterSpec, LaunchSpec, ResourceSpec, RetrySpec, SweepSpec

HERE = Path(__file__).parents[1]
REAL = shutil.which("sbatch")
# A stand-in for the job's module: it notes its start, waits as long as sleep.txt says, and writes its results.
JOB = """
import json, os, sys, time
from pathlib import Path
top, id = Path(sys.argv[1]), sys.argv[2]
slot = int(os.environ.get("SLURM_ARRAY_TASK_ID", 0))
batch = json.loads((top / "batches" / (id + ".json")).read_text())
for run, attempt in batch["slots"][slot]["runs"]:
    with (top / "starts.txt").open("a") as file:
        file.write(f"{run} {id} {os.environ['SLURM_CLUSTER_NAME']} {os.environ['SLURM_JOB_ID']}\\n")
    time.sleep(float((top / "sleep.txt").read_text()))
    (top / run).mkdir(exist_ok=True)
    state = "failed" if run in (top / "bad.txt").read_text().split() else "completed"
    result = dict(batch=id, attempt=attempt, state=state, started=0.0, ended=time.time(), objective=1.0)
    (top / run / "result.new").write_text(json.dumps(result))
    (top / run / "result.new").rename(top / run / "result.json")
"""


def spec_of(clusters: dict[str, ClusterSpec], runs_per_job: int = 1, **classes: ResourceSpec) -> SweepSpec:
    made = {"default": ResourceSpec(cpus=1, minutes=5)} | classes
    launch = replace(LaunchSpec(), clusters=clusters, classes=made, rules=[], retries=RetrySpec(), signal_lead=30)
    return SweepSpec(runs_per_job=runs_per_job, launch=launch)


def both(slurm: Slurm, member: bool = False) -> dict[str, ClusterSpec]:
    """The two clusters, by a slurm.conf each or as members of one accounting service."""
    conf = {name: str(slurm.conf("alpha" if member else name)) for name in slurm.clusters}
    return {name: ClusterSpec(conf=conf[name], member=name if member else "") for name in slurm.clusters}


def sweep(path: Path, spec: SweepSpec, count: int, sleep: float = 0.0, resources: str = "default") -> SweepFolder:
    folder = SweepFolder(path)
    package = folder.code / "src" / "trimtab" / "launch"
    package.mkdir(parents=True)
    folder.batches.mkdir()
    for part in (package, package.parent):
        (part / "__init__.py").write_text("")
    (package / "job.py").write_text(JOB)
    (path / "sleep.txt").write_text(str(sleep))
    (path / "bad.txt").write_text("")
    runs = tuple(PlannedRun(f"standard_{i:012x}_s{i}", f"{i:012x}", i, (f"seed={i}",), resources) for i in range(count))
    environment = {"PATH": os.environ["PATH"]}
    folder.write_sweep(Sweep(path.name, runs, count, {}, {}, environment, time.time()))
    return folder


def starts(folder: SweepFolder) -> Counter[str]:
    path = folder.path / "starts.txt"
    return Counter(line.split()[0] for line in path.read_text().splitlines()) if path.exists() else Counter()


def finish(slurm: Slurm, folder: SweepFolder, seconds: float = 60) -> None:
    wait_until(lambda: not slurm.jobs("alpha") and not slurm.jobs("beta"), seconds, "end of all jobs")
    runs = folder.sweep().runs
    wait_until(lambda: all(folder.result(run.dir) is not None for run in runs), 10, "results of all runs")


def quiet(line: str) -> None:
    """Say nothing."""


def names(runs: tuple[PlannedRun, ...]) -> Counter[str]:
    return Counter(run.dir for run in runs)


@pytest.mark.slurm
@pytest.mark.parametrize("member", [False, True])
def test_runs_are_spread_over_both_clusters_and_each_is_made_once(slurm: Slurm, tmp_path: Path, member: bool) -> None:
    spec = spec_of(both(slurm, member))
    folder = sweep(tmp_path / "a b'c$(id)", spec, 40)
    runs = folder.sweep().runs
    batches = submit(folder, spec, runs, quiet)
    assert Counter(batch.cluster for batch in batches for _ in batch.slots) == {"alpha": 20, "beta": 20}
    assert all(batch.job is not None and batch.array for batch in batches)
    assert submit(folder, spec, runs, quiet) == []  # live or done: nothing is sent twice
    finish(slurm, folder)
    assert starts(folder) == names(runs)
    found = statuses(folder, clusters_of(spec))
    assert {status.state for status in found} == {State.completed}
    assert submit(folder, spec, runs, quiet) == []
    assert not list(folder.path.rglob("*.pkl"))


@pytest.mark.slurm
def test_only_what_failed_is_sent_again_with_the_next_attempt(slurm: Slurm, tmp_path: Path) -> None:
    spec = spec_of(both(slurm), runs_per_job=3)
    folder = sweep(tmp_path / "s", spec, 7)
    runs = folder.sweep().runs
    (folder.path / "bad.txt").write_text(f"{runs[0].dir} {runs[5].dir}")
    batches = submit(folder, spec, runs, quiet)
    assert sorted(len(slot.runs) for batch in batches for slot in batch.slots) == [1, 3, 3]
    finish(slurm, folder)
    (folder.path / "bad.txt").write_text("")
    batches = submit(folder, spec, runs, quiet)
    sent = [run for batch in batches for slot in batch.slots for run in slot.runs]
    assert sent == [(runs[0].dir, 2), (runs[5].dir, 2)]
    finish(slurm, folder)
    assert starts(folder) == names(runs) + Counter([runs[0].dir, runs[5].dir])
    states = {status.run.dir: (status.state, status.attempt) for status in statuses(folder, clusters_of(spec))}
    assert states[runs[0].dir] == (State.completed, 2) and states[runs[1].dir] == (State.completed, 1)


SUBMITTER = """
import json, sys
from pathlib import Path
from launch.test_submit import spec_of
from trimtab.launch.files import SweepFolder
from trimtab.launch.submit import submit
from trimtab.spec.launch import ClusterSpec
folder = SweepFolder(Path(sys.argv[1]))
spec = spec_of({name: ClusterSpec(**one) for name, one in json.loads(sys.argv[2]).items()})
runs = folder.sweep().runs
print("go", flush=True)
for i in range(0, len(runs), 2):  # many small submissions: many moments at which it can be killed
    submit(folder, spec, runs[i : i + 2], print)
print("done", flush=True)
"""


@pytest.mark.slurm
@pytest.mark.parametrize("seed", range(3))
def test_killing_the_submitter_at_any_moment_loses_and_doubles_nothing(slurm: Slurm, tmp_path: Path, seed: int) -> None:
    clusters = both(slurm, member=seed == 0)
    folder = sweep(tmp_path / "s", spec_of(clusters), 12)
    plain = json.dumps({name: asdict(one) for name, one in clusters.items()})
    command = [sys.executable, "-c", SUBMITTER, str(folder.path), plain]
    environment = os.environ | {"PYTHONPATH": f"{HERE.parent / 'src'}{os.pathsep}{HERE}"}
    rng, kills = random.Random(seed), 0
    while True:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "go\n"
        timer = threading.Timer(rng.uniform(0.0, 1.5), process.kill)
        if kills < 4:
            timer.start()
        out = process.communicate()[0]
        timer.cancel()
        if process.returncode == 0:
            assert out.endswith("done\n")
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
    assert kills >= 1
    finish(slurm, folder)
    assert starts(folder) == names(folder.sweep().runs), f"after {kills} kills"
    assert all(batch.job is not None or batch.refused for batch in folder.all_batches())


@pytest.mark.slurm
def test_an_sbatch_that_outlives_its_submitter_is_waited_for(slurm: Slurm, tmp_path: Path) -> None:
    """kill -9 while sbatch is under way: the job comes into being afterwards."""
    clusters = {"beta": both(slurm)["beta"]}
    folder = sweep(tmp_path / "s", spec_of(clusters), 2)
    slow = tmp_path / "bin" / "sbatch"
    slow.parent.mkdir()
    slow.write_text(
        f'#!/bin/sh\n[ "$1" = --test-only ] || {{ touch {tmp_path}/sending; sleep 2; }}\nexec {REAL} "$@"\n'
    )
    slow.chmod(0o755)
    command = [sys.executable, "-c", SUBMITTER, str(folder.path), json.dumps({"beta": asdict(clusters["beta"])})]
    environment = os.environ | {"PYTHONPATH": f"{HERE.parent / 'src'}{os.pathsep}{HERE}"}
    environment["PATH"] = f"{slow.parent}:{environment['PATH']}"
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    wait_until((tmp_path / "sending").exists, 30, "sbatch")
    process.kill()
    process.wait()
    assert not slurm.jobs("beta")
    said: list[str] = []
    assert submit(folder, spec_of(clusters), folder.sweep().runs, said.append) == []
    assert "was sent by a process that ended" in said[0]
    finish(slurm, folder)
    assert starts(folder) == names(folder.sweep().runs)


@pytest.mark.slurm
def test_a_batch_whose_submitter_died_is_found_by_its_name(slurm: Slurm, tmp_path: Path) -> None:
    """Sent but without a number: while it runs, after it has ended, and when it never arrived."""
    spec = spec_of(both(slurm))
    folder = sweep(tmp_path / "s", spec, 2, sleep=5)
    runs = folder.sweep().runs
    (batch,) = submit(folder, spec, runs[:1], quiet)
    for expected in ("running", "ended"):
        folder.write_batch(replace(batch, job=None))
        said: list[str] = []
        assert submit(folder, spec, runs[:1], said.append) == []
        assert folder.batch(batch.id).job == batch.job and f"it is job {batch.job}" in said[0]
        if expected == "running":
            finish_one = folder.run(runs[0].dir) / "result.json"
            wait_until(finish_one.exists, 60, "result")
    lost = folder.new_batch("beta", "default", [Slot(((runs[1].dir, 1),))])
    (again,) = submit(folder, spec, runs, quiet)
    assert folder.batch(lost.id).refused.startswith("never arrived")
    assert again.slots == (Slot(((runs[1].dir, 1),)),)


@pytest.mark.slurm
def test_a_batch_on_a_silent_cluster_stays_open(slurm: Slurm, tmp_path: Path) -> None:
    spec = spec_of(both(slurm))
    folder = sweep(tmp_path / "s", spec, 3)
    runs = folder.sweep().runs
    slurm.stop("beta")
    open_ = folder.new_batch("beta", "default", [Slot(((runs[0].dir, 1),))])
    said: list[str] = []
    batches = submit(folder, spec, runs, said.append)
    assert [batch.cluster for batch in batches] == ["alpha"]
    assert {run for batch in batches for slot in batch.slots for run, _ in slot.runs} == {run.dir for run in runs[1:]}
    assert folder.batch(open_.id) == open_
    assert any("stays open" in line for line in said) and any("go on without it" in line for line in said)
    slurm.start("beta")
    slurm.ready("beta")
    (late,) = submit(folder, spec, runs, quiet)
    assert folder.batch(open_.id).refused and late.slots[0].runs == ((runs[0].dir, 1),)


@pytest.mark.slurm
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_unreachable_cluster_is_said_and_the_other_takes_everything(
    slurm: Slurm, tmp_path: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.launch.submit.PATIENCE", 5.0)
    spec = spec_of(both(slurm))
    folder = sweep(tmp_path / "s", spec, 6)
    said: list[str] = []
    began = time.monotonic()
    if how is signal.SIGSTOP:
        os.kill(slurm.pid("beta"), how)
    else:
        slurm.stop("beta", how)
    try:
        batches = submit(folder, spec, folder.sweep().runs, said.append)
    finally:
        if how is signal.SIGSTOP:
            os.kill(slurm.pid("beta"), signal.SIGCONT)
    assert time.monotonic() - began < 40
    assert [(batch.cluster, len(batch.slots)) for batch in batches] == [("alpha", 6)]
    assert any("beta" in line and "the other clusters go on without it" in line for line in said)


@pytest.mark.slurm
def test_a_refusal_is_recorded_and_the_runs_go_to_the_next_cluster(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """beta's limit is met while it is submitted to; alpha takes the rest."""
    slurm.client("alpha", "sacctmgr", "-i", "modify", "user", "root", "where", "cluster=beta", "set", "maxsubmitjobs=4")
    try:
        spec = spec_of(both(slurm))
        folder = sweep(tmp_path / "s", spec, 16, sleep=3)
        wait_until(lambda: Cluster("b", spec.launch.clusters["beta"]).capacity().max_submit == 4, 20, "limit")
        only = sweep(tmp_path / "only", replace(spec), 8, sleep=3)
        one = spec_of({"beta": both(slurm)["beta"]})
        said: list[str] = []
        batches = submit(only, one, only.sweep().runs, said.append)
        assert sum(len(batch.slots) for batch in batches) == 4
        assert said[-1].startswith("4 runs of class default are not submitted")
        batches = submit(folder, spec, folder.sweep().runs, said.append)
        assert Counter(batch.cluster for batch in batches for _ in batch.slots) == {"alpha": 16}
        monkeypatch.setattr(Cluster, "_max_submit", lambda self, name: None)  # as on a site that doesn't tell
        slurm.client("beta", "scancel", "--user=root")
        wait_until(lambda: not slurm.jobs("beta"), 30, "end of the jobs")
        blind = sweep(tmp_path / "blind", one, 8, sleep=3)
        batches = submit(blind, one, blind.sweep().runs, said.append)
        assert [len(batch.slots) for batch in batches] == [4]  # eight were refused, then half of them taken
        assert [len(batch.slots) for batch in blind.all_batches() if "limit" in batch.refused] == [8, 4, 2, 1]
    finally:
        slurm.client(
            "alpha", "sacctmgr", "-i", "modify", "user", "root", "where", "cluster=beta", "set", "maxsubmitjobs=-1"
        )


@pytest.mark.slurm
def test_a_cluster_that_refuses_a_class_gets_none_of_it(slurm: Slurm, tmp_path: Path) -> None:
    clusters = both(slurm)
    clusters["beta"] = replace(clusters["beta"], qos="nosuch")
    spec = spec_of(clusters)
    folder = sweep(tmp_path / "s", spec, 4)
    said: list[str] = []
    assert preflight(folder, spec, folder.sweep().runs, said.append) == []
    assert any("beta" in line and "the other clusters take it" in line for line in said)
    batches = submit(folder, spec, folder.sweep().runs, said.append)
    assert [(batch.cluster, len(batch.slots)) for batch in batches] == [("alpha", 4)]


@pytest.mark.slurm
def test_the_preflight_lists_every_class_that_no_cluster_takes(slurm: Slurm, tmp_path: Path) -> None:
    odd = {"huge": ResourceSpec(memory_gib=900), "short": ResourceSpec(minutes=1)}
    spec = spec_of(both(slurm), **odd)
    spec = replace(spec, launch=replace(spec.launch, signal_lead=60))
    folder = sweep(tmp_path / "s", spec, 4)
    asked = ["default", "huge", "short", "none"]
    runs = [replace(run, resources=asked[i]) for i, run in enumerate(folder.sweep().runs)]
    faults = preflight(folder, spec, runs, quiet)
    assert len(faults) == 4 and not slurm.jobs("alpha")
    assert [line for line in faults if line.startswith("class huge: ")] == faults[:2]
    assert "launch.signal_lead=60 s is no shorter than launch.classes.short.minutes=1" in faults[2]
    assert faults[3].startswith("launch.classes has no none, which 1 runs ask for")


@pytest.mark.slurm
def test_caps_weights_and_classes(slurm: Slurm, tmp_path: Path) -> None:
    clusters = both(slurm)
    clusters["alpha"] = replace(clusters["alpha"], max_jobs=3)
    clusters["beta"] = replace(clusters["beta"], max_jobs=2, weight=0.0)
    spec = spec_of(clusters, a_gpu=ResourceSpec(cpus=1, gpus=1, minutes=7))
    folder = sweep(tmp_path / "s", spec, 8, sleep=600)
    runs = [replace(run, resources="a_gpu" if i < 2 else "default") for i, run in enumerate(folder.sweep().runs)]
    folder.write_sweep(replace(folder.sweep(), runs=tuple(runs)))
    said: list[str] = []
    batches = submit(folder, spec, runs, said.append)
    assert Counter(batch.cluster for batch in batches for _ in batch.slots) == {"alpha": 3, "beta": 2}
    assert said[-1] == (
        "3 runs of class default are not submitted (3 of 6 jobs): no cluster takes more now (alpha has 3 of "
        "max_jobs=3, beta has 2 of max_jobs=2); trimtab sweep resume sends what there is room "
        "for then, with --wait all of them"
    )
    assert submit(folder, spec, runs, quiet) == []
    gpu = next(batch for batch in batches if batch.resources == "a_gpu")
    shown = slurm.client(gpu.cluster, "scontrol", "show", "job", str(gpu.job))
    assert "gres:gpu:1" in shown and "TimeLimit=00:07:00" in shown


@pytest.mark.slurm
def test_arrays_are_no_larger_than_the_cluster_allows(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Cluster.capacity
    monkeypatch.setattr(Cluster, "capacity", lambda self: replace(real(self), max_array=4))
    spec = spec_of({"alpha": both(slurm)["alpha"]})
    folder = sweep(tmp_path / "s", spec, 10)
    batches = submit(folder, spec, folder.sweep().runs, quiet)
    assert [len(batch.slots) for batch in batches] == [4, 3, 3]
    finish(slurm, folder)
    assert starts(folder) == names(folder.sweep().runs)


@pytest.mark.slurm
def test_a_dry_run_keeps_the_scripts_and_sends_nothing(slurm: Slurm, tmp_path: Path) -> None:
    spec = spec_of(both(slurm))
    folder = sweep(tmp_path / "s", spec, 5)
    paths = scripts(folder, spec, folder.sweep().runs, quiet)
    assert {path.name for path in paths} == {"alpha_default_0.sbatch", "beta_default_0.sbatch"}
    assert sorted(line for path in paths for line in path.read_text().splitlines() if "--array" in line) == [
        "#SBATCH --array=0-1%2", "#SBATCH --array=0-2%3"
    ]  # fmt: skip
    assert not slurm.jobs("alpha") and not slurm.jobs("beta") and folder.all_batches() == []


def test_two_submitters_take_turns(tmp_path: Path) -> None:
    """The lock outlives its process for as long as an sbatch of it runs."""
    folder = SweepFolder(tmp_path)
    cluster = Cluster("a", ClusterSpec())
    with submitting(folder, {"a": cluster}):
        orphan = subprocess.Popen(["sleep", "1.0"], pass_fds=cluster.keep)
        with pytest.raises(TrimtabError, match="another process is submitting"), submitting(folder, {}, patience=0.2):
            pass
    assert cluster.keep == ()
    began = time.monotonic()
    with submitting(folder, {}):
        assert time.monotonic() - began > 0.5
    orphan.wait()


def test_batches_of_unknown_clusters_are_left_alone(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    batch = folder.new_batch("gone", "default", [Slot((("r", 1),))])
    recover(folder, {}, quiet)
    assert folder.all_batches() == [batch]
