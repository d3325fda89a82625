"""A correction in five numbers, for methods that are compared on one batch without being applied."""

from __future__ import annotations

from trimtab.correction.correct import Correction
from trimtab.correction.kept import kept_shares, kept_sums
from trimtab.correction.weight import Weights
from trimtab.spec import Level
from trimtab.stat import Mean, Spread


def summarise(correction: Correction) -> dict[str, float]:
    """The first three are ``measure``'s, without its passes over the tokens.

    mis_kept_token_fraction, mis_kept_seq_fraction, mis_ess; mis_saturated_fraction: share of valid tokens whose weight
    a bound, a zero or the clamp has changed; mis_weight_mean: over kept tokens, normalised (0 if none is kept).
    """
    rows, kept = correction.given.rows, kept_sums(correction)
    tokens, total = float(kept.tokens_B.sum()), float(kept.sum_B.sum())
    return {
        **{name: mean.value for name, mean in kept_shares(rows, kept).items()},
        "mis_ess": Spread(total, float(kept.squares_B.sum()), rows.tokens).value,
        "mis_saturated_fraction": Mean(_saturated(correction.weights), rows.tokens).value,
        "mis_weight_mean": Mean(total, tokens).value / correction.factor,
    }


def _saturated(weights: Weights | None) -> int:
    altered_L = None if weights is None else weights.altered_L
    if weights is None or altered_L is None:
        return 0
    return int((altered_L if weights.rule.level is Level.token else weights.given.rows.count_B[altered_L]).sum())
