"""A sweep's folder: the one home of its file names.

sweep.json              what is to be run (``Sweep``)
frozen/<run>.yaml       each run's resolved config: what the job reads
code/                   the copied tree that the jobs import from
batches/<id>.json       each submission (``Batch``); <id>.sbatch its script; <id>_<slot>.log what its jobs printed
<run>/                  the run's own folder; result.json (``Result``) and log.txt are the launcher's
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from trimtab.errors import DataError
from trimtab.files import write_text
from trimtab.launch.model import Batch, PlannedRun, Result, Slot, State, Sweep

LAST_WORDS = 4096  # bytes of a log that its last line is looked for in


def serial(batch: str) -> tuple[int, str]:
    """What batches' ids are sorted by: in the order of submission, past 9999 too."""
    number = batch.partition("-")[0]
    return (int(number) if number.isdecimal() else 0), batch


class SweepFolder:
    """Reads and writes what lies in a sweep's folder."""

    def __init__(self, path: Path) -> None:
        path = path.absolute()  # jobs start elsewhere
        self.path = path
        self.sweep_json = path / "sweep.json"
        self.frozen = path / "frozen"
        self.code = path / "code"
        self.batches = path / "batches"

    # -- the plan ----------------------------------------------------------------------------------------------------

    def write_sweep(self, sweep: Sweep) -> None:
        """Replace sweep.json."""
        write_text(self.sweep_json, _text(asdict(sweep)))

    def sweep(self) -> Sweep:
        """DataError when there is none, or when it is not one of this launcher's."""
        found = self._read(self.sweep_json)
        try:
            runs = tuple(PlannedRun(**{**run, "overrides": tuple(run["overrides"])}) for run in found.pop("runs"))
            return Sweep(runs=runs, **found)
        except (KeyError, TypeError) as error:
            raise DataError(f"{self.sweep_json} is no sweep of this launcher ({error}); start it with -m") from error

    def config(self, run: str) -> Path:
        """The run's frozen config."""
        return self.frozen / f"{run}.yaml"

    def run(self, run: str) -> Path:
        """The run's folder."""
        return self.path / run

    # -- submissions -------------------------------------------------------------------------------------------------

    def new_batch(self, cluster: str, resources: str, slots: Sequence[Slot]) -> Batch:
        """A batch with the next serial, written before its submission."""
        self.batches.mkdir(exist_ok=True)
        number = max((serial(path.stem)[0] for path in self.batches.glob("*.json")), default=0) + 1
        batch = Batch(f"{number:04d}-{secrets.token_hex(4)}", cluster, resources, tuple(slots), time.time())
        self.write_batch(batch)
        return batch

    def write_batch(self, batch: Batch) -> Batch:
        """Write it, or replace what was written; returns it."""
        write_text(self.batches / f"{batch.id}.json", _text(asdict(batch)))
        return batch

    def batch(self, id: str) -> Batch:
        """One batch."""
        found = self._read(self.batches / f"{id}.json")
        slots = tuple(Slot(tuple((run, attempt) for run, attempt in slot["runs"])) for slot in found.pop("slots"))
        return Batch(slots=slots, **found)

    def all_batches(self) -> list[Batch]:
        """Every batch, in the order of submission."""
        return [self.batch(id) for id in sorted((path.stem for path in self.batches.glob("*.json")), key=serial)]

    def attempts(self, run: str) -> Iterator[tuple[Batch, int, int]]:
        """(batch, slot, attempt) of each submission of the run that was not refused, in order."""
        for batch in self.all_batches():
            for i, slot in enumerate(batch.slots):
                yield from ((batch, i, attempt) for name, attempt in slot.runs if name == run and not batch.refused)

    def log(self, batch: str, slot: int) -> Path:
        """What a job printed, all its runs and restarts."""
        return self.batches / f"{batch}_{slot}.log"

    def last_words(self, batch: str, slot: int) -> str:
        """The last line that a job printed; empty when it printed nothing."""
        try:
            with self.log(batch, slot).open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - LAST_WORDS, 0))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def cancel_mark(self, batch: str, slot: int) -> Path:
        """There once somebody asked for the job's end: no retry follows."""
        return self.batches / f"{batch}_{slot}.cancel"

    def ask_to_end(self) -> None:
        """Have the processes that start this sweep's runs start none any more."""
        write_text(self.batches / "all.cancel", secrets.token_hex(8))

    def asked_to_end(self) -> str:
        """Who watches it knows by its change that he was asked to end; a later command takes no notice."""
        path = self.batches / "all.cancel"
        return path.read_text() if path.exists() else ""

    # -- results -----------------------------------------------------------------------------------------------------

    def write_result(self, run: str, result: Result) -> None:
        """Replace the run's result."""
        self.run(run).mkdir(parents=True, exist_ok=True)
        write_text(self.run(run) / "result.json", _text(asdict(result)))

    def result(self, run: str) -> Result | None:
        """The run's result, None when there is none."""
        path = self.run(run) / "result.json"
        if not path.exists():
            return None
        found = self._read(path)
        return Result(**found | {"state": State(found["state"])})

    def status(self, run: str) -> dict[str, Any]:
        """The run's own status.json, empty when there is none."""
        path = self.run(run) / "status.json"
        return self._read(path) if path.exists() else {}

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise DataError(f"there is no {path}; give the folder of a sweep") from error
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise DataError(f"{path} holds a {type(found).__name__}, not an object")
        return found


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=1, ensure_ascii=False, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no place in a manifest")
