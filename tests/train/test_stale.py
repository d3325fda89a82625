"""``mismatch=stale`` in the loop: a run that is killed and resumed equals one that never was, and tells its lag."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy import ToyRollout, toy_spec
from train.test_loop import Killed, KilledAt, lines, parts, run

from trimtab.rollout.inject import Injected
from trimtab.spec import Mismatch, MismatchSpec
from trimtab.train import checkpoint

STALE = MismatchSpec(Mismatch.stale, 2)


@pytest.mark.parametrize("call", [5, 6, 7, 9])
def test_killed_and_resumed_equals_never_killed(tmp_path: Path, call: int) -> None:
    spec = toy_spec("rollout=transformers", "mismatch=stale", "mismatch.strength=2")
    run(parts(Injected(ToyRollout(0.1), STALE)), spec, tmp_path / "whole")
    with pytest.raises(Killed):
        run(parts(Injected(KilledAt(call), STALE)), spec, tmp_path / "killed")
    run(parts(Injected(ToyRollout(0.1), STALE)), spec, tmp_path / "killed", resume=True)
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    ages = [row["train/lag"] for row in lines(tmp_path / "whole") if row["step"]]
    assert ages == [0, 1, 2, 0, 1, 2, 0, 1]  # the step's version, minus that of the weights that sampled it


def test_only_engines_with_a_state_have_a_file_of_it(tmp_path: Path) -> None:
    run(parts(), toy_spec(steps=3), tmp_path / "plain")
    assert not list((tmp_path / "plain").rglob("engine.safetensors"))
    run(parts(Injected(ToyRollout(0.1), STALE)), toy_spec(steps=3), tmp_path / "stale")
    path = tmp_path / "stale" / "checkpoints" / "step_00000003"
    assert (path / "engine.safetensors").exists() and int(checkpoint.load(path).engine["version"]) == 3
    (path / "engine.safetensors").write_bytes(b"cut")
    assert "engine.safetensors" in str(checkpoint.fault(path))
