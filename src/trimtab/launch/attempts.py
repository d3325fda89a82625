"""Which attempt of a run counts, and how the earlier ones ended.

A start is **stale** once a newer batch holds its run, or once its own slot was started again (a requeue after its node
was given up). A stale start ends and leaves no result.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from trimtab.files import write_text
from trimtab.launch.files import SweepFolder, serial
from trimtab.launch.model import Batch, Result, State

HISTORY = "attempts.jsonl"  # in the run's folder: each start's Result as it ended


class Claim:
    """A slot as its latest start holds it."""

    def __init__(self, folder: SweepFolder, batch: str, slot: int) -> None:
        self._folder, self._batch, self._token = folder, batch, secrets.token_hex(8)
        self._path = folder.batches / f"{batch}_{slot}.claim"
        self._seen: dict[str, tuple[int, Batch]] = {}  # newer batches by name, with the time they were written

    def take(self) -> None:
        """Become the slot's latest start."""
        write_text(self._path, self._token)

    def stale(self, run: str) -> bool:
        """Whether this start no longer counts for the run. What cannot be read says nothing."""
        try:
            if self._path.read_text() != self._token:
                return True
        except OSError:
            return False
        return any(
            not b.refused and any(run == name for slot in b.slots for name, _ in slot.runs) for b in self._newer()
        )

    def _newer(self) -> list[Batch]:
        for path in self._folder.batches.glob("*.json"):
            if serial(path.stem) > serial(self._batch):
                written = path.stat().st_mtime_ns
                if self._seen.get(path.stem, (0, None))[0] != written:
                    self._seen[path.stem] = (written, self._folder.batch(path.stem))
        return [batch for _, batch in self._seen.values()]


def hold(path: Path) -> int | None:
    """Lock a file until this process and its forks have ended; None while another holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def record(folder: SweepFolder, run: str, result: Result) -> None:
    """Write the run's result, and add it to the history of its starts."""
    folder.write_result(run, result)
    line = json.dumps(asdict(replace(result)) | {"state": result.state.value}, ensure_ascii=False) + "\n"
    with (folder.run(run) / HISTORY).open("a") as file:
        file.write(line)


def history(folder: SweepFolder, run: str) -> list[Result]:
    """How the run's starts ended, in order; one that was killed with its supervisor or its node is not in it."""
    path = folder.run(run) / HISTORY
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            values = json.loads(line)
            found.append(Result(**values | {"state": State(values["state"])}))
        except (ValueError, TypeError, KeyError):
            continue  # half a line: its writer was killed
    return found


def causes(folder: SweepFolder, run: str) -> Counter[State]:
    """How many of the run's starts ended for which cause."""
    return Counter(result.state for result in history(folder, run) if result.state is not State.completed)
