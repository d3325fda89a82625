"""One SLURM cluster by its client commands: argument lists, never a shell, and never without a time limit.

A command goes to the cluster that its ``ClusterSpec`` names: ``-M member``, its own SLURM_CONF, or through a prefix
such as ssh, which hands its words to a shell: they are quoted, though none but paths and names of the user's needs it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NoReturn

from trimtab.errors import TrimtabError
from trimtab.launch.states import Row, state_of
from trimtab.spec.launch import ClusterSpec

PATIENCE = 30.0  # seconds for a question; a client gives up on a dead controller after 9 to 18
LONG_PATIENCE = 120.0  # for a submission: sbatch waits and tries again while the controller is busy
ALARM = 1.5  # seconds after which a question without an answer is worth a ping, which a dead controller fails at once
SILENCE = 15.0  # seconds in which a controller that did not answer is not asked again
QUESTIONS = {"squeue", "sinfo", "--test-only", "show"}  # words of what may be ended half-way: it changes nothing
OF_THE_CONTROLLER = {"sbatch", "squeue", "scancel", "scontrol", "sinfo"}

# What the clients, ssh and docker say when nobody took the message, and when somebody may have.
NOT_SENT = re.compile(
    r"connect failure|can't be reached now|Connection refused|Could not resolve|No route to host|ssh: connect to"
    r"|Unable to establish config|Unable to contact slurm controller|Problem talking to the database|Host key"
    r"|Permission denied \(|No such file or directory: "
)
NOT_ANSWERED = re.compile(
    r"timed out|Zero Bytes|Unexpected message|Connection (closed|reset)|Broken pipe|client_loop|temporarily unable"
)
# Reasons for which a job waits that takes no part in the queue: the others start before it.
NOT_IN_LINE = re.compile(r"JobHeld|BeginTime|Dependency|JobArrayTaskLimit|PartitionDown|PartitionInactive")
# States of a node whose GPUs are there, free or not: a job's end (comp) and a plan for one (plnd) take none away.
WITH_GPUS = ("idle", "mix", "alloc", "comp", "plnd")
# Variables that change what the clients do; those of a job that submits belong to that job.
FOREIGN = re.compile(r"^(SLURM|SBATCH|SQUEUE|SCANCEL|SINFO|SACCT|SRUN|SALLOC)_")


class ClusterError(TrimtabError):
    """A cluster refuses what it was asked for; holds its words."""


class Unreachable(ClusterError):
    """A cluster doesn't answer. ``sent``: it may have taken the request none the less."""

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(frozen=True)
class Capacity:
    """What a cluster has free, in the partition that its spec names.

    ``waiting``: jobs of anybody in its queue, an array's one by one, and ``held`` those that may not start yet;
    ``max_array``: tasks of an array; ``max_submit``: jobs this user may still submit, None where nothing limits it.
    """

    free_cpus: int
    free_gpus: int
    all_cpus: int
    all_gpus: int
    waiting: int
    max_array: int
    max_submit: int | None
    held: int = 0


class Cluster:
    """Runs a cluster's client commands. Each raises ``Unreachable`` or ``ClusterError``, and none hangs.

    ``keep``: file handles that the clients hold open too, so that a lock lasts until the last of them has ended.
    """

    def __init__(self, name: str, spec: ClusterSpec, patience: float = PATIENCE) -> None:
        self.name, self.spec, self.patience = name, spec, patience
        self.keep: tuple[int, ...] = ()
        self._silent = (0.0, "")  # until when it is not asked again, and what it said

    # -- jobs --------------------------------------------------------------------------------------------------------

    def sbatch(self, script: str, *, environment: Mapping[str, str] | None = None) -> str:
        """Submit a script; the number of its job. ``environment``: what the job inherits where ``via`` is empty."""
        patience = max(self.patience, LONG_PATIENCE) if self.patience >= PATIENCE else self.patience
        out = self._run("sbatch", "--parsable", script=script, environment=environment, patience=patience)
        found = re.search(r"^(\d+)(;\S+)?$", out, re.MULTILINE)  # beside it a site's plugin may print what it likes
        if found is None:
            raise Unreachable(f"{self.name}: sbatch answered {out.strip()!r}, which names no job", sent=True)
        return found[1]

    def test_only(self, script: str) -> float | None:
        """Whether it would take the script: ClusterError with its words if not; else the epoch second of its start."""
        out = self._run("sbatch", "--test-only", script=script, environment={}, both=True)
        found = re.search(r"to start at (\S+)", out)
        return datetime.fromisoformat(found[1]).timestamp() if found else None

    def squeue(self) -> list[Row]:
        """Every job of this user that has not ended, one row for each index of an array."""
        return self._queue()

    def find(self, name: str, since: float) -> Row | None:
        """A job of this name that was submitted after ``since``, ended ones too; None when the cluster knows none."""
        rows = self._queue("--states=all", f"--name={safe(name)}")
        if not rows:
            begin = (datetime.fromtimestamp(since) - timedelta(days=1)).isoformat(timespec="seconds")
            try:
                rows = self._books(f"--name={name}", f"--starttime={begin}")
            except Unreachable:
                raise
            except ClusterError:
                rows = []  # it keeps no books
        return rows[-1] if rows else None

    def sacct(self, jobs: Sequence[str]) -> list[Row]:
        """Every start of these jobs, oldest first."""
        return self._books(f"--jobs={','.join(map(safe, jobs))}") if jobs else []

    def scancel(self, job: str, signal: str | None = None) -> None:
        """Cancel a job, an array's element (``12_3``) or a whole array; or send it a signal, the batch script too."""
        self._run("scancel", *([f"--signal={safe(signal)}", "--full"] if signal else []), safe(job))

    def requeue(self, job: str) -> None:
        """Put a job back into its queue."""
        self._run("scontrol", "requeue", safe(job))

    def release(self, job: str) -> None:
        """Let a held job start when its turn comes."""
        self._run("scontrol", "release", safe(job))

    # -- what it has -------------------------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """What is free now."""
        config = dict(re.findall(r"^(\w+) += +(\S+)", self._run("scontrol", "show", "config"), re.MULTILINE))
        rows = [line.split("@") for line in self._run("sinfo", "-h", "-o", "%P@%C").splitlines() if "@" in line]
        ours = [row for row in rows if row[0].rstrip("*") == self.spec.partition or
                (not self.spec.partition and row[0].endswith("*"))]  # fmt: skip
        if not ours and self.spec.partition:
            names = ", ".join(sorted({row[0].rstrip("*") for row in rows}))
            raise ClusterError(f"{self.name} has no partition {self.spec.partition}; it has {names}")
        cpus = [[int(part) for part in row[1].split("/")] for row in ours or rows]  # allocated/idle/other/all
        partition = [f"--partition={safe((ours or rows)[0][0].rstrip('*'))}"] if ours else []
        used, gpus = self._gpus(partition)
        queue = self._run("squeue", "-h", "-r", "--states=PENDING", *partition, "-o", "%i %r").splitlines()
        reasons = [line.partition(" ")[2] for line in queue if line[:1].isdigit()]
        held = sum(bool(NOT_IN_LINE.match(reason)) for reason in reasons)
        limit = self._max_submit(config.get("ClusterName", self.spec.member))
        array = int(config.get("MaxArraySize", 1))
        return Capacity(
            sum(row[1] for row in cpus), gpus - used, sum(row[3] for row in cpus), gpus, len(reasons) - held,
            max(array, 1), limit, held,
        )  # fmt: skip

    def _gpus(self, partition: Sequence[str]) -> tuple[int, int]:
        fields = "NodeList:200,StateCompact:20,Gres:200,GresUsed:200"
        used = total = 0
        for line in set(self._run("sinfo", "-h", "-N", *partition, "-O", fields).splitlines()):
            node = line.split()
            if len(node) == 4 and node[1].rstrip("*~#!%$@^-") in WITH_GPUS:
                total += _gres(node[2])
                used += _gres(node[3])
        return used, total

    def _max_submit(self, cluster: str) -> int | None:
        """What is left of this user's limit; None when nothing limits it or nobody can tell."""
        try:
            user = self._run("id", "-un", member=False).strip()
            which = ("show", "assoc", "where", f"user={safe(user)}", f"cluster={safe(cluster)}")
            rows = self._run("sacctmgr", "-nP", *which, "format=Account,MaxSubmitJobs", member=False).splitlines()
        except ClusterError:
            return None
        found = [row.split("|") for row in rows if "|" in row]
        limits = [int(limit) for account, limit in found
                  if limit.isdigit() and account == (self.spec.account or account)]  # fmt: skip
        return max(min(limits) - len(self.squeue()), 0) if limits else None

    # -- how ---------------------------------------------------------------------------------------------------------

    def _queue(self, *options: str) -> list[Row]:
        out = self._run("squeue", "-h", "-r", "--me", *options, "-o", "%F@%K@%T@%r@%j@%k")
        rows = []
        for line in out.splitlines():
            job, _, rest = line.partition("@")
            parts = rest.split("@", 4)
            if job.isdigit() and len(parts) == 4 + (len(parts) == 5):
                index = int(parts[0]) if parts[0].isdigit() else None
                comment = parts[4] if len(parts) == 5 else ""
                rows.append(Row(job, index, parts[1], parts[2], parts[3], comment))
        return rows

    def _books(self, *options: str) -> list[Row]:
        fields = "--format=JobID,State,ExitCode,JobName,Comment"
        out = self._run("sacct", "-nXDP", "--delimiter=@", *options, fields)
        rows = []
        for line in out.splitlines():
            parts = line.split("@", 4)
            found = re.fullmatch(r"(\d+)(?:_(\d+|\[.*\]))?", parts[0])
            if found is None or len(parts) != 5:
                continue
            ended = not state_of(parts[1]).live
            reason = f"exit code {parts[2]}" if ended and parts[2] != "0:0" else ""
            for index in _indices(found[2]):
                rows.append(Row(found[1], index, parts[1], reason, parts[3], parts[4]))
        return rows

    def _run(
        self, command: str, *words: str, script: str | None = None, environment: Mapping[str, str] | None = None,
        patience: float | None = None, member: bool = True, both: bool = False,
    ) -> str:  # fmt: skip
        """What the command prints; ``both``: what it says of itself too."""
        until, why = self._silent
        if command in OF_THE_CONTROLLER and time.monotonic() < until:
            raise Unreachable(why)
        argv, around = self._argv(command, *words, member=member), self._environment(environment)
        try:
            code, out, err = self._wait(argv, script, around, patience or self.patience, command)
            if code != 0:
                self._complain(code, err)
        except Unreachable as error:
            if command in OF_THE_CONTROLLER:
                self._silent = (time.monotonic() + SILENCE, str(error))
            raise
        return out + err if both else out

    def _argv(self, command: str, *words: str, member: bool = True) -> list[str]:
        argv = [command, *(["-M", self.spec.member] if member and self.spec.member else []), *words]
        if self.spec.via:
            argv = ["env", f"SLURM_CONF={self.spec.conf}", *argv] if self.spec.conf else argv
            argv = [*self.spec.via, *(shlex.quote(word) for word in argv)]
        path = shutil.which(argv[0])
        if path is None:
            raise Unreachable(f"{self.name}: {argv[0]} is not installed here; set launch.clusters.{self.name}.via")
        return [path, *argv[1:]]

    def _environment(self, given: Mapping[str, str] | None) -> dict[str, str]:
        found = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
        if self.spec.via:
            return found
        default = {"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {}
        conf = {"SLURM_CONF": self.spec.conf} if self.spec.conf else {}
        return (dict(given) if given is not None else found) | default | conf

    def _down(self) -> str:
        """What ``scontrol ping`` says when no controller of the cluster is up; empty when one is, or nobody can tell.

        The other clients try for 9 to 18 s to reach one that is not there.
        """
        try:
            _, out, _ = self._wait(self._argv("scontrol", "ping"), None, self._environment(None), 2 * ALARM, "ping")
        except Unreachable:
            return ""
        return out.strip().splitlines()[0] if " is DOWN" in out and " is UP" not in out else ""

    def _complain(self, code: int, err: str) -> NoReturn:
        said = " ".join(line.strip() for line in err.splitlines() if line.strip()) or f"exit code {code}"
        if NOT_SENT.search(said):
            raise Unreachable(f"{self.name}: {said}")
        if NOT_ANSWERED.search(said) or (code == 255 and self.spec.via):
            raise Unreachable(f"{self.name}: {said}", sent=True)
        raise ClusterError(f"{self.name}: {said}")

    def _wait(
        self, argv: Sequence[str], script: str | None, environment: Mapping[str, str], patience: float, command: str
    ) -> tuple[int, str, str]:
        """Exit code, output, errors.

        A session of its own: a key pressed in the terminal must not end a submission half-way. Files, not pipes: ssh
        may leave a process behind (ControlPersist) that holds a pipe open for hours.
        """
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                argv, env=environment, start_new_session=True, stdout=out, stderr=err, pass_fds=self.keep,
                stdin=subprocess.DEVNULL if script is None else subprocess.PIPE,
            )  # fmt: skip
            try:
                text = None if script is None else script.encode()
                if patience > ALARM and command in OF_THE_CONTROLLER and not QUESTIONS.isdisjoint([command, *argv]):
                    with suppress(subprocess.TimeoutExpired):
                        process.communicate(text, timeout=ALARM)
                    if process.returncode is None and (down := self._down()):
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
                        raise Unreachable(f"{self.name}: {down}")
                    patience, text = patience - ALARM, None
                process.communicate(text, timeout=patience)
            except subprocess.TimeoutExpired as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise Unreachable(f"{self.name}: {command} has not answered in {patience:.0f} s", sent=True) from error
            out.seek(0)
            err.seek(0)
            return process.returncode, out.read().decode(errors="replace"), err.read().decode(errors="replace")


def safe(word: str) -> str:
    """The word itself when no shell and no option parser finds anything in it; ClusterError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", word):
        raise ClusterError(f"{word!r} is no name or number that a cluster's command takes")
    return word


def _gres(text: str) -> int:
    """GPUs in ``gpu:a100:4(S:0-1),gpu:2,shard:8``."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,()]+)??:(\d+)", text))


def _indices(text: str | None) -> list[int | None]:
    """``None``, ``3`` or ``[1-3,7%2]`` as the indices of an array."""
    if text is None:
        return [None]
    found: list[int | None] = []
    for part in text.strip("[]").partition("%")[0].split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if span is not None:
            found += range(int(span[1]), int(span[2] or span[1]) + 1, int(span[3] or 1))
    return found
