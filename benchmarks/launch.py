"""What a hundred trivial runs take from the command to the last job's end: ``python benchmarks/launch.py``, as root.

One line of JSON: seconds of ``launcher=slurm`` (detached), of the same with ten runs a job, of hydra-submitit-launcher,
and of a plain array of ``python -c pass``, one after the other on one real SLURM (tests/launch/slurm/start.sh) of 16
one-core slots. Beside it needs what the project does not: ``pip install hydra-submitit-launcher==1.2.0``; with
``--target FOLDER`` it stays apart, and FOLDER goes into PYTHONPATH. ``--alone``: without it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "launch" / "slurm"
PACKED, PATIENCE = 10, 600.0
PROGRAM = """
def run(spec, overrides):
    return float(spec.seed)
"""
APP = """
import hydra
@hydra.main(version_base="1.3", config_path=None)
def main(config):
    return float(config.seed)
main()
"""


def ended(environment: Mapping[str, str]) -> bool:
    """Whether no job is queued or running."""
    done = subprocess.run(["squeue", "-h"], env=environment, capture_output=True, text=True, timeout=60, check=True)
    return not done.stdout.strip()


def timed(
    command: list[str], folder: Path, environment: Mapping[str, str], finished: Callable[[], int], runs: int
) -> dict[str, Any]:
    """Seconds until the command returned, and until all of its runs and jobs had ended."""
    begin = time.perf_counter()
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
        returned = None
        while returned is None or finished() < runs or not ended(environment):
            time.sleep(0.1)
            seconds = time.perf_counter() - begin
            if process.poll() is not None and returned is None:
                returned = seconds
            if seconds > PATIENCE or process.returncode:
                process.kill()
                raise SystemExit(f"{' '.join(command)}: {finished()} of {runs}\n{(folder / 'out.txt').read_text()}")
    return {"command": round(returned, 1), "ended": round(time.perf_counter() - begin, 1)}


def ours(folder: Path, environment: Mapping[str, str], runs: int, per_job: int) -> dict[str, Any]:
    """``launcher=slurm``, which returns once all is submitted."""
    folder.mkdir()
    (folder / "trivial.py").write_text(PROGRAM)
    command = [
        sys.executable, "-m", "run", "-m", "launcher=slurm", "launch.program=trivial:run", f"seed=range({runs})",
        f"runs_per_job={per_job}", "launch.classes.default.cpus=1", "launch.classes.default.minutes=30",
        "hydra.sweep.dir=sweep",
    ]  # fmt: skip
    return timed(command, folder, environment, lambda: len(list(folder.glob("sweep/*/result.json"))), runs)


def usual(folder: Path, environment: Mapping[str, str], runs: int) -> dict[str, Any]:
    """hydra-submitit-launcher, which returns once all results are there."""
    folder.mkdir()
    (folder / "app.py").write_text(APP)
    command = [
        sys.executable, "app.py", "-m", "hydra/launcher=submitit_slurm", f"+seed=range({runs})",
        "hydra.launcher.cpus_per_task=1", "hydra.launcher.timeout_min=30", "hydra.sweep.dir=sweep",
    ]  # fmt: skip
    results = "sweep/.submitit/*/*_result.pkl"
    return timed(command, folder, environment, lambda: len(list(folder.glob(results))), runs)


def plain(folder: Path, environment: Mapping[str, str], runs: int) -> float:
    """What SLURM itself takes, and the start of an interpreter."""
    folder.mkdir()
    (folder / "job.sh").write_text(
        f'#!/bin/sh\n"{sys.executable}" -c pass\ntouch "{folder}/$SLURM_ARRAY_TASK_ID.end"\n'
    )
    command = ["sbatch", f"--array=0-{runs - 1}", "--cpus-per-task=1", "--output=/dev/null", "job.sh"]
    found: float = timed(command, folder, environment, lambda: len(list(folder.glob("*.end"))), runs)["ended"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--alone", action="store_true", help="only ours")
    options = parser.parse_args()
    if not options.alone and find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise SystemExit("pip install hydra-submitit-launcher==1.2.0, with which ours is compared, or give --alone")
    if os.getuid() != 0 or shutil.which("slurmctld") is None:
        raise SystemExit(
            "a SLURM is started: that needs root, and the packages slurm-wlm slurmdbd munge mariadb-server"
        )
    top = Path(tempfile.mkdtemp(prefix="slurm-"))
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    conf = top / "state" / "alpha" / "slurm.conf"
    environment = os.environ | {"PYTHONPATH": path, "SLURM_CONF": str(conf)}
    try:
        subprocess.run(
            [SCRIPTS / "start.sh", top / "state"], check=True, timeout=120,
            env=os.environ | {"OWNER": str(os.getpid()), "CLUSTERS": "alpha"},
        )  # fmt: skip
        found = {
            "plain": plain(top / "plain", environment, options.runs),
            "ours": ours(top / "ours", environment, options.runs, 1),
            "packed": ours(top / "packed", environment, options.runs, PACKED),
            "usual": None if options.alone else usual(top / "usual", environment, options.runs),
        }
    finally:
        subprocess.run([SCRIPTS / "stop.sh", top / "state"], check=True, timeout=120)
        shutil.rmtree(top)
    times = {
        f"{name}_times_faster": round(found["usual"]["ended"] / found[name]["ended"], 2)
        for name in ("ours", "packed") if found["usual"]
    }  # fmt: skip
    print(json.dumps({"runs": options.runs, "packed_runs_per_job": PACKED, "seconds": found, **times}))


if __name__ == "__main__":
    main()
