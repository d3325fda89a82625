"""Checkpoints: round trip, damage, kills in the middle of writing."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from trimtab.errors import CheckpointError
from trimtab.train import checkpoint


def snapshot(step: int) -> checkpoint.Snapshot:
    weight = torch.full((3, 2), float(step), requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    return checkpoint.Snapshot(
        step, {"w": weight, "tied": weight}, optimizer.state_dict(), {"note": "ü"}, checkpoint.random_state()
    )


def test_round_trip_restores_tensors_optimiser_meta_and_every_random_state(tmp_path: Path) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    torch.randn(5), np.random.randn(3), random.gauss(0, 1)
    wrote = snapshot(4)
    drawn = (random.random(), random.gauss(0, 1), np.random.randn(4).tolist(), torch.randn(4).tolist())
    path = checkpoint.save(tmp_path, wrote, keep=2)
    read = checkpoint.load(path)
    assert read.step == 4 and read.meta == {"note": "ü"}
    assert torch.equal(read.model["w"], wrote.model["w"]) and torch.equal(read.model["tied"], wrote.model["tied"])
    slot, other = read.optimizer["state"][0], wrote.optimizer["state"][0]
    assert all(torch.equal(slot[k], other[k]) for k in ("step", "exp_avg", "exp_avg_sq"))
    assert read.optimizer["param_groups"][0]["params"] == [0]
    checkpoint.set_random_state(read.randomness)
    assert (random.random(), random.gauss(0, 1), np.random.randn(4).tolist(), torch.randn(4).tolist()) == drawn


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, snapshot(step), keep=2)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step_00000004", "step_00000003"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_checkpoint_is_passed_over_aloud(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, snapshot(step), keep=2)
    victim = tmp_path / "step_00000002" / name
    content = victim.read_bytes()
    match damage:
        case "cut":
            victim.write_bytes(content[: len(content) // 2])
        case "flip":
            middle = len(content) // 2
            victim.write_bytes(content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :])
        case "gone":
            victim.unlink()
    with caplog.at_level(logging.WARNING):
        found = checkpoint.load_last(tmp_path)
    assert found is not None and found.step == 1
    assert "step_00000002 is damaged" in caplog.text
    with pytest.raises(CheckpointError, match="step_00000002"):
        checkpoint.load(tmp_path / "step_00000002")


def test_when_all_are_damaged_the_run_does_not_silently_start_anew(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, snapshot(1), keep=2)
    (tmp_path / "step_00000001" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="every checkpoint"):
        checkpoint.load_last(tmp_path)
    assert checkpoint.load_last(tmp_path / "none") is None


def test_a_kill_while_writing_leaves_the_one_before(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, snapshot(1), keep=2)
    half = tmp_path / ".step_00000002.999"
    half.mkdir()
    shutil.copy(tmp_path / "step_00000001" / "model.safetensors", half)
    found = checkpoint.load_last(tmp_path)
    assert found is not None and found.step == 1
    checkpoint.save(tmp_path, snapshot(2), keep=2)
    assert not half.exists()


def test_no_pickle_stands_in_a_checkpoint(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, snapshot(1), keep=2)
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json"}
