"""Rollout from a recording: the samples of an earlier run, step by step, with their own prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.batch import Prompt, Sample, Sampling
from trimtab.errors import DataError
from trimtab.recording import RecordedStep, read_rollouts


class ReplayEngine:
    """Gives back recorded rollouts; its samples carry the recorded prompts, whatever prompts it was asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps = read_rollouts(path)

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return len(self._steps)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        """The n-th recorded step's samples for training step n; DataError when there is none or its shape differs."""
        if not 1 <= sampling.step <= len(self._steps):
            raise DataError(
                f"{self._path} holds {len(self._steps)} recorded steps and step {sampling.step} was asked for; "
                f"set steps={len(self._steps)} or record more (rollout.record_every=1)"
            )
        recorded = self._steps[sampling.step - 1]
        _check_shape(recorded, len(prompts), sampling)
        return list(recorded.samples)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Nothing to load: the rollout policy is in the past."""

    def score(self, rows: Sequence[Sequence[int]]) -> None:
        """A recording cannot score."""
        return None

    def describe(self) -> dict[str, Any]:
        """Where the samples come from."""
        return {
            "engine": "replay",
            "path": str(self._path),
            "recorded_steps": len(self._steps),
            "temperature": self._steps[0].temperature,
        }

    def close(self) -> None:
        """Forget the recording."""
        self._steps = []


def _check_shape(recorded: RecordedStep, prompts: int, sampling: Sampling) -> None:
    group, samples = sampling.samples_per_prompt, recorded.samples
    sizes = sorted({recorded.groups.count(g) for g in set(recorded.groups)})
    if len(samples) != prompts * group or sizes != [group]:
        raise DataError(
            f"recorded step {recorded.step} holds {len(samples)} responses in groups of {sizes}; asked for were "
            f"{prompts * group} in groups of {group}: set rollout.batch_size={len(samples)} "
            f"rollout.group_size={sizes[0] if len(sizes) == 1 else sizes}"
        )
    if any(len(set(recorded.groups[i : i + group])) != 1 for i in range(0, len(samples), group)):
        raise DataError(f"recorded step {recorded.step}: the responses of a group do not follow one another")
    if recorded.temperature != sampling.temperature:
        raise DataError(
            f"recorded step {recorded.step} was sampled at temperature {recorded.temperature}, and the trainer would "
            f"score it at {sampling.temperature}: set rollout.temperature={recorded.temperature}"
        )
