"""Reading run folders, sweeps and offline files of W&B, whole and damaged."""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report.synthetic import Arm, config_with, line, rows_of, write_run, write_sweep

from trimtab.errors import ConfigError, DataError
from trimtab.report.compare import compare
from trimtab.report.model import Run, RunState
from trimtab.report.sources import load
from trimtab.report.sources.offline import BLOCK, HEADER, load_offline, records
from trimtab.report.sources.project import parse
from trimtab.report.sources.rows import columns_of, flatten, merged, seed_of


def one(path: Path) -> Run:
    (run,) = load([str(path)])
    return run


# -- run folders -----------------------------------------------------------------------------------------------------


def test_a_run_folder(tmp_path: Path) -> None:
    rows = rows_of(0.5, np.random.default_rng(0))
    config = config_with({"mismatch.kind": "logit_noise", "mismatch.strength": 0.1}, seed=3)
    write_run(tmp_path / "r", config, rows, attempt=2, overrides=["seed=3", "preset=miles/default"])
    run = one(tmp_path / "r")
    assert (run.name, run.seed, run.state, run.attempt, run.injected) == (
        "r",
        3,
        RunState.completed,
        2,
        "logit_noise 0.1",
    )
    assert run.config["mis.tis_level"] == "token"
    assert run.config["preset"] == "miles/default"
    assert run.step.tolist() == list(range(61))
    assert run.columns["train/reward"][1:].tolist() == [row["train/reward"] for row in rows[1:]]
    assert math.isnan(run.columns["train/reward"][0])
    assert run.columns["eval/reward"][::10].tolist() == [row["eval/reward"] for row in rows[::10]]
    assert run.columns["train/tokens"].dtype == np.float64
    assert (run.planned, run.remarks, dict(run.nonfinite)) == (60, (), {})


@pytest.mark.parametrize("steps", [4, 300])  # read line by line, and by Arrow
def test_of_a_step_that_comes_twice_the_last_line_counts(tmp_path: Path, steps: int) -> None:
    rows = [{"step": s, "m": float(s), "old": 1.0} for s in range(steps)]
    again = [{"step": s, "m": -float(s)} for s in range(steps // 2, steps + 2)]
    write_run(tmp_path / "r", config_with({}), rows + again)
    run = one(tmp_path / "r")
    assert run.step.tolist() == list(range(steps + 2))
    assert run.columns["m"].tolist() == [float(s) if s < steps // 2 else -float(s) for s in range(steps + 2)]
    assert np.isnan(run.columns["old"][steps // 2 :]).all(), "the last line counts whole"
    assert run.remarks == ()


@pytest.mark.parametrize("steps", [4, 300])
def test_an_attempt_that_ended_before_the_one_before_it_is_told(tmp_path: Path, steps: int) -> None:
    rows = [{"step": s, "m": 1.0} for s in range(steps)] + [{"step": 1, "m": 2.0}, {"step": 2, "m": 2.0}]
    write_run(tmp_path / "r", config_with({}), rows)
    run = one(tmp_path / "r")
    assert run.columns["m"][:4].tolist() == [1, 2, 2, 1]
    assert "back to step 1 and on to 2 only" in run.remarks[0]


@pytest.mark.parametrize("steps", [4, 300])
def test_a_torn_last_line_is_dropped_and_a_whole_one_without_its_end_is_not(tmp_path: Path, steps: int) -> None:
    rows = [{"step": s, "m": 1.0} for s in range(steps)]
    write_run(tmp_path / "torn", config_with({}), rows, tail=f'{{"step": {steps}, "m": 1.')
    write_run(tmp_path / "whole", config_with({}), rows, tail=f'{{"step": {steps}, "m": 1.5}}')
    torn, whole = load([str(tmp_path)])
    assert (len(torn.step), torn.remarks) == (steps, ())
    assert (len(whole.step), whole.columns["m"][-1]) == (steps + 1, 1.5)


def test_arrow_and_the_plain_reader_agree(tmp_path: Path) -> None:
    rows = rows_of(0.5, np.random.default_rng(1), steps=200)
    rows[50]["train/grad_norm"], rows[70]["only_bad"] = math.inf, math.nan
    fast = one(write_run(tmp_path / "fast", config_with({}), rows))
    slow = one(write_run(tmp_path / "slow", config_with({}), rows, tail="damaged\n" + line(rows[-1])))
    assert "line 202" in slow.remarks[0]
    assert fast.step.tolist() == slow.step.tolist()
    assert fast.columns.keys() == slow.columns.keys()
    for name, column in fast.columns.items():
        np.testing.assert_array_equal(column, slow.columns[name], name)
    assert fast.broken == slow.broken == {"train/grad_norm": (50,), "only_bad": (70,)}


@pytest.mark.parametrize("count", [1, 200])
def test_bare_nan_and_infinity_of_foreign_writers(tmp_path: Path, count: int) -> None:
    text = "".join(f'{{"step": {s}, "m": NaN, "k": -Infinity, "ok": 1}}\n' for s in range(count))
    write_run(tmp_path / "r", config_with({}), [], tail=text)
    run = one(tmp_path / "r")
    assert dict(run.nonfinite) == {"m": count, "k": count}
    assert run.columns["ok"].tolist() == [1.0] * count


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "3",
        "null",
        '{"step": null}',
        '{"step": "x"}',
        '{"step": 1.5}',
        '{"step": NaN}',
        '{"step": true}',
        "{",
        "\x00",
    ],
)
def test_a_damaged_line_costs_that_line_alone(tmp_path: Path, line: str) -> None:
    write_run(tmp_path / "r", config_with({}), [{"step": 1, "m": 1.0}], tail=line + '\n{"step": 2, "m": 2.0}\n')
    run = one(tmp_path / "r")
    assert run.columns["m"].tolist() == [1.0, 2.0]
    assert "1 lines cannot be read, the first is line 2" in run.remarks[0]


def test_texts_and_lists_among_the_metrics_are_passed_over(tmp_path: Path) -> None:
    rows = [{"step": s, "m": s, "t": "text", "l": [1, 2], "d": {"a": 1}, "b": True, "n": None} for s in range(100)]
    write_run(tmp_path / "r", config_with({}), rows)
    assert set(one(tmp_path / "r").columns) == {"m"}


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "\x00", "a: !!python/object:os.system x"])
def test_a_config_that_cannot_be_read_is_told(tmp_path: Path, text: str) -> None:
    write_run(tmp_path / "r", config_with({}), [{"step": 1, "m": 1.0}])
    (tmp_path / "r" / "config.yaml").write_text(text)
    run = one(tmp_path / "r")
    assert run.config == {}
    assert "config.yaml" in run.remarks[0]


def test_a_run_that_says_running_is_so_while_a_process_holds_its_lock(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", config_with({}), [{"step": 1, "m": 1.0}])
    status = {"state": "running", "host": socket.gethostname(), "updated": time.time()}
    (folder / "status.json").write_text(json.dumps(status))
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert one(folder).state is RunState.running
    assert one(folder).state is RunState.failed
    assert "killed" in one(folder).error
    (folder / "status.json").write_text(json.dumps(status | {"host": "elsewhere"}))
    assert one(folder).state is RunState.running
    (folder / "status.json").write_text(json.dumps(status | {"host": "elsewhere", "updated": 1.0}))
    assert one(folder).state is RunState.failed


# -- sweeps and paths ------------------------------------------------------------------------------------------------


def test_runs_that_the_manifest_expects_and_that_are_not_there_are_missing(tmp_path: Path) -> None:
    arms = {"a": Arm({"algo.name": "standard"}, missing=(1,)),
            "b": Arm({"algo.name": "bypass"}, missing=(0, 1, 2))}  # fmt: skip
    write_sweep(tmp_path / "s", arms)
    (tmp_path / "s" / "1").mkdir()  # what Hydra makes before a run begins
    runs = load([str(tmp_path / "s")])
    missing = {run.name: run for run in runs if run.state is RunState.missing}
    assert set(missing) == {"1", "3", "4", "5"}
    assert missing["1"].config["optim.lr"] == 0.0003, "its config is that of a run with the same overrides"
    assert (missing["1"].seed, missing["3"].seed) == (1, 0)
    assert missing["3"].config["algo.name"] == "bypass"


def test_a_damaged_manifest_is_told(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", {"a": Arm({})})
    (tmp_path / "s" / "sweep.json").write_text('{"runs": [')
    assert any("sweep.json cannot be read" in remark for run in load([str(tmp_path)]) for remark in run.remarks)


def test_names_and_order(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", {str(i): Arm({"optim.lr": i}) for i in range(4)})
    assert [run.name for run in load([str(tmp_path / "s")])] == [str(i) for i in range(12)]
    assert [run.name for run in load([str(tmp_path)])][:2] == ["s/0", "s/1"]
    both = load([str(tmp_path / "s"), str(tmp_path / "s" / "3"), str(tmp_path / "s" / "3" / "metrics.jsonl")])
    assert len(both) == 12, "a run that is reached by several paths is one run"


def test_wrong_paths_are_answered_with_what_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "f.txt").write_text("")
    with pytest.raises(DataError, match=r"no run at .*: looked through 3 folders for metrics.jsonl or status.json"):
        load([str(tmp_path)])
    with pytest.raises(DataError, match=r"there is no .*nowhere; give a run's folder"):
        load([str(tmp_path / "nowhere")])
    with pytest.raises(DataError, match="is no run"):
        load([str(tmp_path / "f.txt")])
    for address in ("wandb:", "wandb:entity", "wandb:entity/", "wandb:/project"):
        with pytest.raises(ConfigError, match="wandb:ENTITY/PROJECT"):
            load([address])
    assert parse("wandb:e/p") == ("e/p", None)
    assert parse("wandb:e/p/group/with/slashes") == ("e/p", "group/with/slashes")


def test_progress_is_told(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", {"a": Arm({})})
    seen: list[tuple[int, int, str]] = []
    load([str(tmp_path / "s")], lambda *now: seen.append(now))
    assert seen == [(1, 3, "0"), (2, 3, "1"), (3, 3, "2")]


# -- rows of foreign runs --------------------------------------------------------------------------------------------


def test_foreign_rows_are_merged_within_an_attempt_and_replaced_by_the_next() -> None:
    rows = [{"train/step": 1, "a": 1}, {"train/step": 2, "a": 2}, {"train/step": 2, "e": 5}, {"train/step": 3, "a": 3},
            {"train/step": 2, "a": 20}, {"nothing": 1}, {"train/step": math.nan, "a": 9}]  # fmt: skip
    found = merged(rows)
    assert {step: (row.get("a"), row.get("e")) for step, row in found.items()} == {
        1: (1, None),
        2: (20, None),
        3: (3, None),
    }
    assert list(merged([{"_step": 4, "x": 1}, {"global_step": 7, "_step": 5}])) == [4, 7]


def test_what_w_and_b_writes_for_values_json_cannot_hold() -> None:
    found = columns_of({1: {"m": "NaN", "k": "Infinity", "t": "text"}, 2: {"m": 1}})
    assert found.broken == {"m": (1,), "k": (1,)}
    assert found.columns["m"].tolist()[1] == 1


def test_configs_and_seeds_of_foreign_runs() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "_wandb": {"x": 1}, "e": {}}) == {"a.b.c": 1, "e": {}}
    assert flatten({"lr": {"value": 0.1, "desc": None}}) == {"lr": 0.1}
    assert seed_of({"seed": 3, "data.seed": 4}) == 3
    assert seed_of({"data.seed": 4, "trainer.seed": 4}) == 4
    assert seed_of({"data.seed": 4, "trainer.seed": 5}) is None
    assert seed_of({"seed": "7"}) == 7
    assert seed_of({"seed": -1}) is None
    assert seed_of({}) is None


# -- offline files ---------------------------------------------------------------------------------------------------


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
    assert one(tmp_path).columns["m"].tolist() == [1.0]


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


def test_what_is_too_large_to_calculate_with_counts_as_non_finite() -> None:
    found = columns_of({1: {"x": 1e308, "flag": True}, 2: {"x": 2.0}})
    assert found.nonfinite == {"x": 1} and "flag" not in found.columns
    assert math.isnan(found.columns["x"][0]) and found.columns["x"][1] == 2.0


def test_a_wild_number_in_a_file_stops_no_comparison(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"a": Arm({"algo.name": "standard"}), "b": Arm({"algo.name": "decoupled"})}, seeds=(0, 1))
    file = next(tmp_path.glob("*/metrics.jsonl"))
    rows = [json.loads(text) for text in file.read_text().splitlines()]
    rows[-1]["train/grad_norm"] = 1e308
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = compare(load([str(tmp_path)]))
    assert len(found.rows) == 2 and any("grad_norm" in problem.text for problem in found.problems)
