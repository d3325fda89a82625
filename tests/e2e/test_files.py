"""What a run leaves behind."""

from __future__ import annotations

import json
import pickletools
from pathlib import Path

import pytest
import yaml
from e2e.program import BATCH, VARIED, Program, lines, rows, status

from trimtab import config
from trimtab.recording import read_rollouts
from trimtab.track import read_metrics

SECRETS = {
    "WANDB_API_KEY": "fake0secret1" + "0123456789ab" * 2 + "wxyz",
    "HF_TOKEN": "hf_fakefakefakefakefakefakefakefake99",
}
RUN = ("rollout=transformers", *BATCH, *VARIED, "steps=3", "evaluation.every=2", "checkpoint.every=1")


def is_pickle(data: bytes) -> bool:
    """Whether the whole of it is one pickle (protocol 2 and up), or a zip that holds one."""
    if data[:1] == b"\x80" and data[1:2] in b"\x02\x03\x04\x05":
        try:
            *_, (last, _, at) = pickletools.genops(data)
        except ValueError:
            return False
        return last.name == "STOP" and at == len(data) - 1
    return data[:4] == b"PK\x03\x04" and b".pkl" in data


def check_harmless(folder: Path) -> None:
    """No file holds a secret or is a pickle."""
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert path.suffix not in (".pkl", ".pt", ".pth", ".bin", ".pickle") and not is_pickle(data), path
            for name, secret in SECRETS.items():
                assert secret.encode() not in data, f"{name} in {path}"
                assert secret not in str(path)


def test_the_files_of_a_run(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # where the task of these runs is, for compose
    done = program.good(*RUN, "run_dir=a", "rollout.record_every=2", env=SECRETS)
    run = tmp_path / "a"
    assert "3 steps in" in done.stdout
    assert not any(secret in done.stdout + done.stderr for secret in SECRETS.values())
    check_harmless(run)
    assert {path.name for path in run.iterdir()} == {
        ".lock", "config.yaml", "overrides.yaml", "metrics.jsonl", "summary.json", "status.json", "environment.json",
        "rollouts", "checkpoints",
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"a"}

    given = yaml.safe_load((run / "overrides.yaml").read_text())
    assert given[2:] == [*RUN, "run_dir=a", "rollout.record_every=2"]
    summary, state = json.loads((run / "summary.json").read_text()), status(run)
    assert config.config_hash(config.compose(given)) == summary["config_hash"] == state["run_id"]
    plain = yaml.safe_load((run / "config.yaml").read_text())
    assert config.to_dict(config.compose(given)) == plain
    again = config.read_yaml(run / "config.yaml")
    assert config.config_hash(again) == summary["config_hash"] and config.resolve(again) == again

    assert state["state"] == "completed" and state["error"] is None and state["step"] == 3 and state["attempt"] == 1
    metrics = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert [("eval/reward" in row, "eval/reward_greedy" in row) for row in metrics] == [
        (True, True), (False, False), (True, True), (True, True),
    ]  # fmt: skip
    names = {
        "train/reward", "train/loss", "train/grad_norm", "train/lr", "train/mis_kl", "train/mis_k3_kl", "train/mis_ess",
        "train/probe_mean_abs", "train/response_length", "train/policy_version", "time/step", "time/generate",
        "perf/tokens_per_second",
    }  # fmt: skip
    assert all(names <= row.keys() for row in metrics[1:])
    assert all(row["train/grad_norm"] > 0 and row["train/reward_std"] > 0 for row in metrics[1:])
    assert summary["state"] == "completed" and summary["steps"] == 3
    assert summary["objective"] == summary["eval_after"] == metrics[-1]["eval/reward"]
    rewards = [row["train/reward"] for row in metrics[1:]]
    assert summary["after"]["train/reward"] == pytest.approx(sum(rewards) / 3, rel=1e-12)

    environment = json.loads((run / "environment.json").read_text())
    assert len(environment["commit"]) == 40 and environment["packages"]["torch"].startswith("2.")
    assert environment["rollout"]["logprobs_mode"] == "processed_logprobs"
    assert environment["rollout"]["dtype"] == "float32"

    (recorded,) = read_rollouts(run)
    assert recorded.step == 2 and len(recorded.samples) == 16
    assert [p.name for p in (run / "rollouts").iterdir()] == ["step_00000002.parquet"]
    assert sum(recorded.rewards) / 16 == pytest.approx(metrics[2]["train/reward"], rel=1e-6)
    for sample, proximal in zip(recorded.samples, recorded.proximal_logps, strict=True):
        assert proximal is not None and sample.versions == (1,) * len(sample.ids)
        assert max(abs(a - b) for a, b in zip(sample.logps, proximal, strict=True)) < 1e-4

    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step_00000002", "step_00000003"]  # checkpoint.keep=2
    assert {path.name for path in (run / "checkpoints" / kept[0]).iterdir()} == {
        "manifest.json", "state.json", "model.safetensors", "optimizer.safetensors", "random.safetensors",
    }  # fmt: skip


@pytest.mark.slow
def test_overrides_yaml_gives_the_same_run_again(program: Program, tmp_path: Path) -> None:
    program.good(*RUN, "run_dir=a", "mis.tis_upper_bound=1.5", "level=geometric")
    given = yaml.safe_load((tmp_path / "a" / "overrides.yaml").read_text())
    program.good(*given, "run_dir=b")
    assert lines(tmp_path / "a") == lines(tmp_path / "b")


@pytest.mark.slow
def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not(program: Program, tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        program.good(*RUN, f"run_dir={name}", f"seed={seed}")
    assert lines(tmp_path / "a") == lines(tmp_path / "b") != lines(tmp_path / "c")


@pytest.mark.slow
def test_wandb_offline_leaves_no_secret_and_the_same_metrics(program: Program, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    program.good(*RUN, "run_dir=a")
    home = {"WANDB_MODE": "offline", "HOME": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path / "wc")}
    done = program.good(*RUN, "run_dir=b", "tracker=wandb", "tracker.tags=[x,y]", env=SECRETS | home)
    assert list((tmp_path / "b" / "wandb").rglob("*.wandb")), done.stderr
    check_harmless(tmp_path)
    assert lines(tmp_path / "a") == lines(tmp_path / "b") and status(tmp_path / "b")["state"] == "completed"
    assert len(rows(tmp_path / "b")) == 3
