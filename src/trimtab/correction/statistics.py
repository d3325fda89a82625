"""What a correction did, and how far the policies were apart, as statistics that merge exactly over whole rows.

Two populations (docs/metrics.md): mismatch metrics leave out missing and infinite log-ratios (rows that hold an
infinite one have weight 0 in ``mis_ess_seq``); metrics of weights and decisions are about what the loss gets, so
they hold every masked-in token. Unless said otherwise a metric is averaged over each row's tokens, then over the
rows that have any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from trimtab.correction.correct import Correction
from trimtab.correction.kept import Kept, kept_shares, kept_sums
from trimtab.correction.level import row_range
from trimtab.correction.log_ratio import LogRatio
from trimtab.correction.rows import Array, Rows
from trimtab.correction.weight import Weights
from trimtab.spec import Level, TisMode
from trimtab.stat import LOG_RATIO_CLAMP, Extremes, Histogram, Mean, Spread

EXP_LIMIT = 600.0
"""Largest argument of exp in a metric: a mean of such numbers is still a float64."""

HISTOGRAM_BLOCK = 1 << 18
"""Numbers counted at once: what is made of them fits the cache, and the bins are few beside them."""

Means = dict[str, Mean]


@dataclass(frozen=True)
class CorrectionStats:
    """Sums, counts, extremes and a histogram of one batch; ``means`` is keyed by metric name."""

    means: Means
    counts: dict[str, int]
    log_ratio: Extremes
    magnitude: Histogram
    ess: Spread
    ess_seq: Spread

    def merge(self, other: CorrectionStats) -> CorrectionStats:
        """Statistics of both batches together."""
        names = [*self.means, *(name for name in other.means if name not in self.means)]
        return CorrectionStats(
            means={n: _merged(self.means.get(n), other.means.get(n)) for n in names},
            counts={n: count + other.counts[n] for n, count in self.counts.items()},
            log_ratio=self.log_ratio.merge(other.log_ratio),
            magnitude=self.magnitude.merge(other.magnitude),
            ess=self.ess.merge(other.ess),
            ess_seq=self.ess_seq.merge(other.ess_seq),
        )

    def as_dict(self) -> dict[str, float]:
        """Metric names (docs/metrics.md, without ``train/``) and finite values."""
        p50, p99 = self.magnitude.quantiles(0.5, 0.99)
        return {
            **{name: mean.value for name, mean in self.means.items()},
            **{name: float(count) for name, count in self.counts.items()},
            "mis_log_ratio_min": self.log_ratio.smallest,
            "mis_log_ratio_max": self.log_ratio.largest,
            "mis_abs_log_ratio_p50": p50,
            "mis_abs_log_ratio_p99": p99,
            "mis_abs_log_ratio_max": self.log_ratio.magnitude,
            "mis_ess": self.ess.value,
            "mis_ess_seq": self.ess_seq.value,
        }


def measure(correction: Correction) -> CorrectionStats:
    """All metrics of one correction; the batch's are the merge of those of its parts, cut at rows."""
    given, scored = correction.given, correction.given.finite()
    kept = kept_sums(correction)
    counts = {
        "mis_missing_logprob_count": _flags(given.missing_M),
        "mis_infinite_log_ratio_count": _flags(given.infinite_M),
        "mis_clamped_log_ratio_count": 0,
    }
    means = _mismatch(scored) | _rejection(correction) | kept_shares(given.rows, kept)
    if correction.weights is not None:
        means |= _weights(correction, correction.weights, kept)
        counts["mis_clamped_log_ratio_count"] = _flags(correction.weights.clamped_L)
    # a row with an infinite log-ratio is no sample of the numerator: weight 0, but one of the rows
    sequence_B = given.sum_B.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp().where(given.sum_B.isfinite(), 0.0)
    sequence_B = sequence_B[given.rows.filled_B]
    return CorrectionStats(
        means=means,
        counts=counts,
        log_ratio=scored.extremes,
        magnitude=_magnitude(scored.log_ratio_M),
        ess=Spread(float(kept.sum_B.sum()), float(kept.squares_B.sum()), given.rows.tokens),
        ess_seq=Spread(float(sequence_B.sum()), float(sequence_B @ sequence_B), given.rows.filled),
    )


def _magnitude(log_ratio_M: Tensor) -> Histogram:
    return reduce(Histogram.merge, map(Histogram.of, log_ratio_M.split(HISTOGRAM_BLOCK)))


def _mismatch(scored: LogRatio) -> Means:
    """How far apart numerator and rollout are, in float64. d = numerator - rollout of finite tokens, e = expm1(d).

    k3 = e - d is not clamped, chi2 = exp(2d) - 1 = e² + 2e is (d to ±LOG_RATIO_CLAMP).
    """
    rows, extreme = scored.rows, scored.extremes.magnitude > LOG_RATIO_CLAMP
    numerator_M, d_M = scored.numerator_M.numpy(), scored.log_ratio_M.numpy()

    def columns(at: slice) -> Iterator[Array]:
        yield numerator_M[at]
        e = d_M[at].astype(np.float64)
        work = np.abs(e)
        yield work
        np.expm1(np.minimum(e, EXP_LIMIT, out=e) if extreme else e, out=e)
        yield e
        yield np.abs(e, out=work)
        if extreme:
            np.clip(e, math.expm1(-LOG_RATIO_CLAMP), math.expm1(LOG_RATIO_CLAMP), out=e)
        yield np.multiply(np.add(e, 2, out=work), e, out=work)

    logp_B, abs_d_B, e_B, abs_e_B, chi2_B = (rows.per_token(sum_B) for sum_B in rows.sums(columns, heavy=True))
    d_B = rows.per_token(scored.sum_B)
    rollout_B = d_B - logp_B
    per_row = {
        "mis_training_log_ppl": -logp_B,
        "mis_training_ppl": _exp(-logp_B),
        "mis_rollout_log_ppl": rollout_B,
        "mis_rollout_ppl": _exp(rollout_B),
        "mis_kl": -d_B,
        "mis_k3_kl": e_B - d_B,
        "mis_log_ppl_diff": -d_B,
        "mis_log_ppl_abs_diff": d_B.abs(),
        "mis_ppl_ratio": _exp(-d_B),
        "mis_chi2_token": chi2_B,
        "mis_chi2_seq": (2 * scored.sum_B.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)).expm1(),
        "train_rollout_logprob_abs_diff": abs_d_B,
        "tis": e_B + 1,
        "tis_abs": abs_e_B,
    }
    return _over_rows(rows, per_row) | {"mis_log_ratio_mean": Mean(float(scored.sum_B.sum()), rows.tokens)}


def _weights(correction: Correction, weights: Weights, kept: Kept) -> Means:
    """What the weights look like before and after bounding, rejection and normalising."""
    rows, rule, factor = correction.given.rows, weights.rule, correction.factor
    after_B = rows.per_token(weights.bounded_B)
    low_B = _share(rows, [(rule.level, weights.band.low_L)] if rule.low > 0 else [])
    high_B = _share(rows, [(rule.level, weights.band.high_L)] if rule.high < float("inf") else [])
    lowest_B, highest_B = row_range(rows, rule.level, weights.summable_L)
    per_row = {
        "mis_tis_weight_before_bound": rows.per_token(weights.raw_B),
        "mis_tis_weight_after_bound": after_B,
        "tis_clipfrac": low_B + high_B,
        "mis_is_ratio_mean_final": after_B / factor,
        "mis_is_ratio_min_final": lowest_B / factor,
        "mis_is_ratio_max_final": highest_B / factor,
    }
    match rule.mode:
        case TisMode.off | TisMode.unbounded:
            pass
        case TisMode.truncate:
            per_row["mis_tis_truncate_fraction"] = high_B
        case TisMode.clip:
            per_row |= {"mis_tis_clip_fraction_low": low_B, "mis_tis_clip_fraction_high": high_B}
        case TisMode.mask:
            per_row |= {"mis_tis_mask_fraction_low": low_B, "mis_tis_mask_fraction_high": high_B}
        case TisMode.zero:
            per_row |= {"mis_tis_zero_fraction_low": low_B, "mis_tis_zero_fraction_high": high_B}
    some_B = kept.tokens_B > 0
    after_rejection = Mean(float((kept.sum_B[some_B] / kept.tokens_B[some_B]).sum()), int(some_B.sum()))
    return _over_rows(rows, per_row) | {
        "mis_is_ratio_mean_after_tis_rs": after_rejection,
        "mis_batch_norm_factor": correction.mass,
    }


def _rejection(correction: Correction) -> Means:
    """Shares of what the rejection rules (any of them), the veto and M2PO reject."""
    rows, rules, per_row = correction.given.rows, correction.rejections, {}
    if rules:
        per_row["mis_rs_mask_fraction_low"] = _share(rows, [(r.level, r.band.low_L) for r in rules])
        per_row["mis_rs_mask_fraction_high"] = _share(rows, [(r.level, r.band.high_L) for r in rules])
    if correction.veto is not None:
        bad_B = correction.veto.catastrophic_B
        per_row["mis_rs_catastrophic_token_fraction"] = rows.per_token(bad_B)
        per_row["mis_rs_catastrophic_seq_fraction"] = (bad_B > 0).double()
    means = _over_rows(rows, per_row)
    if correction.m2 is not None:
        means["mis_m2_fraction"] = Mean(correction.m2.dropped, correction.m2.tokens)
    return means


def _over_rows(rows: Rows, per_row: dict[str, Tensor]) -> Means:
    """Average of each quantity, float64 [B], over the rows that have a token."""
    if not per_row:
        return {}
    totals = torch.stack(list(per_row.values()))[:, rows.filled_B].sum(1)
    return {name: Mean(total, rows.filled) for name, total in zip(per_row, totals.tolist(), strict=True)}


def _share(rows: Rows, flags: list[tuple[Level, Tensor]]) -> Tensor:
    """Share of each row's tokens, float64 [B], concerned by any of the flags, given per token or per row."""
    share_B, row_B, token_M = torch.zeros(rows.count_B.shape, dtype=torch.float64), None, None
    for level, flag_L in flags:
        match level:
            case Level.token:
                token_M = flag_L if token_M is None else token_M | flag_L
            case Level.sequence | Level.geometric:
                row_B = flag_L if row_B is None else row_B | flag_L
    if token_M is not None and token_M.numpy().any():
        share_B = rows.per_token(rows.sum(token_M))
    return share_B if row_B is None else share_B.where(~row_B, 1.0)


def _flags(flag_M: Tensor | None) -> int:
    return 0 if flag_M is None else int(flag_M.count_nonzero())


def _exp(x_B: Tensor) -> Tensor:
    return x_B.clamp(max=EXP_LIMIT).exp()


def _merged(one: Mean | None, other: Mean | None) -> Mean:
    present = [mean for mean in (one, other) if mean is not None]
    return present[0] if len(present) == 1 else present[0].merge(present[1])
