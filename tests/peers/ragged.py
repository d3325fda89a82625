"""A ragged batch with garbage at masked tokens and an empty row, and its rows as plain lists of floats."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MASK = [[1, 1, 0, 1], [0, 1], [0, 0, 0], [1], [1, 1, 1, 1, 1]]
ADVANTAGE = [0.7, -1.3, 0.4, 0.0, -0.2]
REWARD = [1.0, 0.0, 1.0, 1.0, 0.0]


@dataclass(frozen=True)
class Ragged:
    current_N: Tensor
    proximal_N: Tensor
    rollout_N: Tensor
    reference_N: Tensor
    entropy_N: Tensor
    valid_N: Tensor
    row_N: Tensor
    length_B: Tensor
    advantage_B: Tensor
    reward_B: Tensor

    def rows(self, x_N: Tensor) -> list[list[float]]:
        """Each row's values at valid tokens."""
        return [x_N[(self.row_N == b) & self.valid_N].tolist() for b in range(len(self.length_B))]

    def of(self, *names: str) -> dict[str, Tensor]:
        """The tensors of these names, for a call, with the row layout."""
        layout = ("valid_N", "row_N", "length_B")
        return {name: vars(self)[name] for name in (*names, *layout)}


def ragged(seed: int = 0, apart: float = 0.4) -> Ragged:
    g = torch.Generator().manual_seed(seed)
    length_B = torch.tensor([len(row) for row in MASK])
    valid_N = torch.tensor([bool(m) for row in MASK for m in row])

    def near(x_N: Tensor, spread: float) -> Tensor:
        moved_N = x_N + spread * torch.randn(len(x_N), generator=g, dtype=torch.float64)
        return torch.where(valid_N, moved_N, math.nan)

    rollout_N = -2 * torch.rand(len(valid_N), generator=g, dtype=torch.float64)
    proximal_N = near(rollout_N, apart)
    current_N = near(proximal_N, apart)
    return Ragged(
        current_N=current_N,
        proximal_N=proximal_N,
        rollout_N=torch.where(valid_N, rollout_N, math.nan),
        reference_N=near(current_N, apart),
        entropy_N=torch.where(valid_N, torch.rand(len(valid_N), generator=g, dtype=torch.float64), math.nan),
        valid_N=valid_N,
        row_N=torch.repeat_interleave(torch.arange(len(MASK)), length_B),
        length_B=length_B,
        advantage_B=torch.tensor(ADVANTAGE, dtype=torch.float64),
        reward_B=torch.tensor(REWARD, dtype=torch.float64),
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
