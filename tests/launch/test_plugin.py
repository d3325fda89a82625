"""``python -m run -m`` from the outside, with a program that needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.config import read_yaml

ROOT = Path(__file__).parents[2]
PROGRAM = """
def double(spec, overrides):
    if spec.seed == 3:
        raise ValueError("three is odd")
    return 2.0 * spec.seed
def parabola(spec, overrides):
    return -((spec.mis.tis_upper_bound - 3.0) ** 2)
"""
NASTY = 'a b $(touch pwned); \\"q\\" = [x] ü, `id`'


def call(folder: Path, *overrides: str, program: str = "double") -> subprocess.CompletedProcess[str]:
    (folder / "prog.py").write_text(PROGRAM)
    env = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"} | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "run", *overrides, f"launch.program=prog:{program}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False, timeout=120)


def sweep(folder: Path) -> Path:
    (found,) = (folder / "multirun").iterdir()
    return found


def test_a_sweep_and_the_same_command_again(tmp_path: Path) -> None:
    given = ("-m", "seed=1,2,1", "algo=standard", "launch.at_once=2")
    done = call(tmp_path, *given)
    assert done.returncode == 0, done.stderr
    assert "3 combinations, 2 distinct" in done.stdout and "2 ok, 0 not completed" in done.stdout
    folder = sweep(tmp_path)
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    assert [run["dir"] for run in runs] == [f"standard_{run['config_hash']}_s{run['seed']}" for run in runs]
    results = [json.loads((folder / run["dir"] / "result.json").read_text()) for run in runs]
    assert [(one["state"], one["objective"]) for one in results] == [("completed", 2.0), ("completed", 4.0)]
    assert (folder / "code" / "src" / "prog.py").exists() and (folder / "multirun.yaml").exists()
    again = call(tmp_path, *given)
    assert again.returncode == 0 and "2 completed" in again.stdout and sweep(tmp_path) == folder
    assert [json.loads((folder / run["dir"] / "result.json").read_text()) for run in runs] == results


def test_one_failure_is_told_and_the_others_count(tmp_path: Path) -> None:
    done = call(tmp_path, "-m", "seed=2,3")
    assert done.returncode == 1 and "1 ok, 1 not completed" in done.stdout
    assert "failed: ValueError: three is odd (seed=3; log: multirun/" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_values_arrive_as_written(tmp_path: Path) -> None:
    given = f'task.system="{NASTY}"'
    done = call(tmp_path, "-m", "policy=smollm2", "task=arithmetic_chat", given, "seed=1,2", "hydra.sweep.dir=s p")
    assert done.returncode == 0, done.stderr
    frozen = sorted((tmp_path / "s p" / "frozen").glob("*.yaml"))
    assert [read_yaml(path).task.system for path in frozen] == [NASTY.replace("\\", "")] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["__pycache__", "prog.py", "s p"][-2:]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["-m", "level=token,geo", "seed=1,2"], "error: 2 of 4 runs cannot start, so none was started\n"),
        (["-m", "seed=1", "run_dir=../../etc"], "error: run_dir=../../etc is refused; allowed: none with -m"),
        (["-m", "seed=1", "resume=."], "error: resume=. is refused; allowed: no, auto with -m"),
        (["-m", "launcher=slurm,local"], "error: launcher=slurm,local: a sweep has one launcher"),
        (["-m", "wait=true,false"], "error: wait=true,false: a sweep has one wait"),
        (["-m", "runs_per_job=0"], "error: runs_per_job=0 is refused; allowed: a whole number >= 1"),
        (["-m", "seed=1,2", "+launch.classes.b.cpus=3", "launch.resources=default,b"], "error: launch.resources asks "
         "for 2 of 2 runs in more than one class (default and b for seed=1)"),
        (["-m", "launch.resources=big"], "error: launch.resources=big is refused; allowed: default"),
        (["-m", "launch.environment=[HF_TOKEN]"], "error: launch.environment=[HF_TOKEN] is refused"),
        (["-m", "launcher=slurm", "launch.clusters.slurm.partitio=x"], "error: launch.clusters.slurm.partitio is no "),
        (["-m", "+launch.clusters.a.weigth=1"], "error: launch.clusters.a.weigth is no option; did you mean "
         "launch.clusters.a.weight?"),
        (["-m", "launcher=slurm", "hydra/launcher=basic"], "error: this launcher reaches no SLURM"),
        (["launcher=slurm"], "error: launcher=slurm is for sweeps, and without -m the run would start here; add -m"),
        (["-m", "optim.lr=interval(0,1)"], "error: BasicSweeper does not support sweep type"),
        (["sweep=optuna_bounds", "dry_run=true"], "error: this sweeper chooses its runs by the results of "),
    ],
)  # fmt: skip
def test_what_is_wrong_starts_nothing(tmp_path: Path, overrides: list[str], said: str) -> None:
    done = call(tmp_path, *overrides)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not list(tmp_path.rglob("batches")) and not list(tmp_path.rglob("sweep.json"))


def test_a_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    done = call(tmp_path, "-m", "seed=1,2", "dry_run=true")
    assert done.returncode == 0 and "seed=2" in done.stdout and "dry_run=true: nothing was started" in done.stdout
    assert not list(tmp_path.rglob("sweep.json"))


@pytest.mark.slow
def test_optuna_searches_bounds(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    given = ("sweep=optuna_bounds", "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=3")
    done = call(tmp_path, *given, program="parabola")
    assert done.returncode == 0, done.stderr
    folder = sweep(tmp_path)
    best = (folder / "optimization_results.yaml").read_text()
    results = [json.loads(path.read_text())["objective"] for path in folder.glob("*/result.json")]
    assert len(results) == 6 and f"best_value: {max(results)}" in best
    again = call(tmp_path, *given, program="parabola")  # the seed is fixed: nothing is left to do
    assert again.returncode == 0 and "process" not in again.stdout and sweep(tmp_path) == folder


METHODS = "method:{off:['algo=standard'],token:['algo=decoupled','level=token']}"


def test_points_are_axes_of_several_overrides(tmp_path: Path) -> None:
    gaps = "gap:{none:[],small:['mismatch=temperature','mismatch.strength=0.1']}"
    done = call(tmp_path, "-m", f"hydra.sweeper.points={{{gaps},{METHODS}}}", "seed=1,2")
    assert done.returncode == 0, done.stderr
    assert "8 combinations, all distinct" in done.stdout
    runs = json.loads((sweep(tmp_path) / "sweep.json").read_text())["runs"]
    methods = [["algo=standard"], ["algo=decoupled", "level=token"]]
    expected = [
        [*gap, *method, f"seed={seed}"]
        for seed in (1, 2)
        for gap in ([], ["mismatch=temperature", "mismatch.strength=0.1"])
        for method in methods
    ]
    assert [run["overrides"] for run in runs] == expected
    fewer = call(
        tmp_path, "-m", f"hydra.sweeper.points={{{gaps},{METHODS}}}", "~hydra.sweeper.points.gap.none", "seed=1"
    )
    assert fewer.returncode == 0 and "2 combinations, all distinct" in fewer.stdout, fewer.stderr


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((f"hydra.sweeper.points={{{METHODS}}}", "algo=bypass"), "algo=standard of hydra.sweeper.points.method.off"),
        ((f"hydra.sweeper.points={{{METHODS},other:{{a:['level=token']}}}}",), "level=token of hydra.sweeper.points"),
        (("hydra.sweeper.points={method:[algo]}",), "points.method is refused; allowed: a name and a list"),
        (("hydra.sweeper.points={method:{a:algo}}",), "points.method is refused; allowed: a name and a list"),
        ((f"hydra.sweeper.points={{{METHODS}}}", "hydra/launcher=basic"), "knows no hydra.sweeper.points"),
        (("hydra.sweeper.points={m:{a:['algo=standart']}}",), "algo=standart is refused"),
    ],
)  # fmt: skip
def test_points_that_cannot_be_are_refused(tmp_path: Path, given: tuple[str, ...], told: str) -> None:
    done = call(tmp_path, "-m", *given)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "multirun").exists()
