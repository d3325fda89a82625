"""Reading run folders, sweeps and offline files of W&B, whole and damaged."""

from __future__ import annotations

import fcntl
import json
import math
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from report.synthetic import Arm, config_with, line, rows_of, write_run, write_sweep

from trimtab.errors import ConfigError, DataError
from trimtab.report.compare import compare
from trimtab.report.model import Run, RunState
from trimtab.report.sources import load
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
