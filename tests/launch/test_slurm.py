"""submitit's classes with a cluster: scripts, ids, states and cancels."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from launch.conftest import Slurm, wait_until

from trimtab.launch.clusters import Cluster, ClusterError
from trimtab.launch.model import Batch, Slot
from trimtab.launch.slurm import ClusterExecutor, ClusterJob, Sheet, job_class
from trimtab.spec.launch import ClusterSpec, ResourceSpec

ODD = "a b'c$(touch PWNED)\"é;x"


def executor(
    path: Path, cluster: Cluster, slots: int = 1, asked: ResourceSpec | None = None, lead: int = 30, **environment: str
) -> ClusterExecutor:
    made = tuple(Slot(((f"run{i}", 1),)) for i in range(slots))
    batch = Batch("0001-abcdef01", cluster.name, "default", made, 0.0)
    (path / "batches").mkdir(parents=True, exist_ok=True)
    sheet = Sheet(path, batch, asked or ResourceSpec(cpus=1, minutes=5), lead, environment)
    return ClusterExecutor(cluster, sheet)


def flags(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {line.partition("=")[0]: "".join(shlex.split(line.partition("=")[2])) for line in lines}


def job_module(path: Path, body: str) -> None:
    """A stand-in for the job's module, in the place that the sweep's code has."""
    package = path / "code" / "src" / "trimtab" / "launch"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "job.py").write_text(body)


def test_a_script_says_all_that_is_asked_of_the_cluster(tmp_path: Path) -> None:
    spec = ClusterSpec(partition="main", account="lab", qos="high", constraint="a100", setup=["module load cuda"])
    asked = ResourceSpec(minutes=90, memory_gib=1.5, cpus=3, gpus=2, nodes=2, tasks_per_node=4)
    text = executor(tmp_path, Cluster("a", spec), 3, asked, 60).script()
    assert flags(text) == {
        "array": "0-2%3", "chdir": str(tmp_path), "comment": "trimtab-0001-abcdef01", "cpus-per-task": "3",
        "export": "ALL", "gpus-per-node": "2", "job-name": "trimtab-0001-abcdef01", "mem": "1536M", "nodes": "2",
        "ntasks-per-node": "4", "open-mode": "append", "output": "batches/0001-abcdef01_%a.log", "requeue": "",
        "signal": "USR2@60", "time": "90", "partition": "main", "account": "lab", "qos": "high", "constraint": "a100",
    }  # fmt: skip
    assert "\nmodule load cuda\n" in text
    assert "\nexec srun --export=ALL --unbuffered --cpus-per-task=3 --kill-on-bad-exit=0 $block /bin/sh -c " in text
    single = executor(tmp_path, Cluster("a", ClusterSpec())).script()
    assert flags(single)["signal"] == "B:USR2@30" and flags(single)["output"] == "batches/0001-abcdef01_0.log"
    assert "array" not in flags(single) and "srun" not in single and "partition" not in flags(single)


def test_a_script_names_the_folder_and_interpreter_of_its_cluster(tmp_path: Path) -> None:
    spec = ClusterSpec(folder="/far/sweep 1", python="/far/py thon", via=["ssh", "far"])
    text = executor(tmp_path, Cluster("a", spec), PATH="/here", HF_HOME="/a b;$(id)", OMP_NUM_THREADS="1,2").script()
    assert flags(text)["chdir"] == "/far/sweep 1" and flags(text)["export"] == "NONE"
    assert str(tmp_path) not in text and "/here" not in text  # the PATH of this machine is no path there
    tail = [shlex.split(line) for line in text.splitlines() if line.startswith("ex")]
    assert tail == [
        ["export", "HF_HOME=/a b;$(id)"],
        ["export", "OMP_NUM_THREADS=1,2"],
        ["export", "SUBMITIT_EXECUTOR=slurm"],
        ["export", "PYTHONPATH=/far/sweep 1/code/src"],
        ["exec", "/far/py thon", "-u", "-P", "-m", "trimtab.launch.job", "/far/sweep 1", "0001-abcdef01"],
    ]


@pytest.mark.parametrize("spec", [ClusterSpec(partition="main\ntouch PWNED"), ClusterSpec(folder="/a\nb")])
def test_what_would_become_a_line_of_its_own_is_refused(tmp_path: Path, spec: ClusterSpec) -> None:
    with pytest.raises(ClusterError, match="cannot stand in a script"):
        executor(tmp_path, Cluster("a", spec))


def bash(path: Path, text: str, last: str, **environment: str) -> str:
    """What a script prints when its job is this line."""
    script = path / "script"
    script.write_text("".join(f"{line}\n" for line in text.splitlines() if not line.startswith("exec")) + last)
    return subprocess.run(
        ["bash", script], capture_output=True, text=True, cwd=path, env=os.environ | environment, timeout=30
    ).stdout


def test_the_exports_of_a_script_mean_to_a_shell_what_they_say(tmp_path: Path) -> None:
    value = "x'y\"z$(touch PWNED)`id`\nnext; é"
    text = executor(tmp_path, Cluster("a", ClusterSpec(via=["x"])), ODD=value).script()
    assert bash(tmp_path, text, 'printf %s "$ODD"') == value and not (tmp_path / "PWNED").exists()


WAITING = 'exec python3 -c "import signal; print(sorted(signal.sigpending()))"'


def test_a_signal_during_the_set_up_waits_for_the_job(tmp_path: Path) -> None:
    spec = ClusterSpec(setup=["kill -TERM $$", "kill -USR2 $$", "sh -c 'kill -TERM $$; echo here still'"])
    said = bash(tmp_path, executor(tmp_path, Cluster("a", spec)).script(), WAITING)
    assert said == "here still\n[<Signals.SIGUSR2: 12>, <Signals.SIGTERM: 15>]\n"


def test_where_env_blocks_no_signals_the_job_starts_all_the_same_and_says_so(tmp_path: Path) -> None:
    old = tmp_path / "bin" / "env"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\nexit 125\n")
    old.chmod(0o755)
    text = executor(tmp_path, Cluster("a", ClusterSpec())).script()
    said = bash(tmp_path, text, WAITING, PATH=f"{old.parent}:{os.environ['PATH']}").splitlines()
    assert said[0].startswith("note: env cannot block signals here") and said[1:] == ["[]"]


def test_jobs_of_two_clusters_share_no_watcher() -> None:
    one, two = Cluster("a", ClusterSpec()), Cluster("b", ClusterSpec())
    assert job_class(one).watcher is not job_class(two).watcher
    assert job_class(one).cluster is one and issubclass(job_class(one), ClusterJob)


UNBLOCK = "signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())\n"  # as the job does (``Asked``)


# -- a real one ------------------------------------------------------------------------------------------------------


@pytest.mark.slurm
@pytest.mark.parametrize("via", [False, True])
@pytest.mark.parametrize("tasks", [1, 2])
def test_a_job_gets_its_words_and_nothing_but_the_allowed_variables(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, via: bool, tasks: int
) -> None:
    path = tmp_path / ODD
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "7")
    body = "import json, os, sys\nenvironment = dict(os.environ) | {'x': 'x' * 9000}\n"
    job_module(path, body + "print(json.dumps([sys.argv[1:], environment, os.getcwd()]))")
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    shell.chmod(0o755)
    spec = ClusterSpec(conf=str(slurm.conf("beta")), via=[str(shell), "host"] if via else [])
    allowed = {"PATH": os.environ["PATH"], "HF_HOME": "a,b=c;$(touch PWNED) 'é'\nnext"}
    made = executor(path, Cluster("beta", spec), 1, ResourceSpec(cpus=1, minutes=5, tasks_per_node=tasks), **allowed)
    number = made.send()
    wait_until(lambda: not slurm.jobs("beta"), 30, "end of the job")
    import json

    logs = [path / "batches" / f"0001-abcdef01_0{f'.task{rank}' if rank else ''}.log" for rank in range(tasks)]
    assert sorted(path.glob("batches/*.log")) == sorted(logs)
    for rank, log in enumerate(logs):  # lines of more than SLURM's 2048 characters: only a file of its own keeps them
        words, environment, cwd = json.loads(log.read_text())
        assert environment["SLURM_PROCID"] == str(rank)
        assert words == [str(path), "0001-abcdef01"] and cwd == str(path)
        assert environment["HF_HOME"] == allowed["HF_HOME"] and environment["SLURM_JOB_ID"] == number
        assert environment["PYTHONPATH"] == f"{path}/code/src"
        assert "WANDB_API_KEY" not in environment and environment.get("SLURM_MEM_PER_CPU") != "7"
    assert not list(tmp_path.rglob("PWNED")) and not list(path.rglob("*.pkl"))


@pytest.mark.slurm
def test_cancel_and_signals_end_the_job_of_their_own_cluster(slurm: Slurm, tmp_path: Path) -> None:
    """Both clusters use the same numbers; submitit's own cancel ended the innocent one."""
    body = "import signal, time\nfor s in ('USR2', 'TERM'):\n signal.signal(getattr(signal, 'SIG' + s), "
    body += f"lambda n, f: print(n, flush=True))\n{UNBLOCK}print('ready', flush=True)\n"
    body += "for _ in range(600): time.sleep(0.1)\n"
    made = {}
    for name in slurm.clusters:
        job_module(tmp_path / name, body)
        spec = ClusterSpec(conf=str(slurm.conf("alpha")), member=name)
        made[name] = executor(tmp_path / name, Cluster(name, spec), 2)
    low, high = sorted(slurm.clusters, key=lambda name: _next(slurm, name))
    while _next(slurm, low) < _next(slurm, high):
        slurm.client(low, "sbatch", "--output=/dev/null", "--wrap=true")
    jobs = {name: made[name].job_class(tmp_path, f"{made[name].send()}_1") for name in slurm.clusters}
    assert jobs["alpha"].job_id == jobs["beta"].job_id
    logs = {name: tmp_path / name / "batches" / "0001-abcdef01_1.log" for name in slurm.clusters}
    wait_until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs.values()), 30, "start")
    assert not jobs["beta"].done(force_check=True) and jobs["beta"].state == "RUNNING"
    jobs["beta"]._interrupt(timeout=True)
    wait_until(lambda: "12" in logs["beta"].read_text(), 10, "USR2")
    jobs["beta"].cancel()
    wait_until(lambda: jobs["beta"].done(force_check=True), 30, "end of the cancelled job")
    assert jobs["beta"].state.startswith("CANCELLED") and "15" in logs["beta"].read_text()
    assert not jobs["alpha"].done(force_check=True) and logs["alpha"].read_text().split() == ["ready"]
    slurm.client("alpha", "scontrol", "suspend", jobs["alpha"].job_id)
    assert not jobs["alpha"].done(force_check=True) and jobs["alpha"].state == "SUSPENDED"
    slurm.client("alpha", "scontrol", "resume", jobs["alpha"].job_id)
    assert not jobs["alpha"].done(force_check=True)


def _next(slurm: Slurm, cluster: str) -> int:
    return int(slurm.client(cluster, "sbatch", "--parsable", "--output=/dev/null", "--wrap=true")) + 1


@pytest.mark.slurm
@pytest.mark.parametrize("tasks", [1, 2])
def test_the_warning_before_the_limit_a_requeue_and_a_preemption_reach_the_job(
    slurm: Slurm, tmp_path: Path, tasks: int
) -> None:
    body = "import os, signal, time\nfor s in ('USR2', 'TERM'):\n signal.signal(getattr(signal, 'SIG' + s), "
    body += "lambda n, f: (os.write(1, b'got %d\\n' % n), os._exit(75)))\n" + UNBLOCK
    body += "os.write(1, f'ready {os.environ.get(\"SLURM_RESTART_COUNT\", 0)}\\n'.encode())\n"
    body += "for _ in range(900): time.sleep(0.1)\n"
    job_module(tmp_path, body)
    cluster = Cluster("alpha", ClusterSpec(conf=str(slurm.conf("alpha"))))

    def said() -> str:
        return "".join(path.read_text() for path in sorted((tmp_path / "batches").glob("*.log")))

    asked = ResourceSpec(cpus=1, minutes=1, tasks_per_node=tasks)
    number = executor(tmp_path, cluster, 1, asked, 58).send()
    wait_until(lambda: said().count("ready") == tasks, 30, "start")
    wait_until(lambda: said().count("got 12") == tasks, 75, "warning before the limit")
    wait_until(lambda: number not in slurm.jobs("alpha"), 20, "end")
    for path in (tmp_path / "batches").glob("*.log"):
        path.unlink()
    number = executor(tmp_path, cluster, 1, asked, 5).send()
    wait_until(lambda: said().count("ready 0") == tasks, 30, "second start")
    cluster.requeue(number)
    wait_until(lambda: said().count("got 15") == tasks, 20, "TERM of the requeue")
    wait_until(lambda: said().count("ready 1") == tasks, 60, "restart")
    every = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--time=1")
    slurm.client("alpha", "sbatch", *every, "--wrap=true")
    wait_until(lambda: said().count("got 1") == 2 * tasks, 30, "preemption")
    assert said().count("ready 1") == tasks  # it ended in its grace time: SLURM does not requeue it by itself
