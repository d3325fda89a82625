"""``--weights``: a bench that starts from what a run has trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trimtab.cli import main
from trimtab.errors import CheckpointError, ConfigError, ModelError
from trimtab.lab.bench import compose_to_measure, opened
from trimtab.train import checkpoint

SMALL = ("rollout=transformers", "policy.warmup_accuracy=0", "rollout.batch_size=16", "rollout.max_tokens=4")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def overrides(place: Path) -> list[str]:
    return [*SMALL, f"policy.cache_dir={place / 'cache'}"]


@pytest.fixture(scope="module")
def trained(place: Path, overrides: list[str]) -> Path:
    """A run's folder with two checkpoints, whose weights are 1.1 and 1.2 times those that runs begin with."""
    with opened(compose_to_measure(overrides)) as bench:
        state = bench.policy.state()
        for step in (1, 2):
            model = {name: tensor * (1 + step / 10) for name, tensor in state.items()}
            empty = {"state": {}, "param_groups": []}
            checkpoint.save(
                place / "run" / "checkpoints",
                checkpoint.Snapshot(step, model, empty, {}, checkpoint.random_state()),
                keep=2,
            )
    return place / "run"


def test_both_sides_start_from_the_newest_checkpoint(trained: Path, overrides: list[str]) -> None:
    spec = compose_to_measure(overrides)
    row = [1, 2, 3, 4, 5, 6]
    for weights, step in ((trained, 2), (trained / "checkpoints" / "step_00000001", 1)):
        saved = checkpoint.load(trained / "checkpoints" / f"step_{step:08d}").model
        with opened(spec, weights) as bench:
            assert all(torch.equal(tensor, saved[name]) for name, tensor in bench.policy.state().items())
            first = bench.engine.score([row])
            bench.hand_over()  # changes nothing: the engine began with the same weights
            assert bench.engine.score([row]) == first
    with opened(spec) as bench:
        assert bench.engine.score([row]) != first


def test_what_is_no_such_run_is_refused(trained: Path, overrides: list[str], tmp_path: Path) -> None:
    spec = compose_to_measure(overrides)
    with pytest.raises(ConfigError, match="holds no checkpoint"), opened(spec, tmp_path):
        pass
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="damaged"), opened(spec, tmp_path):
        pass
    other = compose_to_measure([*overrides, "policy.dtype=bfloat16"])
    with pytest.raises(ModelError, match="not of this model"), opened(other, trained):
        pass


def test_the_commands_take_it(trained: Path, overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", *overrides, "--responses", "4", "--json", "--weights", str(trained)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["probe", *overrides, "--responses", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["worst"] != told["worst"]
    assert main(["parity", *overrides, "--weights", str(trained / "none")]) == 1
