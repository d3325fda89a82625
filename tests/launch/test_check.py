"""Every rule over a sweep's options: what is told names the value, what is allowed, and an override that mends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trimtab.launch.check import faults, unfit
from trimtab.launch.model import PlannedRun
from trimtab.spec.launch import Backend, ClusterSpec, LaunchSpec, ResourceSpec, RetrySpec, RuleSpec, SweepSpec

RUNS = [PlannedRun("a", "1", 0, ())]
MINE = {"mine": ClusterSpec()}


def sweep(**launch: Any) -> SweepSpec:
    return SweepSpec(launch=LaunchSpec(backend=Backend.slurm, **{"clusters": MINE, **launch}))


def classes(**resources: Any) -> dict[str, ResourceSpec]:
    return {"default": ResourceSpec(**resources)}


def test_defaults_are_in_order() -> None:
    assert faults(SweepSpec(), RUNS) == [] == faults(sweep(), RUNS)


@pytest.mark.parametrize(
    ("spec", "start", "mend"),
    [
        (replace(SweepSpec(), runs_per_job=0), "runs_per_job=0 is refused; allowed: a whole number >= 1", "=1"),
        (sweep(at_once=0), "launch.at_once=0 is refused", "launch.at_once=1"),
        (sweep(retries=RetrySpec(lost=-1)), "launch.retries.lost=-1 is refused", "launch.retries.lost=0"),
        (sweep(clusters={}), "launch.clusters={} is refused; allowed: at least one", "+launch.clusters.mine.partition"),
        (sweep(signal_lead=120, classes=classes(minutes=2)), "launch.signal_lead=120 is refused; allowed: less than "
         "the time limit, 120 s", "launch.signal_lead=30 (or launch.classes.default.minutes=5)"),
        (sweep(classes=classes(minutes=0)), "launch.classes.default.minutes=0 is refused", "minutes=1"),
        (sweep(classes=classes(memory_gib=-1.0)), "launch.classes.default.memory_gib=-1 is refused", "memory_gib=8"),
        (sweep(classes=classes(gpus=-1)), "launch.classes.default.gpus=-1 is refused", "gpus=0"),
        (sweep(classes=classes(nodes=2)), "launch.classes.default.nodes=2 is refused; allowed: 1 with launch.program=",
         "launch.program=my_package.my_module:main"),
        (sweep(classes=classes(tasks_per_node=2)), "launch.classes.default.tasks_per_node=2 is refused", "=1 (or"),
        (sweep(classes={"large": ResourceSpec()}), "launch.resources=default is refused; allowed: large",
         "launch.resources=large"),
        (sweep(rules=[RuleSpec({}, "big")]), "launch.rules[0].use=big is refused; allowed: default", "use:default"),
        (sweep(rules=[RuleSpec({"policy.kin": "tiny"}, "default")]), "launch.rules[0].when={policy.kin:tiny} is",
         "policy.kind:tiny"),
        (sweep(rules=[RuleSpec({"steps": "many"}, "default")]), "launch.rules[0].when={steps:many} is refu", "steps"),
        (sweep(program="nothing"), "launch.program=nothing is refused", "launch.program=trimtab.experiment:run"),
        (sweep(program="no_such_package.x:y"), "launch.program=no_such_package.x:y is", "trimtab.experiment:run"),
        (sweep(snapshot=["src"]), "launch.snapshot=[src] is refused; allowed: a list with conf", "[src,conf,"),
        (sweep(snapshot=["src", "conf", "../x"]), "launch.snapshot=[src,conf,../x] is refused", "[src,conf,"),
        (sweep(environment=["A B"]), "launch.environment=[A B] is refused; allowed: names of variables", "[PATH,"),
        (sweep(clusters={"a/../b": ClusterSpec()}), "launch.clusters.a/../b: 'a/../b' is refused", "a name of letters"),
        (sweep(clusters={"local": ClusterSpec()}), "launch.clusters.local: 'local' is refused", "other than local"),
        (sweep(clusters={"a": ClusterSpec(partition="x\n#SBATCH --wrap=id")}), "launch.clusters.a.partition=", "=main"),
        (sweep(clusters={"a": ClusterSpec(folder="here")}), "launch.clusters.a.folder='here' is refused", 'folder=""'),
        (sweep(clusters={"a": ClusterSpec(via=["ssh", ""])}), "launch.clusters.a.via=[ssh,] is refused", "via=[ssh,"),
        (sweep(clusters={"a": ClusterSpec(max_jobs=0)}), "launch.clusters.a.max_jobs=0 is refused", "max_jobs=null"),
        (sweep(clusters={"a": ClusterSpec(weight=-1.0)}), "launch.clusters.a.weight=-1 is refused", "weight=1"),
        (sweep(clusters={"a": ClusterSpec(setup=["export MY_TOKEN=x"])}), "launch.clusters.a.setup sets MY_TOKEN",
         "source"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(spec: SweepSpec, start: str, mend: str) -> None:
    (line,) = faults(spec, RUNS)
    assert line.startswith(start) and mend in line


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "AWS_SECRET", "github_token", "PGPASSWD"])
def test_no_secret_is_passed_on(name: str) -> None:
    (line,) = faults(sweep(environment=["PATH", name]), RUNS, {name: "hunter2"})
    assert line.startswith(f"launch.environment=[{name}] is refused") and "~/.netrc" in line and "hunter2" not in line


def test_a_password_in_a_value_is_not_passed_on() -> None:
    (line,) = faults(sweep(environment=["http_proxy"]), RUNS, {"http_proxy": "http://me:hunter2@proxy:80"})
    assert line.startswith("launch.environment=[http_proxy] is refused") and "hunter2" not in line
    assert faults(sweep(environment=["http_proxy"]), RUNS, {"http_proxy": "http://proxy:80"}) == []


def test_only_classes_in_use_are_judged() -> None:
    assert faults(sweep(classes={"default": ResourceSpec(), "pair": ResourceSpec(nodes=2)}), RUNS) == []


@pytest.mark.parametrize("name", ["a\nb", "a:b", "a%j", "a\\b"])
def test_folders_that_break_paths_are_refused(tmp_path: Path, name: str) -> None:
    assert (unfit(tmp_path / name, Backend.slurm) or "").startswith("hydra.sweep.dir=")
    assert not (tmp_path / name).exists()


def test_odd_but_harmless_folders_are_fine(tmp_path: Path) -> None:
    for name in ("a b", "ü", "$(touch x)", "it's", "a;b"):
        assert unfit(tmp_path / name, Backend.slurm) is None
    (tmp_path / "file").touch()
    assert "a folder that can be made" in (unfit(tmp_path / "file" / "x", Backend.local) or "")
