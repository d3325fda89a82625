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
NEVER = ("", "None", "Unknown", "N/A", "(null)")


def job_id() -> str | None:
    """Number of this very job, an array's element included; None outside SLURM."""
    return os.environ.get("SLURM_JOB_ID")


def restarts() -> int:
    """How often this job was requeued."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


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
