"""``trimtab replay``: equal to the live run's shadows, tables that can be read again, errors that mend."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toy import END, ToyPolicy, ToyRollout, ToyTask, toy_spec

from trimtab.batch import Sample
from trimtab.build import ParquetRecorder
from trimtab.cli import main
from trimtab.config import methods, recipes, to_yaml
from trimtab.replay import COLUMNS, OWN, Replayed, means
from trimtab.spec import RunSpec
from trimtab.track import JsonlTracker, read_metrics
from trimtab.train.loop import Loop, Parts


class Holed(ToyRollout):
    """Some tokens are not the policy's own, some lack a log-prob, and versions lag."""

    def generate(self, *arguments: Any) -> list[Sample]:
        found = []
        for i, sample in enumerate(super().generate(*arguments)):
            n = len(sample.ids)
            logps = tuple(float("nan") if (i + j) % 11 == 0 else x for j, x in enumerate(sample.logps))
            own, versions = tuple((i + j) % 7 != 0 for j in range(n)), tuple(max(v - i % 2, 0) for v in sample.versions)
            found.append(replace(sample, logps=logps, own=own, versions=versions))
        return found


def recorded(folder: Path, *overrides: str, steps: int = 4) -> tuple[Path, list[dict[str, Any]]]:
    """A toy run with every preset in its shadow, its files, and its metrics step by step."""
    spec = toy_spec("shadow=all", "rollout.record_every=2", "optim.lr=0.05", *overrides, steps=steps)
    run_dir = folder / "run"
    parts = Parts(
        policy=ToyPolicy(), rollout=Holed(0.4), task=ToyTask(), tracker=JsonlTracker(), stop_ids=(END,),
        probe=lambda policy, rollout, samples: {}, record=ParquetRecorder(run_dir / "rollouts", 1.0),
        shadows=methods(spec.shadow, spec),
    )  # fmt: skip
    parts.tracker.start({}, "id", "name", run_dir)
    Loop(parts, spec, run_dir, "hash")()
    parts.tracker.finish("completed", {})
    (run_dir / "config.yaml").write_text(to_yaml(spec))
    return run_dir, [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] in (2, 4)]


def asked(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["replay", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("overrides", [
    ["algo=decoupled"], ["algo=decoupled", "optim.epochs=2", "optim.minibatches=3", "optim.microbatch_tokens=20"],
    ["algo=bypass", "optim.minibatches=2"], ["algo=on_policy"], ["advantage.overlong=drop", "advantage=drop_equal"],
    ["algo=reinforce", "advantage.overlong=punish", "advantage.overlong_buffer=3", "advantage.equal_groups=drop"],
], ids=" ".join)  # fmt: skip
def test_equal_to_the_live_shadows_of_every_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str]
) -> None:
    run_dir, rows = recorded(tmp_path, *overrides)
    found = asked(capsys, run_dir, "preset=all")
    assert [step["step"] for step in found["steps"]] == [2, 4]
    for step, row in zip(found["steps"], rows, strict=True):
        live = {key.removeprefix("shadow/"): x for key, x in row.items() if key.startswith("shadow/")}
        again = {f"{name}/{key}": x for name, figures in step["methods"].items() for key, x in figures.items()}
        assert len(live) == len(COLUMNS) * len(recipes())
        assert {key: again[key] for key in live} == pytest.approx(live, rel=1e-6, abs=1e-9)


def test_the_runs_own_method_says_what_the_run_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, rows = recorded(tmp_path, "level=token", "mis.tis_upper_bound=1.1", "rs=token", "mis.rs_upper_bound=1.3")
    found = asked(capsys, run_dir)
    assert list(found["methods"]) == [OWN]
    for step, row in zip(found["steps"], rows, strict=True):
        figures = step["methods"][OWN]
        assert figures["kept_token_fraction"] == pytest.approx(row["train/mis_kept_token_fraction"])
        assert figures["ess"] == pytest.approx(row["train/mis_ess"])
        assert figures["pg_loss"] == pytest.approx(row["train/pg_loss"], rel=1e-5, abs=1e-7)


def test_overrides_are_laid_on_each_preset_or_are_the_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, _ = recorded(tmp_path, steps=2)
    wide, names = ["mis.tis_upper_bound=1.05"], "verl/decoupled_token_is,trl/token_truncate"
    plain, bounded = asked(capsys, run_dir, f"preset={names}"), asked(capsys, run_dir, f"preset={names}", *wide)
    alone = asked(capsys, run_dir, "algo=decoupled", "tis_mode=truncate", *wide)
    (own,) = set(alone["methods"]) - {OWN}
    assert own == "algo=decoupled tis_mode=truncate mis.tis_upper_bound=1.05"
    for name in names.split(","):
        assert bounded["methods"][name]["saturated_fraction"] > plain["methods"][name]["saturated_fraction"]
        assert bounded["methods"][name]["ess"] == pytest.approx(alone["methods"][own]["ess"])


def test_files_hold_each_step_and_the_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, _ = recorded(tmp_path)
    assert main(["replay", str(run_dir), "preset=trl/token_mask,verl/decoupled_seq_is"]) == 0
    said = capsys.readouterr().out.splitlines()
    json_found = asked(capsys, run_dir, "preset=trl/token_mask,verl/decoupled_seq_is")
    rows = list(csv.DictReader((run_dir / "replay" / "replay.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["2", "4", "mean"] * 3
    for row in rows:
        at = json_found["methods"] if row["step"] == "mean" else {s["step"]: s["methods"] for s in json_found["steps"]}
        figures = at[row["method"]] if row["step"] == "mean" else at[int(row["step"])][row["method"]]
        assert {c: float(row[c]) for c in COLUMNS} == figures
    markdown = (run_dir / "replay" / "replay.md").read_text().splitlines()
    assert markdown[0] == f"# run: 2 recorded steps (2 to 4), {rows[2]['tokens']} tokens" and len(markdown) == 7
    assert said[0].split()[0] == "method" and said[1].split()[0] == OWN
    ess = [json_found["methods"][line.split()[0]]["ess"] for line in said[2:4]]
    assert ess == sorted(ess, reverse=True)
    assert said[-1].endswith("replay/") and str(run_dir) in said[-1]


def test_means_weigh_by_what_they_are_means_over() -> None:
    def step(number: int, tokens: int, rows: int, *values: float) -> Replayed:
        return Replayed(number, tokens, rows, {"x": dict(zip(COLUMNS, values, strict=True))})

    found = [step(1, 10, 2, 1.0, 1.0, 0.5, 0.0, 1.0, 3.0), step(2, 30, 3, 0.5, 0.5, 1.0, 1.0, 2.0, 1.0)]
    assert means(found, "x") == pytest.approx({
        "kept_token_fraction": 0.625, "kept_seq_fraction": 0.7, "ess": 0.875, "saturated_fraction": 0.75,
        "weight_mean": (10 * 1.0 + 15 * 2.0) / 25, "pg_loss": 2.0,
    })  # fmt: skip
    nothing = [step(1, 10, 2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)]
    assert means(nothing, "x") == dict.fromkeys(COLUMNS, 0.0)


def test_a_recording_without_the_trainers_log_probs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, _ = recorded(tmp_path, "algo=bypass", steps=2)
    (file,) = (run_dir / "rollouts").glob("*.parquet")
    table = pq.read_table(file, partitioning=None)
    at, field = table.schema.get_field_index("proximal_logps"), table.schema.field("proximal_logps")
    pq.write_table(table.set_column(at, field, pa.nulls(len(table), field.type)), file)
    assert main(["replay", str(run_dir), "preset=all"]) == 1
    said = capsys.readouterr().err
    assert "step 2 was recorded without the trainer's log-probs" in said and "rollout.record_every=1" in said


@pytest.mark.parametrize(("arguments", "said"), [
    (["preset=trl/tokn_mask"], "did you mean trl/token_mask"),
    (["preset=trl/tokn_mask", "level=token"], "did you mean trl/token_mask"),
    (["preset="], "preset= names no preset; give preset=all"),
    (["optim.lr=3"], "optim.lr=3 is no part of a method"),
    (["trl/token_mask"], "trl/token_mask is no part of a method"),
    (["level=geo"], "allowed: geometric, sequence, token"),
    (["preset=trl/token_mask", "mis.tis_upper_bound=-1"], "trl/token_mask: mis.tis_upper_bound"),
])  # fmt: skip
def test_what_is_wrong_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    run_dir, _ = recorded(tmp_path, steps=2)
    assert main(["replay", str(run_dir), *arguments]) == 1
    assert said in capsys.readouterr().err
    assert not (run_dir / "replay").exists()


def test_places_without_a_run_or_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 1
    assert "no run's folder" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text(to_yaml(RunSpec()))
    assert main(["replay", str(tmp_path)]) == 1
    assert "rollout.record_every" in capsys.readouterr().err
