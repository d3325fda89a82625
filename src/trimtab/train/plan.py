"""How a batch is cut, and which correction a spec asks for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trimtab.batch import Batch
from trimtab.correction import RejectRule, WeightRule
from trimtab.spec import MisSpec, TisMode


@dataclass(frozen=True)
class Rules:
    """The correction as the pure functions take it."""

    weight: WeightRule | None
    reject: tuple[RejectRule, ...]
    veto: float | None


def rules_of(mis: MisSpec) -> Rules:
    """Rules of a resolved ``mis`` section (bounds filled in by config/resolve.py)."""
    weight = None
    if mis.tis_mode is not TisMode.off:
        weight = WeightRule(
            level=mis.tis_level,
            mode=mis.tis_mode,
            lower=mis.tis_lower_bound,
            upper=mis.tis_upper_bound,
            batch_normalize=mis.tis_batch_normalize,
        )
    reject: tuple[RejectRule, ...] = ()
    if mis.use_rs and mis.rs_lower_bound is not None and mis.rs_upper_bound is not None:
        reject = (RejectRule(level=mis.rs_level, lower=mis.rs_lower_bound, upper=mis.rs_upper_bound),)
    return Rules(weight, reject, mis.rs_veto_threshold)


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
