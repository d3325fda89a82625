"""Levels: what one weight or one decision covers. L in a shape stands for M tokens or B rows, by the level."""

from __future__ import annotations

from torch import Tensor

from trimtab.correction.log_ratio import LogRatio
from trimtab.correction.rows import Rows
from trimtab.spec import Level


def level_log_ratio(given: LogRatio, level: Level) -> Tensor:
    """The log-ratio at ``level``, unclamped, in nats.

    token: d_t, [M], the inputs' dtype; sequence: Σ_t d_t, [B], float64; geometric: (1/T) Σ_t d_t, [B], float64.
    Sums are over the row's valid tokens; a missing one adds 0 and is one of the T. An empty row has 0.
    """
    match level:
        case Level.token:
            return given.log_ratio_M
        case Level.sequence:
            return given.sum_B
        case Level.geometric:
            return given.rows.per_token(given.sum_B)


def level_ratio(given: LogRatio, level: Level) -> Tensor:
    """exp of the level's log-ratio, unclamped (it may be inf), in the inputs' dtype.

    Bounds are compared with this number, the weight as the caller gets it: a ratio that rounds to a bound is inside.
    """
    match level:
        case Level.token:
            return given.ratio_M
        case Level.sequence | Level.geometric:
            return level_log_ratio(given, level).exp().to(given.log_ratio_M.dtype)


def row_range(rows: Rows, level: Level, x_L: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each row's tokens [B], of a number given per token or per row."""
    match level:
        case Level.token:
            return rows.lowest(x_L).double(), rows.highest(x_L).double()
        case Level.sequence | Level.geometric:
            return x_L.double(), x_L.double()
