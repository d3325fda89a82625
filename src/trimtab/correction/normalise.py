"""Batch normalising: divide the weights by their mean, so that bounding does not shrink the step."""

from __future__ import annotations

import torch

from trimtab.correction.weight import Weights
from trimtab.spec import Level
from trimtab.stat import Mean

SMALLEST = 1e-8
"""A mean weight up to here divides nothing: the batch holds no sample of the numerator, and 1/mean would blow it up."""


def divisor(mean: float) -> float:
    """What to divide the weights by, given their mean."""
    return mean if mean > SMALLEST else 1.0


def weight_mass(weights: Weights) -> Mean:
    """Sum and number of the bounded weights that their own bound keeps; the mean is the factor to divide by.

    Per token at token level, per non-empty row at the others; independent of rejection rules and veto. Weights that
    mode zero made 0 are among them. Parts of one batch (micro-batches, ranks) merge theirs and share the mean.
    Nothing kept: the factor is 1.
    """
    rows, keep_L = weights.given.rows, weights.keep_L
    match weights.rule.level:
        case Level.token:
            if keep_L is None:
                return Mean(float(weights.bounded_B.sum()), rows.tokens, empty=1.0)
        case Level.sequence | Level.geometric:
            keep_L = rows.filled_B if keep_L is None else keep_L & rows.filled_B
    kept_L = weights.summable_L.where(keep_L, 0.0)
    return Mean(float(kept_L.sum(dtype=torch.float64)), int(keep_L.count_nonzero()), empty=1.0)
