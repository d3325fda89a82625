"""A run's child as its supervisor sees it."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import BinaryIO

from trimtab.launch.child import Program, Task, fork, words
from trimtab.launch.model import State

# Seconds after another rank's end until this one gets TERM, and KILL: after a failure, and otherwise.
BROKEN, SOUND = (5.0, 20.0), (120.0, 180.0)
PATIENCE = 240.0  # seconds that rank 0 waits for word from the others once its own part has ended


class Running:
    """A forked run: watch it, pass signals on, copy its output to the job's log, speak for it when it was killed."""

    def __init__(self, task: Task, program: Program | None, environment: dict[str, str], label: str) -> None:
        self.task, self._label = task, label
        begin = task.log.stat().st_size if task.log.exists() else 0
        self._pid = fork(task, program, environment)
        self._copy = Copy(task, begin, label) if task.writes else None
        self._peer_ended: float | None = None
        self._sent: set[signal.Signals] = set()

    def send(self, number: signal.Signals) -> None:
        """Pass a signal on. A second Ctrl-C would end the run at once, so it gets TERM."""
        os.kill(self._pid, signal.SIGUSR2 if number == signal.SIGUSR2 else signal.SIGTERM)

    def poll(self, asked: bool) -> bool:
        """Whether the run has ended, and its end is told. ``asked``: the job was told to stop."""
        if self._copy is not None:
            self._copy()
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            self._watch_peers()
            return False
        if self._copy is not None:
            self._copy()
            self._copy.close()
        if not self.task.concluded():
            state, error = words(status)
            if self._sent:
                state, error = State.failed, "was ended, as another rank's part was over"
            elif asked and status:  # what it was told it did not survive to tell
                state = State.preempted
            self.task.conclude(state, None, error)
        if self.task.meeting is not None:
            if self.task.writes:
                self.task.record(*self.task.meeting.verdict(self.task.i, PATIENCE))
            self.task.meeting.close()
        return True

    def _watch_peers(self) -> None:
        """End this rank's part once another's is over: a collective call would wait for it for ever."""
        if self.task.meeting is None:
            return
        ends = self.task.meeting.ended(self.task.i).values()
        if not ends:
            return
        self._peer_ended = self._peer_ended or time.monotonic()
        broken = any(end.state in (State.failed, State.out_of_memory) for end in ends)
        waited = time.monotonic() - self._peer_ended
        for after, number in zip(BROKEN if broken else SOUND, (signal.SIGTERM, signal.SIGKILL), strict=True):
            if waited > after and number not in self._sent:
                self._sent.add(number)
                os.kill(self._pid, number)


class Copy:
    """Copies what is added to a run's log to the job's; beside other runs each line begins with the run's name."""

    def __init__(self, task: Task, begin: int, label: str) -> None:
        self._path, self._at, self._label = task.log, begin, label.encode()
        self._file: BinaryIO | None = None
        self._rest = b""

    def __call__(self) -> None:
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
            self._file.seek(self._at)
        while text := self._file.read(1 << 16):
            self._write(text)

    def _write(self, text: bytes) -> None:
        if self._label:
            *lines, self._rest = (self._rest + text).split(b"\n")
            text = b"".join(self._label + line + b"\n" for line in lines)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """Copy an unfinished last line too."""
        if self._rest:
            self._write(b"\n")
        if self._file is not None:
            self._file.close()
