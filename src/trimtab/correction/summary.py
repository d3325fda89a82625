"""A correction in five numbers, for methods that are compared on one batch without being applied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.correction.correct import Correction
from trimtab.correction.kept import row_sums
from trimtab.correction.weight import Weights
from trimtab.spec import Level
from trimtab.stat import Mean, Spread


def summarise(correction: Correction) -> dict[str, float]:
    """The first three are ``measure``'s, without its passes over the tokens.

    mis_kept_token_fraction, mis_kept_seq_fraction, mis_ess; mis_saturated_fraction: share of valid tokens whose weight
    a bound, a zero or the clamp has changed; mis_weight_mean: over kept tokens, normalised (0 if none is kept).
    """
    return summarise_all([correction])[0]


def summarise_all(corrections: Sequence[Correction]) -> list[dict[str, float]]:
    """``summarise`` of each of several corrections of one batch, in fewer and larger operations."""
    if not corrections:
        return []
    keep_KB = np.stack([correction.keep.row_B.numpy() for correction in corrections])
    sums_K3B = np.stack([[x_B.numpy() for x_B in row_sums(correction)] for correction in corrections])
    sums_K3B = np.where(keep_KB[:, None], sums_K3B, 0.0)
    rows_K, totals_K = np.count_nonzero(sums_K3B[:, 0], axis=1).tolist(), sums_K3B.sum(2).tolist()
    found = []
    for correction, kept_rows, (kept, total, squares) in zip(corrections, rows_K, totals_K, strict=True):
        rows = correction.given.rows
        found.append({
            "mis_kept_token_fraction": Mean(kept, rows.tokens).value,
            "mis_kept_seq_fraction": Mean(kept_rows, rows.filled).value,
            "mis_ess": Spread(total, squares, rows.tokens).value,
            "mis_saturated_fraction": Mean(_saturated(correction.weights), rows.tokens).value,
            "mis_weight_mean": Mean(total, kept).value / correction.factor,
        })  # fmt: skip
    return found


def _saturated(weights: Weights | None) -> int:
    altered_L = None if weights is None else weights.altered_L
    if weights is None or altered_L is None:
        return 0
    return int((altered_L if weights.rule.level is Level.token else weights.given.rows.count_B[altered_L]).sum())
