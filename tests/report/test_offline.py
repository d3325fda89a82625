"""Offline files of W&B: records in blocks, fragments of one run, files that were torn off."""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from report.synthetic import config_with, write_run

from trimtab.report.model import RunState
from trimtab.report.sources import load
from trimtab.report.sources.offline import BLOCK, HEADER, load_offline, records


def log_of(contents: Iterable[bytes]) -> bytes:
    """Records in blocks, written after LevelDB's description of its log format."""
    out = bytearray(b":W&B" + struct.pack("<HB", 0xBEE1, 0))
    for content in contents:
        first = True
        while first or content:
            left = BLOCK - len(out) % BLOCK
            if left < HEADER:
                out += b"\0" * left
                left = BLOCK
            part, content = content[: left - 7], content[left - 7 :]
            kind = (1 if not content else 2) if first else (4 if not content else 3)
            out += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            first = False
    return bytes(out)


@pytest.mark.parametrize("sizes", [[10, 0, 300], [32_754, 5], [32_748, 40], [32_741 - 7, 3], [100_000, 1, 70_000]])
def test_records_come_back_however_the_blocks_cut_them(sizes: Sequence[int]) -> None:
    contents = [os.urandom(size) for size in sizes]
    assert list(records(log_of(contents))) == contents


def test_a_torn_or_damaged_file_gives_what_comes_before() -> None:
    contents = [b"first", b"second" * 10_000, b"third"]
    data = log_of(contents)

    def read(torn: bytes) -> tuple[list[bytes], str]:
        found = []
        try:
            for content in records(torn):
                found.append(content)
        except ValueError as error:
            return found, str(error)
        return found, ""

    assert read(data) == (contents, "")
    for cut in (len(data) - 1, len(data) - 6, 40_000, 25):
        found, why = read(data[:cut])
        assert found == contents[: len(found)] and len(found) < 3
        assert "not written whole" in why
    damaged = bytearray(data)
    damaged[40_000] ^= 1
    found, why = read(bytes(damaged))
    assert found == [b"first"]
    assert "damaged at byte" in why
    assert read(b"PK..") == ([], "it is not a file of W&B")


def offline_file(path: Path, run_id: str, rows: Iterable[dict[str, Any]], config: dict[str, Any], started: int,
                 exit_code: int | None = 0) -> Path:  # fmt: skip
    """A file as the client writes it: a run, its history, its exit."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    first = pb.Record()
    first.run.run_id, first.run.display_name = run_id, f"name of {run_id}"
    first.run.start_time.FromSeconds(started)
    for key, value in config.items():
        item = first.run.config.update.add()
        item.key, item.value_json = key, json.dumps(value)
    made = [first]
    for row in rows:
        record = pb.Record()
        for key, value in row.items():
            item = record.history.item.add()
            item.nested_key.extend(key.split("/"))
            item.value_json = json.dumps(value)
        made.append(record)
    if exit_code is not None:
        last = pb.Record()
        last.exit.exit_code = exit_code
        made.append(last)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(log_of(record.SerializeToString() for record in made))
    return path


def test_fragments_of_one_offline_run_are_one_run(tmp_path: Path) -> None:
    config = {"seed": 4, "algo": {"name": "bypass"}, "_wandb": {"x": 1}}
    rows = [{"train/step": s, "train/reward": float(s)} for s in range(100)]
    again = [{"train/step": s, "train/reward": -float(s)} for s in range(60, 160)]
    # The names sort against the order of their start.
    offline_file(tmp_path / "z" / "run-a.wandb", "a", rows, config, started=10, exit_code=None)
    offline_file(tmp_path / "b" / "run-a.wandb", "a", again, config, started=20)
    offline_file(tmp_path / "c" / "run-c.wandb", "c", [{"train/step": 1, "m": math.nan}], {}, started=5, exit_code=3)
    first, second = load([str(tmp_path)])
    assert (first.run_id, first.name, first.seed, first.attempt) == ("a", "name of a", 4, 2)
    assert first.state is RunState.completed
    assert first.config == {"seed": 4, "algo.name": "bypass"}
    assert first.step.tolist() == list(range(160))
    assert first.columns["train/reward"].tolist() == [float(s) if s < 60 else -float(s) for s in range(160)]
    assert (second.state, second.error) == (RunState.failed, "ended with exit code 3")
    assert second.broken == {"m": (1,)}


def test_an_offline_run_that_was_killed_says_nothing_of_its_end(tmp_path: Path) -> None:
    rows = [{"train/step": s, "m": 1.0} for s in range(50)]
    path = offline_file(tmp_path / "run-a.wandb", "a", rows, {}, 1, exit_code=None)
    path.write_bytes(path.read_bytes()[:-3])
    (run,) = load([str(path)])
    assert run.state is RunState.unknown
    assert len(run.step) == 49
    assert "not written whole" in run.remarks[0]


def test_a_product_run_is_not_read_again_from_its_own_offline_file(tmp_path: Path) -> None:
    write_run(tmp_path / "r", config_with({}), [{"step": 1, "m": 1.0}])
    offline_file(tmp_path / "r" / "wandb" / "x" / "run-r.wandb", "r", [{"train/step": 1, "m": 2.0}], {}, 1)
    (run,) = load([str(tmp_path)])
    assert run.columns["m"].tolist() == [1.0]


@pytest.mark.slow
def test_files_of_the_real_client(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    for begin, end in ((0, 40), (30, 60)):
        with wandb.init(project="p", id="same", dir=str(tmp_path), mode="offline", resume="allow", settings=settings,
                        reinit="finish_previous", config={"seed": 2, "optim": {"lr": 0.1}}) as run:  # fmt: skip
            for step in range(begin, end):
                run.log({"train/step": step, "train/reward": float(step + begin), "text": "x" * 2000})
    wandb.teardown()
    (found,) = load_offline(sorted(tmp_path.rglob("offline-run-*/*.wandb")))
    assert found.step.tolist() == list(range(60))
    assert found.columns["train/reward"].tolist() == [float(s) if s < 30 else float(s + 30) for s in range(60)]
    assert (found.seed, found.config["optim.lr"], found.state) == (2, 0.1, RunState.completed)


def test_an_offline_file_that_ends_anywhere_gives_the_rows_up_to_there(tmp_path: Path) -> None:
    rows = [{"train/step": s, "m": float(s), "text": "x" * 900} for s in range(80)]
    whole = offline_file(tmp_path / "w" / "run-a.wandb", "a", rows, {"seed": 1}, 1, exit_code=None).read_bytes()
    assert len(whole) > 2 * BLOCK
    path = tmp_path / "t" / "run-a.wandb"
    path.parent.mkdir()
    counts = []
    for cut in (0, 3, 7, 9, 500, BLOCK - 3, BLOCK, BLOCK + 3, 2 * BLOCK, len(whole) - 1):
        path.write_bytes(whole[:cut])
        (run,) = load([str(path)])
        assert run.state is RunState.unknown
        assert run.step.tolist() == list(range(len(run.step)))
        assert run.remarks or cut == 7, cut
        counts.append(len(run.step))
    assert counts == sorted(counts) and counts[-1] == 79 and counts[0] == 0
    path.write_bytes(whole + bytes(3000))  # set aside, and the machine lost power
    (run,) = load([str(path)])
    assert len(run.step) == 80 and "ends in zeros" in run.remarks[0]


def test_a_config_of_an_offline_file_that_contradicts_itself_is_read(tmp_path: Path) -> None:
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    record = pb.Record()
    record.run.run_id = "a"
    for path, value in ((["a"], "3"), (["a", "b"], "4"), (["seed"], "1")):
        item = record.run.config.update.add()
        item.nested_key.extend(path)
        item.value_json = value
    file = tmp_path / "run-a.wandb"
    file.write_bytes(log_of([record.SerializeToString()]))
    (run,) = load([str(file)])
    assert (run.config, run.seed) == ({"a.b": 4, "seed": 1}, 1)
