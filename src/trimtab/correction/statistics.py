"""What a correction did, and how far the policies were apart, as statistics that merge exactly over whole rows.

Two populations (docs/metrics.md): mismatch metrics leave out missing and infinite log-ratios; metrics of
weights and decisions are about what the loss gets, so they hold every masked-in token. Unless said
otherwise a metric is averaged over each row's tokens, then over the rows that have any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterator

import torch
from torch import Tensor

from trimtab.correction.correct import Correction
from trimtab.correction.level import row_range
from trimtab.correction.log_ratio import LOG_RATIO_CLAMP, LogRatio
from trimtab.correction.rows import Rows
from trimtab.correction.weight import Weights
from trimtab.spec import Level, TisMode
from trimtab.stat import Extremes, Histogram, Mean, Spread

EXP_LIMIT = 600.0
"""Largest argument of exp in a metric: a mean of such numbers is still a float64."""

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
        return {
            **{name: mean.value for name, mean in self.means.items()},
            **{name: float(count) for name, count in self.counts.items()},
            "mis_log_ratio_min": self.log_ratio.smallest,
            "mis_log_ratio_max": self.log_ratio.largest,
            "mis_abs_log_ratio_p50": self.magnitude.quantile(0.5),
            "mis_abs_log_ratio_p99": self.magnitude.quantile(0.99),
            "mis_abs_log_ratio_max": self.log_ratio.magnitude,
            "mis_ess": self.ess.value,
            "mis_ess_seq": self.ess_seq.value,
        }


def measure(correction: Correction) -> CorrectionStats:
    """All metrics of one correction; the batch's are the merge of those of its parts, cut at rows."""
    given, scored = correction.given, correction.given.finite()
    kept = _kept(correction)
    counts = {
        "mis_missing_logprob_count": _flags(given.missing_M),
        "mis_infinite_log_ratio_count": _flags(given.infinite_M),
        "mis_clamped_log_ratio_count": 0,
    }
    means = _mismatch(scored) | _rejection(correction) | _kept_shares(given.rows, kept)
    if correction.weights is not None:
        means |= _weights(correction, correction.weights, kept)
        counts["mis_clamped_log_ratio_count"] = _flags(correction.weights.clamped_L)
    sequence_B = given.sum_B.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()[given.rows.filled_B]
    return CorrectionStats(
        means=means,
        counts=counts,
        log_ratio=scored.extremes,
        magnitude=Histogram.of(scored.log_ratio_M.abs()),
        ess=Spread(float(kept.sum_B.sum()), float(kept.squares_B.sum()), given.rows.tokens),
        ess_seq=Spread(float(sequence_B.sum()), float(sequence_B @ sequence_B), given.rows.filled),
    )


def _mismatch(scored: LogRatio) -> Means:
    """How far apart numerator and rollout are, in float64. d = numerator - rollout of finite tokens, e = expm1(d).

    k3 = e - d is not clamped, chi2 = exp(2d) - 1 = e² + 2e is (d to ±LOG_RATIO_CLAMP).
    """
    rows, extreme = scored.rows, scored.extremes.magnitude > LOG_RATIO_CLAMP

    # of all tokens at once, as torch wakes its threads for every expm1, however short; a copy, to work in place
    e_M = scored.log_ratio_M.to(torch.float64, copy=True)
    e_M = (e_M.clamp_(max=EXP_LIMIT) if extreme else e_M).expm1_()

    def columns(at: slice) -> Iterator[Tensor]:
        yield scored.numerator_M[at]
        yield scored.log_ratio_M[at].abs()
        e = e_M[at]
        yield e
        yield e.abs()
        safe = e.clamp(math.expm1(-LOG_RATIO_CLAMP), math.expm1(LOG_RATIO_CLAMP)) if extreme else e
        yield (safe + 2).mul_(safe)

    logp_B, abs_d_B, e_B, abs_e_B, chi2_B = (rows.per_token(sum_B) for sum_B in rows.sums(columns))
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
    overall = {"mis_log_ratio_mean": Mean(float(scored.sum_B.sum()), rows.tokens)}
    return {name: _over_rows(rows, value_B) for name, value_B in per_row.items()} | overall


def _weights(correction: Correction, weights: Weights, kept: _Kept) -> Means:
    """What the weights look like before and after bounding, rejection and normalising."""
    rows, rule, factor = correction.given.rows, weights.rule, correction.factor
    after_B = rows.per_token(weights.bounded_B)
    low_B = _share(rows, [(rule.level, weights.band.low_L)] if rule.low > 0 else [])
    high_B = _share(rows, [(rule.level, weights.band.high_L)] if rule.high < float("inf") else [])
    lowest_B, highest_B = row_range(rows, rule.level, weights.bounded_L)
    per_row = {
        "mis_tis_weight_before_bound": rows.per_token(kept.raw_B),
        "mis_tis_weight_after_bound": after_B,
        "tis_clipfrac": low_B + high_B,
        "mis_is_ratio_mean_final": after_B / factor,
        "mis_is_ratio_min_final": lowest_B / factor,
        "mis_is_ratio_max_final": highest_B / factor,
    }
    match rule.mode:
        case TisMode.off:
            pass
        case TisMode.truncate:
            per_row["mis_tis_truncate_fraction"] = high_B
        case TisMode.clip:
            per_row |= {"mis_tis_clip_fraction_low": low_B, "mis_tis_clip_fraction_high": high_B}
        case TisMode.mask:
            per_row |= {"mis_tis_mask_fraction_low": low_B, "mis_tis_mask_fraction_high": high_B}
    some_B = kept.tokens_B > 0
    after_rejection = Mean(float((kept.sum_B[some_B] / kept.tokens_B[some_B]).sum()), int(some_B.sum()))
    return {name: _over_rows(rows, value_B) for name, value_B in per_row.items()} | {
        "mis_is_ratio_mean_after_tis_rs": after_rejection,
        "mis_batch_norm_factor": correction.mass,
    }


def _rejection(correction: Correction) -> Means:
    """Shares of what the rejection rules (any of them) and the veto reject."""
    rows, rules, per_row = correction.given.rows, correction.rejections, {}
    if rules:
        per_row["mis_rs_mask_fraction_low"] = _share(rows, [(r.level, r.band.low_L) for r in rules])
        per_row["mis_rs_mask_fraction_high"] = _share(rows, [(r.level, r.band.high_L) for r in rules])
    if correction.veto is not None:
        bad_B = correction.veto.catastrophic_B
        per_row["mis_rs_catastrophic_token_fraction"] = rows.per_token(bad_B)
        per_row["mis_rs_catastrophic_seq_fraction"] = (bad_B > 0).double()
    return {name: _over_rows(rows, value_B) for name, value_B in per_row.items()}


@dataclass(frozen=True)
class _Kept:
    """Row sums, float64: kept tokens, their bounded weights and squares; the raw weights of all valid tokens.

    Weights are taken before normalising: a common factor cancels in the effective sample size.
    """

    tokens_B: Tensor
    sum_B: Tensor
    squares_B: Tensor
    raw_B: Tensor


def _kept(correction: Correction) -> _Kept:
    rows, weights, token_M = correction.given.rows, correction.weights, correction.keep.token_M
    tokens_B = rows.count_B.double() if token_M is None else rows.sum(token_M)
    if weights is None:
        sum_B, squares_B, raw_B = tokens_B, tokens_B, rows.count_B.double()
    elif weights.rule.level is not Level.token:
        w_B = weights.bounded_L.double()
        sum_B, squares_B, raw_B = w_B * tokens_B, w_B**2 * tokens_B, weights.raw_L.double() * rows.count_B
    elif token_M is None:
        raw_B, squares_B = rows.sums(lambda at: [weights.raw_L[at], weights.bounded_L[at].double() ** 2])
        sum_B = weights.bounded_B
    else:
        kept_M = weights.bounded_L.where(token_M, 0.0)
        raw_B, squares_B, sum_B = rows.sums(lambda at: [weights.raw_L[at], kept_M[at].double() ** 2, kept_M[at]])
    tokens_B, sum_B, squares_B = (x_B.where(correction.keep.row_B, 0.0) for x_B in (tokens_B, sum_B, squares_B))
    return _Kept(tokens_B, sum_B, squares_B, raw_B)


def _kept_shares(rows: Rows, kept: _Kept) -> Means:
    return {
        "mis_kept_token_fraction": Mean(float(kept.tokens_B.sum()), rows.tokens),
        "mis_kept_seq_fraction": Mean(int((kept.tokens_B > 0).sum()), rows.filled),
    }


def _over_rows(rows: Rows, mean_B: Tensor) -> Mean:
    """Average over the rows that have a token."""
    return Mean(float(mean_B[rows.filled_B].sum(dtype=torch.float64)), rows.filled)


def _share(rows: Rows, flags: list[tuple[Level, Tensor]]) -> Tensor:
    """Share of each row's tokens, float64 [B], concerned by any of the flags, given per token or per row."""
    row_B, token_M = torch.zeros(len(rows.count_B), dtype=torch.bool), None
    for level, flag_L in flags:
        match level:
            case Level.token:
                token_M = flag_L if token_M is None else token_M | flag_L
            case Level.sequence | Level.geometric:
                row_B = row_B | flag_L
    token_B = torch.zeros(len(row_B), dtype=torch.float64) if token_M is None else rows.per_token(rows.sum(token_M))
    return token_B.where(~row_B, 1.0)


def _flags(flag_M: Tensor | None) -> int:
    return 0 if flag_M is None else int(flag_M.count_nonzero())


def _exp(x_B: Tensor) -> Tensor:
    return x_B.clamp(max=EXP_LIMIT).exp()


def _merged(one: Mean | None, other: Mean | None) -> Mean:
    present = [mean for mean in (one, other) if mean is not None]
    return present[0] if len(present) == 1 else present[0].merge(present[1])
