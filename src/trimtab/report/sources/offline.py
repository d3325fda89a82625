"""``.wandb`` files of offline runs: a log of protobuf records in blocks, as LevelDB writes its logs.

A file is cut into blocks of 32 KiB, the first of which begins with a header of 7 bytes. A record lies in one or more
chunks: CRC (4 bytes), length (2), type (1), little-endian, and the data. The CRC is zlib's over type and data.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError
from trimtab.report.model import Run, RunState
from trimtab.report.sources.rows import columns_of, flatten, injected_of, merged, planned_of, seed_of

MAGIC = b":W&B"
HEADER, BLOCK, CHUNK = 7, 32 * 1024, struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class Fragment:
    """What one file tells of a run; a run that was interrupted leaves several files with one id."""

    path: Path
    run_id: str = ""
    name: str = ""
    started: float = 0.0
    exit_code: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def load_offline(paths: Sequence[Path]) -> list[Run]:
    """One Run for each run id in ``paths``: fragments in the order of their start, of a step the last."""
    fragments: dict[str, list[Fragment]] = {}
    for path in paths:
        fragment = read_fragment(path)
        fragments.setdefault(fragment.run_id or str(path), []).append(fragment)
    return [_run(sorted(parts, key=lambda part: (part.started, part.path.name))) for parts in fragments.values()]


def chunks(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, content) of each chunk. Raises ValueError at the first one that was not written whole."""
    position, empty = HEADER, False
    while position < len(data):
        left = BLOCK - position % BLOCK
        if left < CHUNK.size:
            position += left
            continue
        if position + CHUNK.size > len(data):
            raise ValueError("its last record was not written whole")
        crc, length, kind = CHUNK.unpack_from(data, position)
        if crc == length == kind == 0:
            position += left  # a block's rest that was set aside and never written
            empty = True
            continue
        empty = False
        content = data[position + CHUNK.size : position + CHUNK.size + length]
        if len(content) != length:
            raise ValueError("its last record was not written whole")
        if zlib.crc32(content, zlib.crc32(bytes([kind]))) != crc:
            raise ValueError(f"damaged at byte {position}: what follows was not read")
        yield kind, content
        position += CHUNK.size + length
    if empty:
        raise ValueError("it ends in zeros: its last records were not written")


def records(data: bytes) -> Iterator[bytes]:
    """Whole records. Raises ValueError as ``chunks`` does."""
    if not data:
        raise ValueError("it is empty: nothing of it was written")
    if not data.startswith(MAGIC):
        raise ValueError("it is not a file of W&B")
    parts: list[bytes] = []
    for kind, content in chunks(data):
        if kind in (FULL, FIRST):
            parts = []
        parts.append(content)
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []
    if parts:
        raise ValueError("its last record was not written whole")


def read_fragment(path: Path) -> Fragment:
    """What ``path`` holds, up to where it was torn off or damaged. ConfigError without the package wandb."""
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto import wandb_internal_pb2
    except ImportError as error:
        raise ConfigError(f"{path}: reading it needs wandb ({error}): pip install 'wandb>=0.31,<0.32'") from error
    fragment = Fragment(path)
    try:
        for content in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]  # made when it is imported
            record.ParseFromString(content)
            _take(fragment, record)
    except (ValueError, OSError, DecodeError) as error:
        fragment.remarks.append(f"{path.name}: {error}")
    return fragment


def _take(fragment: Fragment, record: Any) -> None:
    """Note what a record says; kinds that tell nothing here are passed over."""
    match record.WhichOneof("record_type"):
        case "run":
            run = record.run
            fragment.run_id, fragment.name = run.run_id, run.display_name
            fragment.started = run.start_time.ToMicroseconds() / 1e6
            _configure(fragment.config, run.config)
        case "config":
            _configure(fragment.config, record.config)
        case "history":
            fragment.rows.append(dict(_items(record.history.item)))
        case "exit":
            fragment.exit_code = record.exit.exit_code


def _items(items: Any) -> Iterator[tuple[str, Any]]:
    for item in items:
        yield "/".join(item.nested_key) or item.key, json.loads(item.value_json)


def _configure(config: dict[str, Any], record: Any) -> None:
    for item in record.update:
        *above, last = list(item.nested_key) or [item.key]
        place = config
        for key in above:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        place[last] = json.loads(item.value_json)
    for item in record.remove:
        config.pop(item.key, None)


def _run(parts: Sequence[Fragment]) -> Run:
    last = parts[-1]
    config: Mapping[str, Any] = flatten({key: value for part in parts for key, value in part.config.items()})
    table = columns_of(merged(row for part in parts for row in part.rows))
    state, error = ended(last.exit_code)
    times = [row["_timestamp"] for row in last.rows if isinstance(row.get("_timestamp"), int | float)]
    return Run(
        name=last.name or last.run_id or last.path.stem,
        config=config,
        seed=seed_of(config),
        state=state,
        step=table.step,
        columns=table.columns,
        path=last.path,
        run_id=last.run_id,
        error=error,
        attempt=len(parts),
        injected=injected_of(config),
        nonfinite=table.nonfinite,
        broken=table.broken,
        updated=float(times[-1]) if times else last.started,
        remarks=tuple(remark for part in parts for remark in part.remarks),
        planned=planned_of(config),
    )


def ended(exit_code: int | None) -> tuple[RunState, str]:
    """The state that an exit code means; a run that was killed leaves none."""
    if exit_code is None:
        return RunState.unknown, ""
    return (RunState.completed, "") if exit_code == 0 else (RunState.failed, f"ended with exit code {exit_code}")
