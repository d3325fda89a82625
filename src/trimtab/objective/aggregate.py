"""Denominators: one coefficient per token, from counts of the whole (global) batch.

The loss is always sum_N coefficient_N * loss_N, so it does not depend on how the batch is cut into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.errors import DataError
from trimtab.spec import Aggregate


@dataclass(frozen=True)
class Counts:
    """Sums over the global batch, to be added over ranks: counted tokens, rows with at least one of them."""

    tokens: int
    rows: int


def count(counted_N: Tensor, row_N: Tensor, rows: int) -> tuple[Tensor, Counts]:
    """Counted tokens per row (float64, shape B) and the totals."""
    per_row_B = torch.bincount(row_N[counted_N], minlength=rows).double()
    return per_row_B, Counts(int(counted_N.sum()), int((per_row_B > 0).sum()))


def coefficients(
    counted_N: Tensor,
    row_N: Tensor,
    rows: int,
    *,
    aggregate: Aggregate,
    constant: float,
    totals: Counts | None = None,
    group_B: Tensor | None = None,
) -> Tensor:
    """Coefficient of each token's loss, float64, 0 where not counted.

    token_mean: 1 / tokens. sequence_mean: 1 / (rows * tokens of the row). sequence_sum: 1 / (rows * constant).
    group_mean: 1 / (rows * mean tokens of a row of the group), so that a token weighs the same in all responses to a
    prompt, and a prompt as much as its number of responses; a group must be whole within the call.
    ``counted_N`` says which tokens stand in the denominator: all valid ones, or the kept ones. Rows without a counted
    token do not count. ``totals`` are the global counts where the batch is one rank's share; empty: of this batch.
    Source: arXiv:2503.14476 (token mean), arXiv:2402.03300 (sequence mean), arXiv:2503.20783 (constant), PipelineRL's
    group_normalization (group mean). Raises DataError for group_mean without ``group_B``, the prompt of each row.
    """
    per_row_B, local = count(counted_N, row_N, rows)
    total = totals if totals is not None else local
    row_B = row_coefficients(per_row_B, total, aggregate=aggregate, constant=constant, group_B=group_B)
    return torch.where(counted_N, row_B[row_N], 0.0)


def row_coefficients(
    per_row_B: Tensor, total: Counts, *, aggregate: Aggregate, constant: float, group_B: Tensor | None = None
) -> Tensor:
    """The coefficient of each row's counted tokens, float64 [B]; ``per_row_B``: how many they are. See above."""
    match aggregate:
        case Aggregate.token_mean:
            return torch.full_like(per_row_B, 1.0 / max(total.tokens, 1))
        case Aggregate.sequence_mean:
            return 1.0 / (per_row_B.clamp(min=1.0) * max(total.rows, 1))
        case Aggregate.sequence_sum:
            return torch.full_like(per_row_B, 1.0 / (constant * max(total.rows, 1)))
        case Aggregate.group_mean:
            return 1.0 / (_group_tokens(per_row_B, group_B) * max(total.rows, 1))


def _group_tokens(per_row_B: Tensor, group_B: Tensor | None) -> Tensor:
    """Mean counted tokens of the rows of each row's group that have any, float64 [B]; 1 where none has."""
    if group_B is None:
        raise DataError("loss.aggregate=group_mean needs the prompt of each row (group_B), which is missing")
    number, group = torch.unique(group_B, return_inverse=True)
    zeros = torch.zeros(len(number), dtype=torch.float64)
    tokens = zeros.index_add(0, group, per_row_B)
    filled = zeros.index_add(0, group, (per_row_B > 0).double())
    return (tokens / filled.clamp(min=1.0)).clamp(min=1.0)[group]
