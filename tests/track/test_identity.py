"""Ids, groups and names of runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trimtab.track.identity import identify, recall, remember, sweep_of


def test_one_setting_in_two_sweeps_is_two_runs_and_each_stays_itself(tmp_path: Path) -> None:
    folders = [tmp_path / sweep / run for sweep in ("a", "b") for run in ("0", "1")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder.parent / "multirun.yaml").touch()
    ids = [identify(folder, "cafe", "n", None).id for folder in folders]
    assert len(set(ids)) == 4 and all(id.startswith("cafe-") for id in ids)
    assert ids == [identify(folder, "cafe", "n", None).id for folder in folders]
    assert identify(folders[0], "beef", "n", None).id not in ids
    assert [identify(folder, "cafe", "n", None).group for folder in folders] == ["a", "a", "b", "b"]
    assert identify(folders[0], "cafe", "n", "mine").group == "mine"


def test_a_folder_that_was_moved_keeps_its_id_until_its_config_changes(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    id = identify(tmp_path / "old", "cafe", "n", None).id
    remember(tmp_path / "old", {"id": id, "config_hash": "cafe", "mode": "online"})
    remember(tmp_path / "old", {"url": "u"})
    moved = (tmp_path / "old").rename(tmp_path / "new")
    assert identify(moved, "cafe", "n", None).id == id != identify(moved, "beef", "n", None).id
    assert recall(moved) == {"id": id, "config_hash": "cafe", "mode": "online", "url": "u"}
    (moved / "wandb.json").write_text("{torn")
    assert recall(moved) == {}


def test_the_sweep_is_found_above_and_named_by_its_manifest(tmp_path: Path) -> None:
    run = tmp_path / "sweep" / "algo=a" / "seed=1"
    run.mkdir(parents=True)
    assert sweep_of(run) is None
    (tmp_path / "sweep" / "multirun.yaml").touch()
    assert sweep_of(run) == "sweep"
    (tmp_path / "sweep" / "sweep.json").write_text('{"sweep": "bounds", "runs": []}')
    assert sweep_of(run) == "bounds"


def test_a_run_of_a_sweep_is_named_by_what_is_swept_over(tmp_path: Path) -> None:
    run = tmp_path / "sweep" / "3"
    run.mkdir(parents=True)
    (run / "overrides.yaml").write_text(yaml.safe_dump(["steps=9", "+a.b=1", "level=token", "seed=2", "optim.lr=3"]))
    assert identify(run, "cafe", "n", None).name == "steps=9 a.b=1 level=token seed=2 optim.lr=3"
    noted = {"overrides": {"task": ["+a.b=1", "level=token,sequence", "seed=2,3"]}, "sweeper": {"params": {"steps": 9}}}
    (run.parent / "multirun.yaml").write_text(yaml.safe_dump({"hydra": noted}))
    assert identify(run, "cafe", "n", None).name == "level=token seed=2 optim.lr=3"
    (run.parent / "multirun.yaml").write_text("{")
    assert identify(run, "cafe", "n", None).name.startswith("steps=9")


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["algo=bypass", "+mis.tis_upper_bound=3", "seed=2"], "algo=bypass mis.tis_upper_bound=3 seed=2"),
        (["task.path=a\\:B"], "task.path=a:B"),
        (["tracker=wandb", "tracker.group=g", "run_dir=/x", "resume=auto", "hydra.sweep.dir=y"], "algo-s0"),
        ([], "algo-s0"),
        ("not a list", "algo-s0"),
        (None, "algo-s0"),
    ],
)
def test_the_name_is_what_was_typed_about_the_method(overrides: object, name: str, tmp_path: Path) -> None:
    if overrides is not None:
        (tmp_path / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    assert identify(tmp_path, "cafe", "algo-s0", None).name == name
