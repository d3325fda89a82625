"""What is left of a batch: tokens, rows and weights that count in the loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trimtab.correction.correct import Correction
from trimtab.correction.log_ratio import moments
from trimtab.correction.rows import Rows
from trimtab.spec import Level
from trimtab.stat import Mean


@dataclass(frozen=True)
class Kept:
    """Row sums, float64: kept tokens, their bounded weights, and the squares of these.

    Weights are taken before normalising: a common factor cancels in the effective sample size.
    """

    tokens_B: Tensor
    sum_B: Tensor
    squares_B: Tensor


def kept_sums(correction: Correction) -> Kept:
    """One pass over the tokens at most."""
    return Kept(*(x_B.where(correction.keep.row_B, 0.0) for x_B in row_sums(correction)))


def row_sums(correction: Correction) -> tuple[Tensor, Tensor, Tensor]:
    """As ``kept_sums``, but what stands at rejected rows means nothing."""
    rows, weights, token_M = correction.given.rows, correction.weights, correction.keep.token_M
    tokens_B = rows.count_B.double() if token_M is None else rows.sum(token_M)
    if weights is None:
        sum_B, squares_B = tokens_B, tokens_B
    elif weights.rule.level is not Level.token:
        w_B = weights.summable_L.double()
        sum_B, squares_B = w_B * tokens_B, w_B**2 * tokens_B
    elif token_M is None:
        sum_B, squares_B = weights.moments_B
    else:
        sum_B, squares_B = moments(rows, weights.summable_L.where(token_M, 0.0))
    return tokens_B, sum_B, squares_B


def kept_shares(rows: Rows, kept: Kept) -> dict[str, Mean]:
    """Share of valid tokens, and of the rows that have any, which stay."""
    return {
        "mis_kept_token_fraction": Mean(float(kept.tokens_B.sum()), rows.tokens),
        "mis_kept_seq_fraction": Mean(int((kept.tokens_B > 0).sum()), rows.filled),
    }
