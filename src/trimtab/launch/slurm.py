"""submitit's executor, job and watcher for one cluster each: ids, states and cancels carry it, and no pickle is used.

submitit's own classes name the default cluster in every call, pickle the function, and read the pickled result. Here
a job's work is its slot of a ``Batch`` and its result the runs' result.json.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from submitit.core import core, logger, utils
from submitit.slurm import slurm

from trimtab.files import write_text
from trimtab.launch.clusters import Cluster, ClusterError, safe
from trimtab.launch.model import Batch
from trimtab.launch.states import Row, state_of
from trimtab.spec.launch import ResourceSpec

MODULE = "trimtab.launch.job"
# Variables that mean this machine: over ``via`` they come from the cluster's own login.
OF_THE_MACHINE = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "PWD"}
# Of a step's task, as sh: rank 0 has the job's own log, rank 1 <log>.task1.log. $0: the log without its ending.
OWN_LOG = 'task=${SLURM_PROCID#0}; exec >>"$0${task:+.task$task}.log" 2>&1; exec "$@"'
# Signals wait from here on until the job takes them (``Asked``): else one that comes during set-up or the interpreter's
# start ends the job without a word. $1 marks the second reading of the script.
BLOCK = """\
block="$(command -v env) --block-signal=TERM,USR2"
if ! $block true 2>/dev/null; then
    block=""
    echo "note: env cannot block signals here (coreutils 8.31 can): one that comes before the job has begun ends it"
elif [ "$1" != blocked ]; then
    exec $block bash "$0" blocked
fi"""
NAME = "trimtab-"  # and the batch's id: name and comment of its job


@dataclass(frozen=True)
class Slots:
    """What submitit takes for a function: one slot of a batch. It is carried out on the node, from the batch's file."""

    batch: Batch
    slot: int

    def __call__(self) -> NoReturn:
        raise NotImplementedError("a slot is carried out by its job")


class ClusterWatcher(slurm.SlurmInfoWatcher):
    """States of one cluster's jobs: squeue is believed first, since it knows of requeues. Never raises, never hangs."""

    def __init__(self, cluster: Cluster, delay_s: int = 60) -> None:
        super().__init__(delay_s=delay_s)
        self._cluster = cluster

    def update(self) -> None:
        """Ask for every registered job that has not ended."""
        wanted = sorted({job.split("_")[0] for job in self._registered - self._finished}, key=int)
        self._last_status_check = time.time()
        if not wanted:
            return
        self._num_calls += 1
        try:
            rows = [*self._cluster.sacct(wanted), *self._cluster.squeue()]
        except ClusterError as error:
            logger.get_logger().warning(f"{error}; states may be old")
            return
        for row in rows:
            if row.job in wanted:
                self._info_dict[_number(row)] = {"JobID": _number(row), "State": row.word, "Reason": row.reason}
        self._finished |= {job for job in self._registered - self._finished if self.is_done(job, mode="cache")}

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether it has ended for good: a suspended, requeued or unknown job has not."""
        return not state_of(self.get_state(job_id, mode=mode)).live


def _number(row: Row) -> str:
    return row.job if row.index is None else f"{row.job}_{row.index}"


class ClusterJob(slurm.SlurmJob[None]):
    """A job of one cluster; ``job_class(cluster)`` makes the class."""

    cluster: Cluster

    def cancel(self, check: bool = True) -> None:
        """End it, on its own cluster. ``check``: raise ClusterError when that fails."""
        try:
            self.cluster.scancel(self.job_id)
        except ClusterError:
            if check:
                raise

    def _interrupt(self, timeout: bool = False) -> None:
        for name in ["USR2"] if timeout else ["TERM", "USR2"]:
            self.cluster.scancel(self.job_id, signal=name)

    def done(self, force_check: bool = False) -> bool:
        """Whether its cluster says that it has ended."""
        return self.watcher.is_done(self.job_id, mode="force" if force_check else "standard")

    def submission(self) -> NoReturn:
        """Refused: nothing was pickled."""
        raise NotImplementedError("what a job does lies in batches/<id>.json")

    def _get_outcome_and_result(self) -> NoReturn:
        raise utils.UncompletedJobError("what became of its runs lies in their result.json; trimtab sweep collect")


def job_class(cluster: Cluster) -> type[ClusterJob]:
    """The class of a cluster's jobs, with a watcher of its own: numbers of two clusters coincide."""
    return type("ClusterJob", (ClusterJob,), {"cluster": cluster, "watcher": ClusterWatcher(cluster)})


@dataclass(frozen=True)
class Sheet:
    """What a script is made of beside the cluster. ``folder``: the sweep's, here."""

    folder: Path
    batch: Batch
    resources: ResourceSpec
    signal_lead: int
    environment: Mapping[str, str]


class ClusterExecutor(slurm.SlurmExecutor):
    """Submits the slots of one batch to one cluster, as a job or as an array."""

    def __init__(self, cluster: Cluster, sheet: Sheet) -> None:
        self.cluster, self.sheet = cluster, sheet
        self.job_class = job_class(cluster)
        python = shlex.quote(cluster.spec.python or sys.executable)
        super().__init__(sheet.folder / "batches", python=python)
        parameters = self._parameters()
        for name, value in [*parameters.items(), *parameters["additional_parameters"].items()]:
            if isinstance(value, str) and not value.isprintable():
                raise ClusterError(f"{cluster.name}: {name}={value!r} cannot stand in a script; it must be one line")
        self.update_parameters(**parameters)
        if len(sheet.batch.slots) > 1:
            self.parameters["map_count"] = len(sheet.batch.slots)

    @classmethod
    def affinity(cls) -> int:
        """Usable: the client commands need not be on this machine."""
        return 2

    @property
    def there(self) -> str:
        """The sweep's folder as the cluster finds it."""
        return self.cluster.spec.folder or str(self.sheet.folder)

    @property
    def log(self) -> str:
        """What its jobs print, below the sweep's folder; a relative path has nothing that SLURM would replace."""
        return f"batches/{safe(self.sheet.batch.id)}_{'%a' if len(self.sheet.batch.slots) > 1 else 0}.log"

    @property
    def tasks(self) -> int:
        """Processes of a run."""
        return self.sheet.resources.nodes * self.sheet.resources.tasks_per_node

    def script(self) -> str:
        """The whole script; nothing in it comes from the values of a run."""
        return self._make_submission_file_text(self._submitit_command_str, self.sheet.batch.id)

    def _parameters(self) -> dict[str, Any]:
        spec, asked, id = self.cluster.spec, self.sheet.resources, safe(self.sheet.batch.id)
        more: dict[str, Any] = {
            "chdir": self.there,
            "output": self.log,
            "signal": f"{'B:' if self.tasks == 1 else ''}USR2@{self.sheet.signal_lead}",
            "requeue": True,
            "export": "NONE" if spec.via else "ALL",  # ALL: of an sbatch that has only the allow-list
        }
        parameters = {
            "job_name": NAME + id,
            "comment": NAME + id,
            "time": asked.minutes,
            "nodes": asked.nodes,
            "ntasks_per_node": asked.tasks_per_node,
            "cpus_per_task": asked.cpus,
            "gpus_per_node": asked.gpus or None,
            "mem": f"{round(asked.memory_gib * 1024)}M" if asked.memory_gib else None,
            "partition": spec.partition or None,
            "account": spec.account or None,
            "qos": spec.qos or None,
            "constraint": spec.constraint or None,
            "array_parallelism": len(self.sheet.batch.slots),
            "wckey": None,
            "stderr_to_stdout": True,
            "use_srun": False,  # the command below says when
            "setup": [BLOCK, *self._exports(), *spec.setup],
            "additional_parameters": more,
        }
        return {name: value for name, value in parameters.items() if value is not None or name == "wckey"}

    def _exports(self) -> list[str]:
        if not self.cluster.spec.via:
            return []
        chosen = {name: value for name, value in self.sheet.environment.items() if name not in OF_THE_MACHINE}
        return [f"export {name}={shlex.quote(value)}" for name, value in sorted(chosen.items()) if name.isidentifier()]

    @property
    def _submitit_command_str(self) -> str:
        """``exec``: the signals that SLURM sends to the script then reach the job itself.

        Each task of several writes to a file of its own: srun, which else collects what they print, mixes lines of more
        than 2048 characters and passes nothing on once it was told to stop.
        """
        path = f"export PYTHONPATH={shlex.quote(self.there + '/code/src')}"
        job = f"{self.python} -u -P -m {MODULE} {shlex.quote(self.there)} {safe(self.sheet.batch.id)}"
        if self.tasks == 1:
            return f"{path}\nexec {job}"
        log = f"batches/{safe(self.sheet.batch.id)}_${{SLURM_ARRAY_TASK_ID:-0}}"
        srun = f"srun --export=ALL --unbuffered --cpus-per-task={self.sheet.resources.cpus} --kill-on-bad-exit=0"
        return f"{path}\nexec {srun} $block /bin/sh -c '{OWN_LOG}' \"{log}\" {job}"

    def _num_tasks(self) -> int:
        return 1  # submitit would look for a pickle of each

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        """One sbatch for all of them; what submitit would pickle lies in the batch's file."""
        n = len(delayed_submissions)
        if n != len(self.sheet.batch.slots):
            raise ValueError(f"{n} slots of a batch that has {len(self.sheet.batch.slots)}")
        job = self._submit_command(self._submitit_command_str)
        if n == 1:
            return [job]
        return [self.job_class(self.folder, f"{job.job_id}_{i}") for i in range(n)]

    def _submit_command(self, command: str) -> core.Job[Any]:
        text = self._make_submission_file_text(command, self.sheet.batch.id)
        write_text(self.folder / f"{self.sheet.batch.id}.sbatch", text)
        job = self.cluster.sbatch(text, environment=self.sheet.environment)
        return self.job_class(self.folder, job)

    def send(self) -> str:
        """Submit the batch; SLURM's number of the job or array."""
        slots = [Slots(self.sheet.batch, i) for i in range(len(self.sheet.batch.slots))]
        jobs = self.submit_array(slots)
        return jobs[0].job_id.split("_")[0]
