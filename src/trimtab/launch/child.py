"""One run of a job in a process of its own: forked after the imports, watched and outlived by its supervisor.

The child writes its run's result itself, so that a supervisor's death costs nothing; of a child that was killed the
supervisor tells. Its output goes straight to ``<run>/log.txt``; the supervisor copies it to the job's log.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

from trimtab.errors import DataError, Preempted, TrimtabError
from trimtab.folder import describe_error, end_state
from trimtab.launch import node
from trimtab.launch.attempts import Claim, hold, record
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Batch, Result, State
from trimtab.launch.ranks import Meeting, Place
from trimtab.launch.stop import SIGNALS, blocked
from trimtab.spec import RunSpec

OK, FAILED, STOPPED, BROKEN = 0, 1, 75, 70  # 75: EX_TEMPFAIL, run it again; 70: it could not even write its result

Program = Callable[[RunSpec, Sequence[str]], float | None]


@dataclass(frozen=True)
class Task:
    """One start of one run: all that its child needs. ``i``: its number in the slot; ``meeting``: of several tasks."""

    folder: SweepFolder
    batch: Batch
    slot: int
    i: int
    run: str
    attempt: int
    spec: RunSpec
    overrides: tuple[str, ...]
    code: dict[str, object]  # of sweep.json
    lead: int
    claim: Claim
    place: Place
    meeting: Meeting | None
    started: float
    refused: BaseException | None = None  # why it cannot even begin: its config or its program does not load

    @property
    def writes(self) -> bool:
        """Only rank 0 leaves a log and a result."""
        return self.place.rank == 0

    @property
    def log(self) -> Path:
        """The run's own log."""
        return self.folder.run(self.run) / "log.txt"

    def conclude(self, state: State, objective: float | None, error: str) -> None:
        """Say how this start ended. With several tasks that is a rank's part, and rank 0's supervisor sums up."""
        if self.meeting is not None:
            self.meeting.end(self.i, state, objective, error)
        else:
            self.record(state, objective, error)

    def record(self, state: State, objective: float | None, error: str) -> None:
        """Leave the run's result, if this start still counts."""
        if self.claim.stale(self.run):
            return
        if state is State.preempted and self.batch.cluster != "local":
            state = State.timed_out if node.cause(self.lead) is State.timed_out else state
        objective = objective if state is State.completed else None
        result = Result(self.batch.id, self.attempt, state, self.started, time.time(), objective, error)
        record(self.folder, self.run, result)

    def concluded(self) -> bool:
        """Whether it is said how this start ended."""
        if self.meeting is not None:
            return self.place.rank in self.meeting.ended(self.i)
        result = self.folder.result(self.run)
        return result is not None and (result.batch, result.started) == (self.batch.id, self.started)


class Caught:
    """``with Caught() as caught: …``: what the block raises is kept in ``error`` and goes no further."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True


class Ending(Caught):
    """What the block raises becomes ``state`` and ``words``, and is printed.

    Until the program installs its own handlers a signal raises Preempted: it has nothing to save yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state, self.words = State.completed, ""

    def __enter__(self) -> Self:
        for number in SIGNALS:
            signal.signal(number, self._stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    @staticmethod
    def _stop(number: int, frame: FrameType | None) -> NoReturn:
        _deafen()  # once is enough: the second would break what the first makes tidy
        raise Preempted(f"{signal.Signals(number).name} before the run took signals; the next start goes on")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        _deafen()
        code = error.code if isinstance(error, SystemExit) else FAILED
        if error is None or code in (OK, None):
            return True
        asked = isinstance(error, KeyboardInterrupt) or code == STOPPED
        self.state = State.preempted if asked else State(end_state(error))
        self.words = describe_error(error)
        if isinstance(error, TrimtabError | Preempted):
            print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        else:
            traceback.print_exception(error)
        return True


def _deafen() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def fork(task: Task, program: Program | None, environment: dict[str, str]) -> int:
    """Start the run; its process id. Signals that come before the child is ready wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    with blocked():
        pid = os.fork()
        if pid == 0:
            code = BROKEN
            try:
                code = _inside(task, program, environment)
            finally:
                if code == BROKEN:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # the handlers for the end of the process are the supervisor's
    return pid


def _inside(task: Task, program: Program | None, environment: dict[str, str]) -> int:
    objective: float | None = None
    with Ending() as ending:
        if task.writes:
            _redirect(task)
            _lock_folder(task)
        os.environ.update(environment)
        stamp = {"batch": task.batch.id, "attempt": task.attempt, "code": task.code}
        os.environ["TRIMTAB_LAUNCH"] = json.dumps(stamp)
        if program is None:
            raise task.refused or DataError("there is no program")
        found = program(task.spec, task.overrides)
        objective = None if found is None else float(found)
    task.conclude(ending.state, objective, ending.words)
    match ending.state:
        case State.completed:
            return OK
        case State.preempted:
            return STOPPED
        case _:
            return FAILED


def _redirect(task: Task) -> None:
    """Output to the run's log, under a line that says which attempt it is of."""
    task.log.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(task.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(task.started))
    where = f"batch {task.batch.id}, slot {task.slot}, restart {node.restarts()}, {socket.gethostname()}"
    print(f"== attempt {task.attempt} of {task.run}: {when}, {where}", flush=True)


def _lock_folder(task: Task) -> None:
    """Hold the run's folder to this process's end; an earlier start in it finds itself stale within seconds."""
    said = False
    while hold(task.folder.run(task.run) / ".launch.lock") is None:
        if task.claim.stale(task.run):
            raise Preempted("a newer attempt has taken the run")
        if not said:
            print("waiting for an earlier start of this run to end", flush=True)
            said = True
        time.sleep(0.5)


def words(status: int) -> tuple[State, str]:
    """State and error of a child that ended without a word; ``status``: of waitpid."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        return State.out_of_memory, "killed by SIGKILL; most likely the memory ran out"
    if code < 0:
        return State.failed, f"killed by {signal.Signals(-code).name}"
    return State.failed, f"its process ended with exit code {code} and left no result; see log.txt"
