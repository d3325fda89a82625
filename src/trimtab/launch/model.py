"""What a sweep is made of. Data only; ``files.py`` reads and writes it.

A **run** is one distinct effective configuration, with one folder for ever. A **batch** is one submission to one
cluster: a SLURM job, or an array of them when it has several slots. A **slot** is one job: the runs that it carries
out. An **attempt** is one batch that contains the run: the highest number is the one that counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class PlannedRun:
    """One distinct run. ``dir``: its folder's name below the sweep's; ``resources``: name in launch.classes."""

    dir: str
    config_hash: str
    seed: int
    overrides: tuple[str, ...]
    resources: str = "default"


@dataclass(frozen=True)
class Sweep:
    """``sweep.json``: written before anything is submitted and never changed afterwards.

    ``combinations``: how many were asked for, before equal ones were dropped; ``launch``: the plain dict of SweepSpec;
    ``code``: commit, whether it was dirty, and the copied tree's digest; ``environment``: names and values passed on;
    ``digests``: of the frozen configs, by run.
    """

    sweep: str
    runs: tuple[PlannedRun, ...]
    combinations: int
    launch: Mapping[str, Any]
    code: Mapping[str, Any]
    environment: Mapping[str, str]
    created: float
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Slot:
    """One job of a batch: (run's dir, its attempt), in order."""

    runs: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Batch:
    """``batches/<id>.json``: written before it is submitted (``job`` None), again when the cluster gave it a number.

    ``id``: ``<serial>-<random hex>``, the job's comment too, by which a batch whose submitter died is found again;
    ``cluster``: name in launch.clusters, or ``local``; ``job``: SLURM's number of the job or array, or the pid; an
    array's slot i is ``<job>_<i>`` when ``array``; ``refused``: the cluster's words, when it took none of it.
    """

    id: str
    cluster: str
    resources: str
    slots: tuple[Slot, ...]
    created: float
    job: str | None = None
    array: bool = False
    refused: str = ""
    script: str = ""  # path of the sbatch script, below the sweep's folder


class State(Enum):
    """What became of a run; ``done`` below says which are final."""

    completed = "completed"
    running = "running"
    pending = "pending"  # in a queue, held, requeued
    suspended = "suspended"
    failed = "failed"
    preempted = "preempted"
    timed_out = "timed_out"
    out_of_memory = "out_of_memory"
    node_failed = "node_failed"
    cancelled = "cancelled"
    lost = "lost"  # its cluster's books do not know it, and it left no result
    unknown = "unknown"  # its cluster cannot be reached: never taken for finished
    unsubmitted = "unsubmitted"

    @property
    def live(self) -> bool:
        """Whether a job for it may still be running or start: nothing may be submitted for it."""
        return self in (State.running, State.pending, State.suspended, State.unknown)


@dataclass(frozen=True)
class Result:
    """``<run>/result.json``: how an attempt ended, written once at its end by rank 0 of the job that carried it out."""

    batch: str
    attempt: int
    state: State  # completed | failed | preempted
    started: float
    ended: float
    objective: float | None = None
    error: str = ""


@dataclass(frozen=True)
class RunStatus:
    """One line of ``trimtab sweep status``. ``reason``: why it waits, or the first line of its error."""

    run: PlannedRun
    state: State
    attempt: int = 0
    cluster: str = ""
    job: str = ""  # as SLURM writes it: 12 or 12_3
    reason: str = ""
    step: int | None = None
    steps: int | None = None
    reward: float | None = None
    objective: float | None = None
    log: str = ""
    causes: Mapping[str, int] = field(default_factory=dict)  # how many attempts ended for which cause
