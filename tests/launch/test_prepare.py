"""A sweep's folder: whole before anything is submitted, found again by the same command, closed to later edits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.config import config_hash, read_yaml, sweep_from_dict
from trimtab.config.many import compose_many
from trimtab.errors import ConfigError
from trimtab.launch import snapshot
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Slot
from trimtab.launch.plan import plan
from trimtab.launch.prepare import Planned, default_folder, note_code, prepare
from trimtab.spec import RunSpec
from trimtab.spec.launch import SweepSpec

NASTY = "a b $(touch pwned); \"q\" 'r' = {x: 1}, [y] ü\\ #!"


def planned(*runs: list[str], system: str | None = None) -> Planned:
    specs = [one for one in compose_many(list(runs)) if isinstance(one, RunSpec)]
    if system is not None:
        specs = [replace(one, task=replace(one.task, system=system)) for one in specs]
    made, _ = plan(specs, list(runs), SweepSpec())
    return Planned(tuple(made), {run.dir: spec for run, spec in zip(made, specs, strict=True)}, len(runs))


@pytest.fixture(autouse=True)
def small_tree(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    for name in ("src/trimtab/__init__.py", "conf/config.yaml", "sweeps/s.yaml", "launchers/l.yaml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    monkeypatch.setattr(snapshot, "ROOT", root)
    return root


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def say(said: list[str]) -> Callable[[str], None]:
    return said.append


def test_values_arrive_as_written(tmp_path: Path, say: Callable[[str], None]) -> None:
    what = planned(["policy=smollm2", "task=arithmetic_chat"], system=NASTY)
    folder = prepare(tmp_path / "s", "s", what, SweepSpec(), say)
    (run,) = folder.sweep().runs
    spec = read_yaml(folder.config(run.dir))
    assert spec.task.system == NASTY and config_hash(spec) == run.config_hash
    assert spec.run_dir == str(tmp_path / "s" / run.dir) and spec.resume == "auto"


def test_the_manifest_holds_all_and_no_secret(
    tmp_path: Path, say: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("LANG", "C.UTF-8")
    folder = prepare(tmp_path / "s", "s", planned(["seed=0"], ["seed=1"]), SweepSpec(wait=True), say)
    sweep = folder.sweep()
    assert sweep_from_dict(sweep.launch) == SweepSpec(wait=True) and sweep.environment["LANG"] == "C.UTF-8"
    assert [run.seed for run in sweep.runs] == [0, 1] and sweep.combinations == 2
    assert set(sweep.code) == {"commit", "dirty", "digest", "modules", "cwd"}
    texts = [path.read_text() for path in folder.path.rglob("*") if path.is_file()]
    assert not [text for text in texts if "hunter2" in text]


def test_before_the_first_submission_it_is_made_anew_and_then_stays(
    tmp_path: Path, say: Callable[[str], None], said: list[str], small_tree: Path
) -> None:
    two = planned(["seed=0"], ["seed=1"])
    prepare(tmp_path / "s", "s", two, SweepSpec(), say)
    (small_tree / "conf/config.yaml").write_text("first edit")
    folder = prepare(tmp_path / "s", "s", two, SweepSpec(), say)
    assert (folder.code / "conf/config.yaml").read_text() == "first edit" and said == []
    folder.new_batch("a", "default", [Slot(((two.runs[0].dir, 1),))])
    before = folder.sweep_json.read_text()
    (small_tree / "conf/config.yaml").write_text("second edit")
    assert prepare(tmp_path / "s", "s", two, SweepSpec(), say).sweep_json.read_text() == before
    assert (folder.code / "conf/config.yaml").read_text() == "first edit"
    assert said == []
    note_code(folder, SweepSpec(), say)
    assert len(said) == 1 and said[0].startswith("note: the code has changed")
    (small_tree / "conf/config.yaml").write_text("first edit")
    note_code(folder, SweepSpec(), say)
    assert len(said) == 1


def test_runs_are_added_to_a_folder_that_was_given(tmp_path: Path, say: Callable[[str], None], said: list[str]) -> None:
    folder = prepare(tmp_path / "s", "s", planned(["seed=0"]), SweepSpec(), say)
    (first,) = folder.sweep().runs
    folder.new_batch("a", "default", [Slot(((first.dir, 1),))])
    frozen = folder.config(first.dir).read_text()
    prepare(
        tmp_path / "s", "s", planned(["seed=0", "shadow=[miles/default]"], ["seed=1"]), SweepSpec(runs_per_job=2), say
    )
    sweep = folder.sweep()
    assert [run.seed for run in sweep.runs] == [0, 1] and sweep.launch["runs_per_job"] == 2
    assert folder.config(first.dir).read_text() == frozen and folder.config(sweep.runs[1].dir).exists()
    assert len(said) == 1 and said[0].startswith(f"note: {first.dir} stays as it was started")


def test_a_folder_of_another_launcher_is_refused(tmp_path: Path, say: Callable[[str], None]) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"sweep": "x", "runs": [{"dir": "0", "overrides": []}]}))
    with pytest.raises(ConfigError, match=r"holds a sweep of another launcher .* hydra\.sweep\.dir="):
        prepare(tmp_path, "s", planned(["seed=0"]), SweepSpec(), say)


def test_one_command_one_folder() -> None:
    here = default_folder("s", planned(["seed=0"], ["seed=1"]))
    assert here == default_folder("s", planned(["seed=1"], ["seed=0"])) and here.parent == Path("multirun")
    others = (planned(["seed=0"]), planned(["seed=0"], ["seed=1", "shadow=[miles/default]"]))
    assert len({here, *(default_folder("s", other) for other in others)}) == 3


def test_a_folder_given_by_a_relative_path_is_meant_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = SweepFolder(Path("multirun/a"))
    monkeypatch.chdir("/")
    assert folder.path == tmp_path / "multirun" / "a" and folder.config("x") == folder.path / "frozen" / "x.yaml"
