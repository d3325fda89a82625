"""``python -m run`` from the outside: exit codes, error lines, folders; the training itself is a stand-in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Replaces trimtab.experiment: says what it was given, and fails as its first override asks.
STAND_IN = """
import sys, types
import trimtab
from trimtab.errors import EngineError, Preempted
module = types.ModuleType("trimtab.experiment")
def run(spec, overrides):
    print(f"RUN {spec.run_dir} seed={spec.seed} level={spec.mis.tis_level.name} overrides={overrides}")
    if spec.seed == 11: raise EngineError("the engine is gone")
    if spec.seed == 12: raise Preempted("SIGTERM")
    if spec.seed == 13: raise ValueError("a bug")
    return 0.5
module.run = run
sys.modules["trimtab.experiment"] = trimtab.experiment = module
import run as entry
entry.main()
"""


def call(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"} | {"PYTHONPATH": str(ROOT / "src")}
    sweep = ["hydra/launcher=basic"] if "-m" in overrides or any(o.startswith("sweep=") for o in overrides) else []
    command = [sys.executable, "-c", STAND_IN, *overrides, *sweep]  # other launchers' runs have no stand-in
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("RUN")]


def test_a_run_gets_its_spec_and_overrides(tmp_path: Path) -> None:
    done = call(tmp_path, "level=geometric", "seed=3")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = lines(done)
    stamp = r"runs/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_decoupled_[0-9a-f]{16}"
    assert re.fullmatch(rf"RUN {stamp} seed=3 level=geometric overrides=\['level=geometric', 'seed=3'\]", line)
    assert list(tmp_path.iterdir()) == []  # Hydra writes nothing; the run's folder is the run's own work


@pytest.mark.parametrize("flag", [[], ["-m"]])
def test_an_override_may_refer_to_another_option(tmp_path: Path, flag: list[str]) -> None:
    done = call(tmp_path, *flag, "steps=${rollout.batch_size}", "algo=standard")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(lines(done)) == 1  # a sweep hands its texts on escaped
    assert flag or lines(done)[0].endswith("overrides=['steps=${rollout.batch_size}', 'algo=standard']")
    done = call(tmp_path, *flag, "policy.cache_dir=${oc.env:NO_SUCH_VARIABLE}")
    assert done.returncode == 2 and "NO_SUCH_VARIABLE" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("given", ["my runs/x", "/abs/y", "a=b"])
def test_run_dir_holds_exactly(tmp_path: Path, given: str) -> None:
    (line,) = lines(call(tmp_path, f"run_dir='{given}'"))
    assert line.startswith(f"RUN {given} seed=0")


def test_hydras_own_folder_is_respected(tmp_path: Path) -> None:
    (line,) = lines(call(tmp_path, "hydra.run.dir=here", "launcher=local"))
    assert line.startswith(f"RUN {tmp_path.resolve() / 'here'} seed=0")


def test_a_refused_config_ends_with_2_and_leaves_nothing(tmp_path: Path) -> None:
    done = call(tmp_path, "steps=0", "rollout.top_k=5")
    assert done.returncode == 2 and done.stdout == ""
    assert [line.split("=")[0] for line in done.stderr.splitlines()] == ["error: steps", "error: rollout.top_k"]
    done = call(tmp_path, "veto=1e-4")
    assert done.returncode == 2 and done.stderr.startswith("error: veto=0.0001 is refused; allowed: at_1e-4")
    done = call(tmp_path, "resume=auto")
    assert done.returncode == 2 and "give run_dir=" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algo=[standard,bypass]"], "algo=[standard,bypass] is refused"),
        (["~steps"], "~steps: an option cannot be deleted"),
        (["run_dir=/tmp/x=1"], "run_dir=/tmp/x=1: its characters need quotes"),
        (["optim.lr=1e400"], "optim.lr=inf is refused; allowed: a finite number > 0"),
        (["optim.lr=1" + "0" * 400], f"optim.lr=1{'0' * 400} is refused; allowed: a finite number; for example"),
        (["rollout.batch_size=1000000000000", "optim.minibatches=3"], "rollout.batch_size=1000000000000 is refused"),
        (["policy=hf", "policy.path=./gone"], "policy.path=./gone is refused"),
        (["task=custom", "task.path=gone:x"], "task.path=gone:x is refused"),
        (["-m", "algo=[standard,bypass]", "seed=0,1"], "2 of 2 runs cannot start"),
    ],
)
def test_what_the_rules_can_find_ends_with_2(tmp_path: Path, overrides: list[str], said: str) -> None:
    done = call(tmp_path, *overrides)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {said}") and "Traceback" not in done.stderr
    assert done.stdout == "" and list(tmp_path.iterdir()) == []
    if "-m" not in overrides:
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("seed", "code", "said"), [(11, 1, "error: the engine is gone\n"), (12, 75, "")])
def test_failures_and_preemption_have_their_codes(tmp_path: Path, seed: int, code: int, said: str) -> None:
    done = call(tmp_path, f"seed={seed}")
    assert (done.returncode, done.stderr) == (code, said)


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    done = call(tmp_path, "seed=13")
    assert done.returncode == 1 and "Traceback" in done.stderr and "ValueError: a bug" in done.stderr


def test_what_has_no_effect_is_noted(tmp_path: Path) -> None:
    done = call(tmp_path, "algo=standard", "level=sequence")
    assert done.stderr == "note: algo=standard reads no mis.* key: mis.tis_level=sequence has no effect\n"


def test_a_sweep_numbers_its_folders(tmp_path: Path) -> None:
    done = call(tmp_path, "-m", "seed=0,1", "level=token,geometric")
    assert done.returncode == 0
    folders = [line.split()[1] for line in lines(done)]
    assert [Path(folder).name for folder in folders] == ["0", "1", "2", "3"]
    assert len({Path(folder).parent for folder in folders}) == 1
    assert Path(folders[0]).parents[1] == tmp_path.resolve() / "multirun"
    sweep = Path(folders[0]).parent
    manifest = json.loads((sweep / "sweep.json").read_text())
    assert manifest["sweep"] == sweep.name
    assert [(run["dir"], run["seed"], run["overrides"]) for run in manifest["runs"]] == [
        (str(i), seed, [f"seed={seed}", f"level={level}"])
        for i, (seed, level) in enumerate((s, lv) for s in (0, 1) for lv in ("token", "geometric"))
    ]
    assert len({run["config_hash"] for run in manifest["runs"]}) == 4


def test_a_sweep_with_a_bad_combination_starts_nothing(tmp_path: Path) -> None:
    done = call(tmp_path, "-m", "rollout.batch_size=8,9,16", "seed=0,1")
    assert done.returncode == 2 and lines(done) == [] and list(tmp_path.iterdir()) == []
    first, *rest = done.stderr.splitlines()
    assert first == "error: 2 of 6 runs cannot start, so none was started"
    assert [line.partition(":")[0] for line in rest] == [f"rollout.batch_size=9 seed={s}" for s in (0, 1)]


def test_a_failed_run_of_a_sweep_does_not_stop_the_others(tmp_path: Path) -> None:
    done = call(tmp_path, "-m", "seed=10,11,14")
    assert done.returncode == 1 and len(lines(done)) == 3 and "error: the engine is gone" in done.stderr


def test_a_study_of_sweeps_is_a_sweep_by_itself(tmp_path: Path) -> None:
    done = call(tmp_path, "sweep=levels", "seed=0", "level=token,sequence")
    assert done.returncode == 0 and len(lines(done)) == 4  # algo has two values, level two, seed one


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(tmp_path: Path, flag: str) -> None:
    done = call(tmp_path, flag)
    assert done.returncode == 0 and done.stdout.startswith("trimtab trains") and "tis_mode " in done.stdout


def test_cfg_job_prints_the_config(tmp_path: Path) -> None:
    done = call(tmp_path, "--cfg", "job", "level=geometric")
    assert done.returncode == 0 and "  tis_level: geometric\n" in done.stdout
