"""A sweep's folder: the one home of its file names.

sweep.json              what is to be run (``Sweep``)
frozen/<run>.yaml       each run's resolved config: what the job reads
code/                   the copied tree that the jobs import from
batches/<id>.json       each submission (``Batch``); <id>.sbatch its script; <id>_<slot>.log what its jobs printed
<run>/                  the run's own folder; result.json (``Result``) and log.txt are the launcher's
"""

from __future__ import annotations

import json
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
        serial = max((int(path.stem.partition("-")[0]) for path in self.batches.glob("*.json")), default=0) + 1
        batch = Batch(f"{serial:04d}-{secrets.token_hex(4)}", cluster, resources, tuple(slots), time.time())
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
        return [self.batch(path.stem) for path in sorted(self.batches.glob("*.json"))]

    def attempts(self, run: str) -> Iterator[tuple[Batch, int, int]]:
        """(batch, slot, attempt) of each submission of the run that was not refused, in order."""
        for batch in self.all_batches():
            for i, slot in enumerate(batch.slots):
                yield from ((batch, i, attempt) for name, attempt in slot.runs if name == run and not batch.refused)

    def log(self, batch: str, slot: int) -> Path:
        """What a job printed, all its runs and restarts."""
        return self.batches / f"{batch}_{slot}.log"

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
