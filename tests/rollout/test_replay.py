"""Replay: recorded samples with their own prompts, in order, resumable, and only in the recorded shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rollout.tiny import prompt_of

from trimtab.batch import Prompt, Sampling
from trimtab.errors import DataError
from trimtab.recording import write_rollouts
from trimtab.rollout.replay import ReplayEngine
from trimtab.rollout.transformers import TransformersEngine
from trimtab.spec import RolloutSpec

SAMPLING = Sampling(max_tokens=4, temperature=0.7, stop_ids=(1,), seed=0, samples_per_prompt=3)
OTHER = [prompt_of(2, 2), prompt_of(3, 3)]


@pytest.fixture
def recorded(folder: Path, prompts: list[Prompt], tmp_path: Path) -> tuple[Path, list]:
    engine, steps = TransformersEngine(folder, RolloutSpec()), []
    for step in range(3):
        chosen = prompts[step : step + 2]
        samples = engine.generate(chosen, Sampling(4, 0.7, (1,), step, 3))
        groups = [i // 3 for i in range(6)]
        path = tmp_path / "rollouts" / f"step_{step:06d}.parquet"
        write_rollouts(path, step, samples, [1.0] * 6, [0.0] * 6, None, groups, ["t"] * 6, 0.7)
        steps.append(samples)
    return tmp_path, steps


def test_steps_come_back_in_order_with_their_own_prompts(recorded: tuple[Path, list]) -> None:
    path, steps = recorded
    replay = ReplayEngine(path)
    assert replay.steps == 3
    assert [replay.generate(OTHER, replace(SAMPLING, step=step)) for step in (1, 2, 3)] == steps
    with pytest.raises(DataError, match="holds 3 recorded steps and step 4 was asked for; set steps=3"):
        replay.generate(OTHER, replace(SAMPLING, step=4))
    replay.load([], 7)
    assert replay.score([(1, 2)]) is None
    assert replay.describe()["recorded_steps"] == 3
    replay.close()


@pytest.mark.parametrize(
    ("asked", "temperature", "count", "message"),
    [
        (1, 0.7, 3, "rollout.batch_size=6 rollout.group_size=3"),
        (3, 0.7, 2, "rollout.batch_size=6 rollout.group_size=3"),
        (2, 1.0, 3, "rollout.temperature=0.7"),
    ],
)
def test_another_shape_is_refused(
    recorded: tuple[Path, list], asked: int, temperature: float, count: int, message: str
) -> None:
    replay = ReplayEngine(recorded[0])
    with pytest.raises(DataError, match=message.replace(".", r"\.")):
        replay.generate((OTHER * 2)[:asked], Sampling(4, temperature, (1,), 0, count))
    assert replay.generate(OTHER, SAMPLING) == recorded[1][0]
