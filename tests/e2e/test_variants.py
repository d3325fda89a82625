"""Replay, sweeps, every algorithm under an injected mismatch, and vLLM in the whole program."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from e2e.program import BATCH, VARIED, Program, lines, logged, rows, series, status, wait_until

ALGOS = ("standard", "bypass", "decoupled", "on_policy", "reinforce")
SMALL = (*BATCH, *VARIED, "evaluation.every=0")
TRANSFORMERS = ("rollout=transformers", *SMALL)
IN_TURN = ("-m", "hydra/launcher=basic")  # in one process, folders by number


@pytest.mark.slow
def test_a_replay_trains_on_the_recorded_batches(program: Program, tmp_path: Path) -> None:
    steps = ("steps=12", "checkpoint.every=3")
    noise = ("mismatch=logit_noise", "mismatch.strength=0.3")
    program.good(*TRANSFORMERS, *noise, *steps, "rollout.record_every=1", "run_dir=source")
    replay = ("rollout=replay", "rollout.path=source", *SMALL, *steps)
    program.good(*replay, "run_dir=replay")
    source, again = tmp_path / "source", tmp_path / "replay"
    same = ("train/reward", "train/reward_std", "train/response_length", "train/tokens", "train/loss", "train/mis_kl",
            "train/grad_norm", "train/mis_ess", "train/entropy", "train/lag")  # fmt: skip
    for name in same:  # the same trainer on the same tokens: the same numbers, all the way
        assert series(source, name) == series(again, name), name
    assert (source / "checkpoints/step_00000012/model.safetensors").read_bytes() == (
        again / "checkpoints/step_00000012/model.safetensors"
    ).read_bytes()
    assert "train/probe_mean_abs" not in rows(again)[0]
    assert json.loads((again / "environment.json").read_text())["rollout"]["engine"] == "replay"

    # Another algorithm gives these samples the same rewards, and goes another way.
    program.good(*replay, "algo=bypass", "rs=token", "run_dir=bypass")
    assert series(tmp_path / "bypass", "train/reward") == series(source, "train/reward")
    assert series(tmp_path / "bypass", "train/loss") != series(source, "train/loss")

    process = program.start(*replay, "run_dir=killed")
    wait_until(logged(tmp_path / "killed", 4), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    program.good(*replay, "run_dir=killed", "resume=auto")
    assert lines(tmp_path / "killed") == lines(again)

    done = program.call(*replay, "steps=13", "run_dir=longer")
    assert done.returncode == 1 and "steps=12" in done.stderr and status(tmp_path / "longer")["state"] == "failed"
    done = program.call(*replay, "rollout.group_size=8", "run_dir=wider")
    assert done.returncode == 1 and "rollout.group_size=4" in done.stderr


@pytest.mark.slow
def test_a_replay_does_not_lose_its_own_recording(program: Program, tmp_path: Path) -> None:
    program.good(*TRANSFORMERS, "steps=2", "checkpoint.every=0", "rollout.record_every=1", "run_dir=source")
    shutil.rmtree(tmp_path / "source" / "checkpoints")  # as if it had been killed before its first one
    replay = ("rollout=replay", "rollout.path=source", *SMALL, "steps=2", "run_dir=source", "resume=auto")
    done = program.call(*replay)
    assert done.returncode == 2 and "holds the recording" in done.stderr
    assert len(list((tmp_path / "source" / "rollouts").glob("*.parquet"))) == 2
    assert status(tmp_path / "source")["state"] == "completed"


@pytest.mark.slow
def test_a_sweep_in_one_process(program: Program, tmp_path: Path) -> None:
    program.good(*TRANSFORMERS, *IN_TURN, f"algo={','.join(ALGOS)}", "steps=2", "hydra.sweep.dir=sweep")
    folders = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert [folder.name for folder in folders] == [str(i) for i in range(len(ALGOS))]
    for folder, algo in zip(folders, ALGOS, strict=True):
        name = "bypass" if algo == "reinforce" else algo  # reinforce is bypass with another loss
        assert status(folder)["state"] == "completed" and status(folder)["name"] == f"{name}-s0"
        assert len(rows(folder)) == 2 and (folder / "checkpoints" / "step_00000002").is_dir()
    assert len({status(folder)["run_id"] for folder in folders}) == len(ALGOS)
    # A run doesn't depend on those before it in the process.
    program.good(*TRANSFORMERS, "algo=reinforce", "steps=2", "run_dir=alone")
    assert lines(tmp_path / "alone") == lines(folders[ALGOS.index("reinforce")])


@pytest.mark.slow
def test_a_sweep_in_processes(program: Program, tmp_path: Path) -> None:
    program.good(*TRANSFORMERS, "-m", "algo=bypass,standard", "steps=2", "launch.at_once=2", "hydra.sweep.dir=sweep")
    planned = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["runs"]
    assert [run["dir"].partition("_")[0] for run in planned] == ["bypass", "standard"]
    for run, algo in zip(planned, ("bypass", "standard"), strict=True):
        folder = tmp_path / "sweep" / run["dir"]
        program.good(*TRANSFORMERS, f"algo={algo}", "steps=2", f"run_dir={algo}")
        assert status(folder)["state"] == "completed" and lines(folder) == lines(tmp_path / algo)
        assert json.loads((folder / "result.json").read_text())["state"] == "completed"


def test_a_sweep_with_a_bad_combination_starts_nothing(program: Program, tmp_path: Path) -> None:
    done = program.call(*TRANSFORMERS, "-m", "algo=standard,bypass", "optim.lr=1e-3,-1", "steps=2")
    assert done.returncode == 2 and "none was started" in done.stderr and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_failed_run(program: Program, tmp_path: Path) -> None:
    done = program.call(*TRANSFORMERS, *IN_TURN, "+task.options.fail_at=0,20,1000", "steps=2", "hydra.sweep.dir=sweep")
    assert done.returncode == 1 and "the rubric is lost" in done.stderr
    found = [status(tmp_path / "sweep" / str(i))["state"] for i in range(3)]
    assert found == ["completed", "failed", "completed"]


@pytest.mark.slow
def test_every_algorithm_under_a_mismatch(program: Program, tmp_path: Path) -> None:
    noise = ("mismatch=logit_noise", "mismatch.strength=0.3", "steps=3", "hydra.sweep.dir=sweep")
    program.good(*TRANSFORMERS, *IN_TURN, f"algo={','.join(ALGOS)}", *noise)
    program.good(*TRANSFORMERS, *noise[:3], "mismatch.strength=0", "run_dir=none")
    found = {algo: tmp_path / "sweep" / str(i) for i, algo in enumerate(ALGOS)}
    for algo, run in found.items():
        for row in rows(run):
            assert row["train/mis_k3_kl"] > 1e-3 and row["train/train_rollout_logprob_abs_diff"] > 0.05
            if algo in ("decoupled", "on_policy", "reinforce"):
                assert 0.5 < row["train/mis_ess"] < 0.999 and row["train/mis_is_ratio_max_final"] > 1.05, algo
            else:  # no weights, or those that are within the PPO ratio
                assert row["train/mis_ess"] == row.get("train/mis_is_ratio_max_final", 1.0) == 1.0, algo
        # The noise's mean square, spread by the softmax: about strength^2/2 nats.
        assert sum(series(run, "train/mis_k3_kl")) / 3 == pytest.approx(0.3**2 / 2, rel=0.5)
    clean = rows(tmp_path / "none")[0]
    assert clean["train/mis_k3_kl"] < 1e-9 and clean["train/mis_ess"] > 1 - 1e-6
    first = {algo: rows(run)[0] for algo, run in found.items()}
    for name in ("train/reward", "train/tokens", "train/response_length", "train/mis_k3_kl"):
        values = [first[algo][name] for algo in ALGOS]
        assert values == pytest.approx([values[0]] * len(ALGOS), rel=1e-6), name
    # What is done with the same samples differs.
    norms = [first[algo]["train/grad_norm"] for algo in ALGOS]
    assert len({round(norm, 6) for norm in norms}) >= 3, norms


@pytest.mark.vllm
def test_vllm_with_a_prefix_cache_stays_the_policy_it_was_given(program: Program, tmp_path: Path) -> None:
    run = ("rollout=vllm", *SMALL, "steps=5", "optim.lr=3e-3")
    program.good(*run, "rollout.prefix_caching=true", "run_dir=on")
    probes = series(tmp_path / "on", "train/probe_mean_abs")
    assert len(probes) == 5 and max(probes) < 1e-4
    assert all(row["train/mis_k3_kl"] < 1e-6 and row["train/lag"] == 0 for row in rows(tmp_path / "on"))
    environment = json.loads((tmp_path / "on" / "environment.json").read_text())
    assert environment["rollout"]["engine"] == "vllm" and environment["rollout"]["prefix_caching"] is True
    assert environment["rollout"]["logprobs_mode"] == "processed_logprobs"


@pytest.mark.vllm
def test_two_vllm_runs_in_one_process(program: Program, tmp_path: Path) -> None:
    run = ("rollout=vllm", *SMALL, "steps=3")
    done = program.good(*run, *IN_TURN, "algo=bypass,decoupled", "hydra.sweep.dir=sweep")
    bypass, decoupled = tmp_path / "sweep" / "0", tmp_path / "sweep" / "1"
    assert [status(folder)["state"] for folder in (bypass, decoupled)] == ["completed"] * 2, done.stderr
    assert rows(bypass)[0]["train/reward"] == rows(decoupled)[0]["train/reward"]
    assert "train/ois" not in rows(bypass)[0] and "train/ois" in rows(decoupled)[0]
    program.good(*run, "algo=decoupled", "run_dir=alone")
    assert lines(tmp_path / "alone") == lines(decoupled)


@pytest.mark.vllm
def test_vllm_leaves_no_process_behind(program: Program, tmp_path: Path) -> None:
    process = program.start("rollout=vllm", *SMALL, "steps=100000", "run_dir=run")
    wait_until(logged(tmp_path / "run", 1), process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [pid for pid in children if os.path.exists(f"/proc/{pid}")] == []
