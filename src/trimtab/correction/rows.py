"""Ragged rows laid flat: per-row sums and extremes, and the way back from rows to tokens.

Sums are taken row by row in float64 (never as differences of a running sum), so a row's result does
not depend on its neighbours. M stands for the tokens that take part, a subset of the batch's N.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Callable, Iterable, Sequence, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 3 << 14
"""Tokens worked on at once: a few float64 arrays of this length fit the cache."""

WORKERS, SHARE = 4, 4
"""Most threads at a time, and fewest blocks that are worth one: starting a thread costs about as much as a block."""

Array = NDArray[Any]
T = TypeVar("T")
R = TypeVar("R")


def _each(work: Callable[[T], R], blocks: Sequence[T], heavy: bool) -> list[R]:
    """``work`` of each block, in order; if it is heavy, on several threads: numpy computes without Python's lock."""
    workers = min(torch.get_num_threads(), WORKERS, len(blocks) // SHARE)
    if workers < 2 or not heavy:
        return [work(block) for block in blocks]
    edges = [len(blocks) * i // workers for i in range(workers + 1)]
    with ThreadPoolExecutor(workers) as pool:
        shares = pool.map(lambda edge: [work(block) for block in blocks[slice(*edge)]], pairwise(edges))
        return list(chain.from_iterable(shares))


def room(x: Tensor) -> Tensor:
    """Memory for a result like x. From numpy, which asks for huge pages where torch doesn't: faulting small ones in
    takes longer than the arithmetic on them."""
    return torch.from_numpy(np.empty_like(x.numpy()))


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

    def sums(self, columns: Callable[[slice], Iterable[Array]], *, heavy: bool = False) -> list[Tensor]:
        """Σ over each row of several quantities, each float64 [B]; 0 for an empty row.

        ``columns`` gives the quantities (numbers or flags) of a slice of tokens; it is called block by block,
        so that what it computes on the way stays in the processor's cache instead of being [M] long. Each quantity
        is summed before the next is asked for, so a generator may reuse its memory. ``heavy``: they take much longer
        to compute than to sum, which is when threads pay.
        """

        def block(at: tuple[slice, NDArray[np.int64]]) -> Array:
            with np.errstate(invalid="ignore"):  # inf - inf is a NaN that callers expect
                return np.stack([np.add.reduceat(x.astype(np.float64, copy=False), at[1]) for x in columns(at[0])])

        if len(self.blocks) == 1:  # a small batch, where each call counts
            with np.errstate(invalid="ignore"):
                whole = columns(self.blocks[0][0])
                found = [np.add.reduceat(x.astype(np.float64, copy=False), self._starts) for x in whole]
            return [self._on_all_rows(sum_B, 0.0) for sum_B in found]
        return list(self._on_all_rows(np.concatenate(_each(block, self.blocks, heavy), axis=1), 0.0))

    def sum(self, x_M: Tensor) -> Tensor:
        """Σ over each row of a number, or how many flags are set, float64 [B]; 0 for an empty row."""
        x = x_M.numpy()
        return self.sums(lambda at: [x[at]])[0]

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
        return sum_B / self._divisor_B

    @cached_property
    def _divisor_B(self) -> Tensor:
        return self.count_B.clamp(min=1).double()

    def _on_all_rows(self, filled: Array, empty: float) -> Tensor:
        # reduceat would give an empty row its neighbour's first value, so it never sees one
        if self.filled == len(self.count_B):
            return torch.from_numpy(filled)
        out = np.full((*filled.shape[:-1], len(self.count_B)), empty, dtype=filled.dtype)
        out[..., self.filled_B.numpy()] = filled
        return torch.from_numpy(out)
