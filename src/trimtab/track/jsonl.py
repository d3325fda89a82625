"""metrics.jsonl: the truth about a run. One strict JSON object a line, ``step`` first.

JSON has no NaN or infinity, so such values are written as null and their names are listed in
``nonfinite``: a reader cannot take them for missing. ``read_metrics`` gives them back as NaN.

Each line reaches the operating system in one write before ``log`` returns, so ``kill -9`` loses no logged
step; every few seconds it is also forced to disk. A machine that dies may leave a torn last line, which
every reader here drops.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Mapping

from trimtab.errors import DataError
from trimtab.files import replacing

FILE = "metrics.jsonl"
SYNC_SECONDS = 5.0
RESERVED = frozenset({"step", "nonfinite"})

log = logging.getLogger(__name__)


def encode(step: int, metrics: Mapping[str, float]) -> bytes:
    """One line of metrics.jsonl. Integers stay integers; anything else becomes a float."""
    if RESERVED & metrics.keys():
        raise ValueError(f"metrics may not be named {', '.join(sorted(RESERVED & metrics.keys()))}")
    record: dict[str, Any] = {"step": step}
    nonfinite = []
    for name, value in metrics.items():
        number = value if isinstance(value, int) else float(value)
        if not math.isfinite(number):
            nonfinite.append(name)
        record[name] = number if math.isfinite(number) else None
    if nonfinite:
        record["nonfinite"] = nonfinite
    return json.dumps(record, allow_nan=False).encode() + b"\n"


class JsonlTracker:
    """Appends to ``run_dir/metrics.jsonl``. A full disk or lost folder raises OSError with the path."""

    def __init__(self, sync_seconds: float = SYNC_SECONDS) -> None:
        self._sync_seconds = sync_seconds
        self._synced = 0.0
        self._path = Path(FILE)
        self._file: BinaryIO | None = None

    def start(self, config: Mapping[str, Any], run_id: str, name: str, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / FILE
        drop_torn_tail(self._path)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  (closed by finish)
        self._synced = time.monotonic()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._file is None:
            raise ValueError("log() before start() or after finish()")
        line = encode(step, metrics)
        try:
            write_whole(self._file, line)
            if time.monotonic() - self._synced >= self._sync_seconds:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            os.fsync(file.fileno())
            file.close()
        except OSError as error:
            log.warning("%s: %s", self._path, error)


def write_whole(file: BinaryIO, line: bytes) -> None:
    """Write ``line`` at the end, whole or not at all."""
    before = file.seek(0, os.SEEK_END)
    try:
        done = 0
        while done < len(line):
            done += file.write(line[done:])
    except OSError:
        os.ftruncate(file.fileno(), before)
        raise


def parse_lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """(record, its line) of each whole line; a torn last line is left out.

    Raises DataError, naming file and line, when a line that is not the last cannot be read.
    """
    bad: tuple[int, str] | None = None
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if bad is not None:
                raise DataError(f"{path}:{bad[0]}: not a line of metrics: {bad[1]}")
            try:
                record = json.loads(line)
            except ValueError as error:  # with JSONDecodeError and UnicodeDecodeError
                bad = (number, str(error))
                continue
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                bad = (number, 'no integer "step"')
                continue
            yield record, line.rstrip(b"\n") + b"\n"


def rewrite(path: Path, lines: Iterator[bytes]) -> None:
    """Replace ``path`` by ``lines``."""
    with replacing(path) as out:
        out.writelines(lines)


def drop_torn_tail(path: Path) -> None:
    """Remove a last line that was not written whole, so that the next one does not run into it."""
    if not path.exists():
        return
    whole = b"".join(line for _, line in parse_lines(path))
    if len(whole) != path.stat().st_size:
        rewrite(path, iter([whole]))


def truncate_after(path: Path, step: int) -> None:
    """Drop every record whose step is above ``step``, and a torn last line; for resuming from a checkpoint."""
    if path.exists():
        rewrite(path, (line for record, line in parse_lines(path) if record["step"] <= step))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records by ascending step; of several with one step the last counts. Non-finite values come back as NaN.

    A torn last line is left out. Raises DataError for any other bad line, FileNotFoundError without a file.
    """
    latest: dict[int, dict[str, Any]] = {}
    for record, _ in parse_lines(path):
        for name in record.get("nonfinite", ()):
            record[name] = math.nan
        latest[record["step"]] = record
    return [latest[step] for step in sorted(latest)]
