"""Rows of flat tokens, reduced in the inputs' own precision, as the peers' dashboards do it."""

from __future__ import annotations

import torch
from torch import Tensor


def only(x_N: Tensor, where_N: Tensor) -> Tensor:
    """The values at ``where_N`` and 0 elsewhere, detached; what stands elsewhere (NaN, inf) is never computed with."""
    return torch.where(where_N, x_N.detach(), torch.zeros((), dtype=x_N.dtype))


def row_count(where_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Tokens of each row at ``where_N``, int64 [B]."""
    return torch.bincount(row_N[where_N], minlength=rows)


def row_sum(x_N: Tensor, where_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Sum of each row's values at ``where_N``, [B] in x's dtype; 0 for a row without any."""
    x_M = x_N.detach()[where_N]
    return torch.zeros(rows, dtype=x_N.dtype).index_add(0, row_N[where_N], x_M)


def row_mean(x_N: Tensor, where_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Mean of each row's values at ``where_N``, [B]; 0 for a row without any."""
    return row_sum(x_N, where_N, row_N, rows) / row_count(where_N, row_N, rows).clamp(min=1)


def row_share(flag_N: Tensor, where_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Share of each row's tokens at ``where_N`` that are flagged, [B], one division of counts in float32."""
    flagged_B = row_count(flag_N & where_N, row_N, rows)
    return flagged_B.float() / row_count(where_N, row_N, rows).clamp(min=1).float()


def row_extremes(x_N: Tensor, where_N: Tensor, row_N: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each row's values at ``where_N``, [B]; +inf and -inf for a row without any."""
    x_M, at_M = x_N.detach()[where_N], row_N[where_N]
    low_B = torch.full((rows,), torch.inf, dtype=x_N.dtype).scatter_reduce(0, at_M, x_M, "amin")
    high_B = torch.full((rows,), -torch.inf, dtype=x_N.dtype).scatter_reduce(0, at_M, x_M, "amax")
    return low_B, high_B
