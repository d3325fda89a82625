"""Starts runs by forking one process that has imported all that a run imports: that is most of a short run's time.

``python warm.py`` reads one JSON list a line, ``["start", arguments, cwd, environment, stdout, stderr]`` or
``["poll", pid]``, and answers each with a line: the pid, or the exit code (null while it runs).
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Warm:
    """The process that forks."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *words: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, arguments: list[str], cwd: Path, environment: Mapping[str, str], out: Path, err: Path) -> Forked:
        """``python -m run arguments``."""
        return Forked(self, self.ask("start", arguments, str(cwd), dict(environment), str(out), str(err)))

    def close(self) -> None:
        self._process.communicate()


class Forked:
    """What tests use of ``subprocess.Popen``."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self._warm, self.pid = warm, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._warm.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float = 240) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("run", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def prepare() -> None:
    """Import what a run imports."""

    import trimtab.experiment
    import trimtab.rollout.transformers  # noqa: F401


def become(arguments: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> None:
    """Make this forked process what ``python -m run arguments`` would be before it imports anything."""
    for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    sys.path[0] = cwd
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments


def serve() -> bool:
    """Answer until the other side has gone; True in a forked process."""
    for line in iter(sys.stdin.readline, ""):
        match json.loads(line):
            case ["start", *given]:
                if (pid := os.fork()) == 0:
                    become(*given)
                    return True
                answer: int | None = pid
            case ["poll", pid]:
                ended, state = os.waitpid(pid, os.WNOHANG)
                answer = os.waitstatus_to_exitcode(state) if ended else None
        print(json.dumps(answer), flush=True)
    return False


if __name__ == "__main__":
    prepare()
    if serve():
        runpy.run_module("run", run_name="__main__", alter_sys=True)
