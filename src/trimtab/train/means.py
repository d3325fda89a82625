"""Means over tokens that add up exactly over micro-batches, updates and ranks."""

from __future__ import annotations

import torch
from torch import Tensor


class Means:
    """Sums and counts by name, in float64."""

    def __init__(self) -> None:
        self._sum: dict[str, float] = {}
        self._count: dict[str, float] = {}

    def add(self, name: str, value_N: Tensor, where_N: Tensor) -> None:
        """Add the values at ``where_N``; what stands elsewhere is not read."""
        total = torch.where(where_N, value_N.detach().double(), 0.0).sum()
        self.add_sum(name, float(total), float(where_N.sum()))

    def add_sum(self, name: str, total: float, count: float) -> None:
        """Add a sum of ``count`` values."""
        self._sum[name] = self._sum.get(name, 0.0) + total
        self._count[name] = self._count.get(name, 0.0) + count

    def as_dict(self) -> dict[str, float]:
        """The means; 0 where nothing was counted."""
        return {name: total / max(self._count[name], 1.0) for name, total in self._sum.items()}
