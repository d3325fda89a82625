"""How a batch is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from trimtab.batch import Batch


def minibatches(rows: Sequence[int], parts: int, seed: int) -> list[list[int]]:
    """Cut ``rows`` into ``parts`` of equal size; shuffled when there is more than one part."""
    order = list(rows)
    if parts > 1:
        random.Random(seed).shuffle(order)
    size = -(-len(order) // parts)
    return [order[i : i + size] for i in range(0, len(order), size)]


def microbatches(batch: Batch, rows: Sequence[int], token_budget: int) -> list[list[int]]:
    """Cut ``rows`` so that each cut's padded size (rows x longest) stays within the budget; a longer row stands alone.

    Rows are sorted by length only when one cut isn't enough, since sorting saves padding.
    """
    size = {row: int(batch.ids_B[row].numel()) for row in rows}
    if not rows or len(rows) * max(size.values()) <= token_budget:
        return [list(rows)] if rows else []
    cuts: list[list[int]] = []
    longest = 0
    for row in sorted(rows, key=lambda r: (size[r], r)):
        longest = max(longest, size[row])
        if not cuts or (len(cuts[-1]) + 1) * longest > token_budget:
            cuts.append([])
            longest = size[row]
        cuts[-1].append(row)
    return cuts


def rows_with(valid_N: Tensor, batch: Batch) -> list[int]:
    """Rows that hold at least one valid token."""
    return [int(r) for r in batch.row_N[valid_N].unique()]
