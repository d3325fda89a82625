"""A run's folder: the one home of its file names, its lock and its status."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from trimtab.errors import ConfigError, Preempted, TrimtabError
from trimtab.files import write_text

STATES = ("running", "completed", "failed", "preempted")


@contextmanager
def full_disk_explained(folder: Path) -> Iterator[None]:
    """A full disk or an exceeded quota as an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise TrimtabError(f"run_dir={folder}: {error}; make room and go on with resume=auto") from error


def describe_error(error: BaseException) -> str:
    """Kind and first line of an error, for status.json and for one line of a table."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def end_state(error: BaseException | None) -> str:
    """The state of a run that ended with ``error``, or without one."""
    if error is None:
        return "completed"
    return "preempted" if isinstance(error, Preempted) else "failed"


def launched() -> dict[str, Any]:
    """What the launcher says of this process: ``batch``, ``attempt``, and the ``code`` it runs; empty without one."""
    found: dict[str, Any] = json.loads(os.environ.get("TRIMTAB_LAUNCH", "{}"))
    return found


class RunFolder:
    """``with RunFolder(path, resume) as folder``: claims the folder, and leaves a true status.json whatever happens."""

    def __init__(self, path: Path, resume: str) -> None:
        self.path, self._resume = path, resume
        self.metrics = path / "metrics.jsonl"
        self.config = path / "config.yaml"
        self.overrides = path / "overrides.yaml"
        self.summary = path / "summary.json"
        self.status = path / "status.json"
        self.environment = path / "environment.json"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None
        self._fields: dict[str, Any] = {}

    # -- claiming ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> RunFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise ConfigError(f"run_dir={self.path} cannot be written ({error}); give another with run_dir=") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise ConfigError(f"run_dir={self.path} is in use by a running process; give another run_dir=") from error
        if self.metrics.exists() and not self._goes_on():
            self._lock.close()
            raise ConfigError(
                f"run_dir={self.path} holds a run already (state: {self.state() or 'unknown'}); "
                "go on with it by resume=auto, or give another with run_dir="
            )
        attempt = int(self._read_status().get("attempt", 0)) + 1
        stamp = {key: value for key, value in launched().items() if key != "code"}
        self._fields = {"started": time.time(), "pid": os.getpid(), "host": socket.gethostname(), "attempt": attempt}
        self._fields |= stamp
        self.report("running")
        return self

    def _goes_on(self) -> bool:
        """Whether ``resume`` means the run in this very folder; from elsewhere it would overwrite it."""
        if self._resume in ("no", "auto"):
            return self._resume == "auto"
        return Path(self._resume).expanduser().resolve().is_relative_to(self.path.resolve())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.report(end_state(error), error=None if error is None else describe_error(error))
        if self._lock is not None:
            self._lock.close()

    # -- status ------------------------------------------------------------------------------------------------------

    def _read_status(self) -> dict[str, Any]:
        try:
            found = json.loads(self.status.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def state(self) -> str | None:
        """The state in status.json, or None."""
        found = self._read_status().get("state")
        return found if found in STATES else None

    def note(self, **fields: Any) -> None:
        """Keep ``fields`` (step, reward) for the next report."""
        self._fields |= fields

    def report(self, state: str, error: str | None = None, **fields: Any) -> None:
        """Write status.json; ``fields`` (step, reward) stay until they are given anew."""
        self._fields |= fields
        text = json.dumps({"state": state, "error": error, **self._fields, "updated": time.time()}, indent=1) + "\n"
        try:
            write_text(self.status, text)
        except OSError:
            # A full disk has no room for a second file, but the blocks of the one that exists can be written again.
            with self.status.open("r+") as file:
                file.write(text)
                file.truncate()

    def write_json(self, path: Path, values: Mapping[str, Any]) -> None:
        """Write one of the folder's JSON files."""
        write_text(path, json.dumps(values, indent=1, default=str) + "\n")


class StatusTracker:
    """Keeps step, reward and alarms in status.json up to date, at most once a second.

    ``alarms``: each kind that was raised and in how many steps it held, since the run's first step; ``raised`` says it
    of the steps before a resume.
    """

    def __init__(self, folder: RunFolder, steps: int, raised: Callable[[], Mapping[str, int]] = dict) -> None:
        self._folder, self._steps, self._last = folder, steps, 0.0
        self._raised, self._alarms = raised, Counter[str]()

    def start(self, config: Mapping[str, Any], run_id: str, name: str, run_dir: Path) -> None:
        self._alarms = Counter(self._raised())
        self._folder.report("running", run_id=run_id, name=name, steps=self._steps, alarms=dict(self._alarms))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._alarms.update(name.removeprefix("alarm/") for name in metrics if name.startswith("alarm/"))
        self._folder.note(step=step, reward=metrics.get("train/reward"), alarms=dict(self._alarms))
        now = time.monotonic()
        if now - self._last >= 1.0 or step == self._steps:
            self._last = now
            self._folder.report("running")

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """The folder itself reports how the run ended."""
