"""Methods and random batches for the tests of this folder."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from composing import composed
from torch import Tensor

from trimtab.config import methods, recipes
from trimtab.method import (
    Inputs,
    recomputes,
)
from trimtab.spec import MethodSpec, RunSpec

ROWS = 12


@cache
def presets() -> dict[str, MethodSpec]:
    return methods(recipes(), RunSpec())


@cache
def made(*overrides: str) -> MethodSpec:
    spec = composed(*overrides)
    return MethodSpec(spec.algo, spec.mis, spec.loss)


def random_inputs(seed: int, gap: float = 0.4, moved: float = 0.3) -> Inputs:
    """Ragged rows with holes and an empty row; current, proximal and rollout all differ."""
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    length_B = torch.randint(1, 7, (ROWS,), generator=generator)
    length_B[4] = 0
    row_N = torch.repeat_interleave(torch.arange(ROWS), length_B)
    n = len(row_N)
    rollout_N = -normal(n).abs() - 0.2
    proximal_N = rollout_N + gap * normal(n)
    return Inputs(
        current_N=proximal_N + moved * normal(n), rollout_N=rollout_N, proximal_N=proximal_N, row_N=row_N,
        valid_N=torch.rand(n, generator=generator) > 0.1, length_B=length_B, advantage_B=normal(ROWS),
        reference_N=rollout_N + normal(n), entropy_N=normal(n).abs(), reward_B=normal(ROWS),
        group_B=torch.arange(ROWS) // 3, lag_N=torch.randint(0, 3, (n,), generator=generator),
    )  # fmt: skip


def as_seen(method: MethodSpec, inputs: Inputs) -> Inputs:
    return inputs if recomputes(method) else replace(inputs, proximal_N=None)
