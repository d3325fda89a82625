"""Ragged rows laid flat: per-row sums and extremes, and the way back from rows to tokens.

Sums are taken row by row in float64 (never as differences of a running sum), so a row's result does
not depend on its neighbours. M stands for the tokens that take part, a subset of the batch's N.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 3 << 13
"""Tokens worked on at once: a few float64 arrays of this length fit the cache. With a row of 8,192 more it is still
within what torch does on one thread: waking a second one for each small operation costs far more on a busy machine."""


@dataclass(frozen=True)
class Rows:
    """B rows of ``count_B`` (int64) tokens each, M in total, one after the other."""

    count_B: Tensor

    @cached_property
    def filled_B(self) -> Tensor:
        """Whether the row has a token."""
        return self.count_B > 0

    @cached_property
    def filled(self) -> int:
        return int(self.filled_B.sum())

    @cached_property
    def tokens(self) -> int:
        return int(self.count_B.sum())

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Where each row that has a token starts."""
        starts: NDArray[np.int64] = (self.count_B.cumsum(0) - self.count_B)[self.filled_B].numpy()
        return starts

    @cached_property
    def blocks(self) -> list[tuple[slice, NDArray[np.int64]]]:
        """The tokens cut at rows into blocks of about BLOCK, each with its rows' starts counted from its own."""
        first = np.flatnonzero(np.diff(self._starts // BLOCK, prepend=0))
        edges = [0, *self._starts[first].tolist(), self.tokens]
        spans = np.split(self._starts, first)
        return [(slice(i, j), span - i) for (i, j), span in zip(pairwise(edges), spans, strict=True)]

    def sums(self, columns: Callable[[slice], Iterable[Tensor]]) -> list[Tensor]:
        """Σ over each row of several quantities, each float64 [B]; 0 for an empty row.

        ``columns`` gives the quantities (numbers or flags) of a slice of tokens; it is called block by block,
        so that what it computes on the way stays in the processor's cache instead of being [M] long; best a
        generator, so that each quantity is gone before the next is made.
        """
        with np.errstate(invalid="ignore"):  # inf - inf is a NaN that callers expect
            pieces = [[np.add.reduceat(x.double().numpy(), at) for x in columns(tokens)] for tokens, at in self.blocks]
        return [self._on_all_rows(np.concatenate(column), 0.0) for column in zip(*pieces, strict=True)]

    def sum(self, x_M: Tensor) -> Tensor:
        """Σ over each row of a number, or how many flags are set, float64 [B]; 0 for an empty row."""
        return self.sums(lambda at: [x_M[at]])[0]

    def lowest(self, x_M: Tensor) -> Tensor:
        """Smallest value of each row [B]; +inf for an empty row."""
        return self._on_all_rows(np.minimum.reduceat(x_M.numpy(), self._starts), np.inf)

    def highest(self, x_M: Tensor) -> Tensor:
        """Largest value of each row [B]; -inf for an empty row."""
        return self._on_all_rows(np.maximum.reduceat(x_M.numpy(), self._starts), -np.inf)

    def spread(self, x_B: Tensor) -> Tensor:
        """The row's value at each of its tokens [M]."""
        return torch.from_numpy(np.repeat(x_B.numpy(), self.count_B.numpy()))

    def per_token(self, sum_B: Tensor) -> Tensor:
        """Row sums divided by the row's tokens; 0 for an empty row."""
        return sum_B / self.count_B.clamp(min=1)

    def _on_all_rows(self, filled: NDArray[Any], empty: float) -> Tensor:
        # reduceat would give an empty row its neighbour's first value, so it never sees one
        out = torch.full(self.count_B.shape, empty, dtype=torch.from_numpy(filled).dtype)
        out[self.filled_B] = torch.from_numpy(filled)
        return out
