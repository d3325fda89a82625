"""What SLURM says of the job that asks, on its node: why it is to stop, and its own requeue."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime

from trimtab.launch.model import State

EARLY = 65  # seconds: SLURM looks at its clock once a minute, so --signal may come that much before its lead
POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
NEVER = ("", "None", "Unknown", "N/A", "(null)")


def job_id() -> str | None:
    """Number of this very job, an array's element included; None outside SLURM."""
    return os.environ.get("SLURM_JOB_ID")


def restarts() -> int:
    """How often this job was requeued."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


def cores(environment: Mapping[str, str]) -> int:
    """How many this task may use: what SLURM gave it (and need not enforce), and what the kernel allows."""
    return min(int(environment.get("SLURM_CPUS_PER_TASK", 1 << 16)), len(os.sched_getaffinity(0)))


def threads(environment: Mapping[str, str], cores: int, sharing: int) -> dict[str, str]:
    """Variables that keep each of ``sharing`` runs to its share of the cores, PURE; none where the user chose."""
    if POOLS[0] in environment:
        return {}
    return {name: str(max(cores // sharing, 1)) for name in POOLS if name not in environment}


def _scontrol(*arguments: str) -> tuple[int, str]:
    try:
        done = subprocess.run(("scontrol", *arguments), capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr.strip()


def look() -> Mapping[str, str]:
    """Fields of ``scontrol show job``; empty when it doesn't answer."""
    code, text = _scontrol("show", "job", "--oneliner", str(job_id()))
    return dict(re.findall(r"(\w+)=(\S*)", text)) if code == 0 else {}


def cause(lead: int) -> State:
    """Why this job was asked to stop: cancelled, preempted or timed_out. ``lead``: seconds of ``--signal``."""
    return cause_of(look(), os.environ.get("SLURM_JOB_END_TIME", ""), lead, time.time())


def cause_of(job: Mapping[str, str], end: str, lead: int, now: float) -> State:
    """The same, PURE. ``job``: fields of scontrol, ``end``: SLURM_JOB_END_TIME where SLURM sets it.

    ``cancelled`` stands for every end that SLURM is already carrying out: it shows COMPLETING alike for a cancel, after
    which a requeue would raise the job from the dead, and for a requeue, which needs no second one.
    """
    state = job.get("JobState", "")
    if state.startswith("CANCELLED"):
        return State.cancelled
    if state.startswith(("TIMEOUT", "DEADLINE")):
        return State.timed_out
    if state.startswith("PREEMPTED") or job.get("PreemptTime", "") not in NEVER:
        return State.preempted
    if state and not state.startswith("RUNNING"):
        return State.cancelled
    written = job.get("EndTime", "")
    ends = float(end) if end else datetime.fromisoformat(written).timestamp() if written not in NEVER else 0.0
    return State.timed_out if ends and ends - now <= lead + EARLY else State.preempted


def requeue() -> str:
    """Put this job back into its queue; why not, else empty. Harmless when SLURM does so at the same time."""
    code, text = _scontrol("requeue", str(job_id()))
    return "" if code == 0 else text
