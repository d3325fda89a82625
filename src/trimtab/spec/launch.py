"""How the runs of a sweep are started: every option that belongs to the sweep and not to a run. None enters a hash."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Dict, List, Optional

from trimtab.spec.option import opt


class Backend(Enum):
    """Where the runs go."""

    local = "local"
    slurm = "slurm"


class Packing(Enum):
    """How the runs of one job take turns."""

    in_turn = "in_turn"
    side_by_side = "side_by_side"


@dataclass(frozen=True)
class ResourceSpec:
    """What one run asks of a cluster; the runs of one job share it."""

    minutes: int = opt(60, "time limit of a job in minutes")
    memory_gib: Optional[float] = opt(None, "memory per node in GiB; empty: the cluster's default")
    cpus: int = opt(2, "cores per task")
    gpus: int = opt(0, "GPUs per node")
    nodes: int = opt(1, "nodes")
    tasks_per_node: int = opt(1, "tasks per node; more than one task in all needs launch.program")


@dataclass(frozen=True)
class ClusterSpec:
    """One SLURM cluster: how to reach its client commands, and what to ask of it."""

    via: List[str] = opt([], "command in front of sbatch, squeue …, such as [ssh, login.example.org]")
    member: str = opt("", "its name for -M, where several clusters share one accounting service")
    conf: str = opt("", "its own slurm.conf, given to the clients as SLURM_CONF")
    partition: str = opt("", "partition; empty: the cluster's default")
    account: str = opt("", "account")
    qos: str = opt("", "quality of service")
    constraint: str = opt("", "features that its nodes must have")
    setup: List[str] = opt([], "lines of shell before the run, such as [module load cuda]; never made from values")
    python: str = opt("", "interpreter on its nodes; empty: the one that submits")
    folder: str = opt("", "where it finds the sweep's folder; empty: the same path as here")
    max_jobs: Optional[int] = opt(None, "jobs of this sweep there at a time, running and waiting; empty: no limit")
    weight: float = opt(1.0, "share beside the others at equal free capacity; 0: only when the others refuse")


@dataclass(frozen=True)
class RetrySpec:
    """How often a run is started again, by what ended it."""

    preempted: int = opt(20, "preemptions, requeues")
    timed_out: int = opt(20, "time limits; each goes on from the last checkpoint")
    node_failed: int = opt(5, "nodes that died")
    lost: int = opt(3, "jobs that vanished from the cluster's books")
    out_of_memory: int = opt(1, "kills for memory")
    failed: int = opt(0, "errors of the run itself")


@dataclass(frozen=True)
class RuleSpec:
    """The class of resources for the runs whose options have these values."""

    when: Dict[str, str] = opt({}, "dotted option to value, such as {policy.kind: smollm2}; all must hold")
    use: str = opt("default", "name in launch.classes")


@dataclass(frozen=True)
class LaunchSpec:
    """The sweep's launcher."""

    backend: Backend = opt(Backend.local, "local (processes of this machine) | slurm")
    at_once: int = opt(1, "local: processes at a time")
    fail_fast: bool = opt(False, "local, or wait=true: start nothing more after the first failure")
    packing: Packing = opt(Packing.in_turn, "runs of one job: in_turn | side_by_side")
    signal_lead: int = opt(120, "seconds before the time limit at which a run saves and ends; must be shorter than it")
    clusters: Dict[str, ClusterSpec] = opt({}, "name to cluster")
    classes: Dict[str, ResourceSpec] = opt({"default": ResourceSpec()}, "name to resources")
    resources: str = opt("", "class of the runs; empty: the first rule that fits, else default")
    rules: List[RuleSpec] = opt([], "which runs take which class")
    retries: RetrySpec = opt(RetrySpec, "how often a run is started again, by cause")
    snapshot: List[str] = opt(["src", "conf", "sweeps", "launchers"], "what of the checkout is copied for the runs")
    environment: List[str] = opt(
        ["PATH", "HOME", "USER", "LANG", "LD_LIBRARY_PATH", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "TMPDIR"],
        "variables that the runs get from the submitting shell; names that look like keys are refused",
    )
    program: str = opt("trimtab.experiment:run", "what a run calls: module:function(spec, overrides) -> objective")


@dataclass(frozen=True)
class SweepSpec:
    """Top-level options beside those of a run; ``-m`` reads them, a single run takes no notice."""

    wait: bool = opt(False, "SLURM: follow the sweep to its end, instead of returning once it is submitted")
    dry_run: bool = opt(False, "print what -m would start, keep the scripts, start nothing")
    runs_per_job: int = opt(1, "runs that share one job, so that imports are paid once")
    launch: LaunchSpec = opt(LaunchSpec, "launcher")
