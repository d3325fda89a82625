"""The valid tokens of rows laid flat: sums, extremes, and the way back from rows to tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trimtab.errors import DataError

TINY = 1e-8
"""What several systems add to a count to divide by it: a mean of nothing is 0, and every other one a little small."""


@dataclass(frozen=True)
class ValidTokens:
    """Which of N tokens count and which of B rows each belongs to; what stands at the others is never looked at.

    Sums are taken in the dtype of what is summed, row by row, as the systems do: where they lose digits (a variance as
    a difference of two means) or overflow, so does a metric that is to equal theirs.
    """

    valid_N: Tensor
    row_N: Tensor
    length_B: Tensor

    def __post_init__(self) -> None:
        tokens = int(self.length_B.sum())
        if self.valid_N.shape != (tokens,) or self.row_N.shape != (tokens,):
            raise DataError(
                f"valid_N has shape {tuple(self.valid_N.shape)} and row_N {tuple(self.row_N.shape)}; "
                f"length_B adds up to {tokens} flat tokens"
            )

    @cached_property
    def count_B(self) -> Tensor:
        """Valid tokens of each row, int64."""
        return torch.zeros_like(self.length_B).index_add_(0, self.row_N, self.valid_N.to(self.length_B.dtype))

    @cached_property
    def filled_B(self) -> Tensor:
        """Whether the row has a valid token."""
        return self.count_B > 0

    @cached_property
    def count(self) -> int:
        return int(self.count_B.sum())

    def pick(self, x_N: Tensor) -> Tensor:
        """The values at valid tokens."""
        return x_N[self.valid_N]

    def sum_rows(self, x_N: Tensor) -> Tensor:
        """Sum over each row [B]; 0 for an empty row."""
        rows = torch.split(x_N.where(self.valid_N, 0.0), self.length_B.tolist())
        return torch.stack([row.sum() for row in rows]) if rows else x_N.new_zeros(0)

    def sum(self, x_N: Tensor) -> Tensor:
        """Sum over all valid tokens, a scalar."""
        return x_N.where(self.valid_N, 0.0).sum()

    def mean(self, x_N: Tensor) -> Tensor:
        """Sum over all valid tokens / (count + TINY), a scalar."""
        return self.sum(x_N) / (torch.tensor(self.count, dtype=x_N.dtype) + TINY)

    def mean_rows(self, x_N: Tensor) -> Tensor:
        """Sum over each row / (count + TINY) [B]."""
        return self.sum_rows(x_N) / (self.count_B.to(x_N.dtype) + TINY)

    def mean_rows_exact(self, x_N: Tensor) -> Tensor:
        """Sum over each row / count [B]; 0 for an empty row."""
        return self.sum_rows(x_N) / self.count_B.clamp(min=1).to(x_N.dtype)

    def any_rows(self, flag_N: Tensor) -> Tensor:
        """Whether any valid token of the row has the flag [B]."""
        return self.sum_rows(flag_N.double()) > 0

    def highest(self, x_N: Tensor, empty: float) -> Tensor:
        """Largest value of each row [B]; ``empty`` for an empty row."""
        return self._extreme(x_N, "amax", empty)

    def lowest(self, x_N: Tensor, empty: float) -> Tensor:
        """Smallest value of each row [B]; ``empty`` for an empty row."""
        return self._extreme(x_N, "amin", empty)

    def spread(self, x_B: Tensor) -> Tensor:
        """The row's value at each of its tokens [N]."""
        return x_B[self.row_N]

    def _extreme(self, x_N: Tensor, kind: str, empty: float) -> Tensor:
        out_B = torch.full(self.length_B.shape, empty, dtype=x_N.dtype)
        return out_B.scatter_reduce_(0, self.row_N[self.valid_N], self.pick(x_N), kind, include_self=False)
