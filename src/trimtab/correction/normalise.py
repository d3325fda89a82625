"""Batch normalising: divide the weights by their mean, so that bounding does not shrink the step."""

from __future__ import annotations

import torch

from trimtab.correction.weight import Weights
from trimtab.spec import Level
from trimtab.stat import Mean


def weight_mass(weights: Weights) -> Mean:
    """Sum and number of the bounded weights that their own bound keeps; the mean is the factor to divide by.

    Per token at token level, per non-empty row at the others; independent of rejection rules and veto.
    Parts of one batch (micro-batches, ranks) merge theirs and share the mean. Nothing kept: the factor is 1.
    """
    weight_L, keep_L = weights.bounded_L, weights.keep_L
    match weights.rule.level:
        case Level.token:
            if keep_L is None:
                return Mean(float(weights.bounded_B.sum()), weights.rows.tokens, empty=1.0)
        case Level.sequence | Level.geometric:
            keep_L = weights.rows.filled_B if keep_L is None else keep_L & weights.rows.filled_B
    kept = weight_L[keep_L]
    return Mean(float(kept.sum(dtype=torch.float64)), kept.numel(), empty=1.0)
