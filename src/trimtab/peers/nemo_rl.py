"""What NeMo-RL logs: the metrics of its clipped policy-gradient loss and of its sequence error filter, by its names.

Commit 7ea279ab, ``nemo_rl/algorithms/loss/loss_functions.py`` and ``grpo.py``. Its means divide by the count plus 1e-8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.objective.aggregate import Counts
from trimtab.peers.options import member
from trimtab.peers.segments import only, row_count, row_sum
from trimtab.spec import KlEstimator

EPSILON = 1e-8
"""Added to each denominator."""


class TruncationKind(Enum):
    """Values are NeMo-RL's own: clamp weights, zero those out of bounds, drop rows by their geometric mean."""

    tis = "tis"
    icepop = "icepop"
    seq_mask_tis = "seq-mask-tis"


@dataclass(frozen=True)
class Truncation:
    """``truncated_importance_sampling_{type,ratio,ratio_min}``; no lower bound is 0."""

    kind: TruncationKind
    upper: float
    lower: float | None = None

    def __post_init__(self) -> None:
        if self.lower is None and self.kind is not TruncationKind.tis:
            raise ConfigError(f"{self.kind.value} needs truncated_importance_sampling_ratio_min, for example 0.5")
        if self.upper <= 0 or (self.lower is not None and self.lower > self.upper):
            raise ConfigError(
                f"truncated_importance_sampling_ratio={self.upper:g} and truncated_importance_sampling_ratio_min="
                f"{self.lower}: bounds need 0 < ratio and ratio_min <= ratio; for example 2.0 and 0.5"
            )


def truncation(
    kind: str | None, ratio: float | None, ratio_min: float | None = None, *, corrected: bool = True
) -> Truncation | None:
    """``truncated_importance_sampling_{type,ratio,ratio_min}`` and ``use_importance_sampling_correction`` together.

    None without a ratio. Raises ConfigError for an unknown type, and for a ratio without a type or a correction.
    """
    if ratio is None:
        return None
    if not corrected:
        raise ConfigError(
            f"truncated_importance_sampling_ratio={ratio:g} truncates weights that there are not; give "
            "use_importance_sampling_correction=true, or truncated_importance_sampling_ratio=null"
        )
    return Truncation(member(TruncationKind, "truncated_importance_sampling_type", kind), ratio, ratio_min)


@dataclass(frozen=True)
class Options:
    """The options of ``ClippedPGLossFn`` that its metrics depend on, by its names."""

    token_level_loss: bool = True
    sequence_level_importance_ratios: bool = False
    disable_ppo_ratio: bool = False
    force_on_policy_ratio: bool = False
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    reference_policy_kl_penalty: float = 0.0
    reference_policy_kl_type: KlEstimator = KlEstimator.k3
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    use_on_policy_kl_approximation: bool = False
    truncation: Truncation | None = None
    positive_example_nll_weight: float = 0.0

    def __post_init__(self) -> None:
        by_row = self.sequence_level_importance_ratios
        if by_row and self.token_level_loss:
            raise ConfigError("sequence_level_importance_ratios needs token_level_loss=false")
        if self.ratio_clip_c is not None and not self.ratio_clip_c > 1:
            raise ConfigError(f"ratio_clip_c={self.ratio_clip_c:g} is refused; allowed: > 1, or null; for example 3.0")
        if by_row and self.truncation is not None and self.truncation.kind is TruncationKind.seq_mask_tis:
            raise ConfigError("seq-mask-tis is of token weights; use sequence_level_importance_ratios=false")


@dataclass(frozen=True)
class _Batch:
    """The tokens, and NeMo-RL's two means: over the global batch's tokens and its rows."""

    current_N: Tensor
    proximal_N: Tensor
    rollout_N: Tensor
    valid_N: Tensor
    row_N: Tensor
    sample_B: Tensor
    totals: Counts

    @property
    def rows(self) -> int:
        return len(self.sample_B)

    def mean(self, x_N: Tensor) -> float:
        """Σ over valid tokens / (global tokens + 1e-8)."""
        return float(only(x_N, self.valid_N).sum() / (self.totals.tokens + EPSILON))

    def row_mean(self, x_N: Tensor) -> Tensor:
        """Each row's Σ over valid tokens / (its tokens + 1e-8), [B]."""
        count_B = row_count(self.valid_N, self.row_N, self.rows)
        return row_sum(x_N, self.valid_N, self.row_N, self.rows) / (count_B.to(x_N.dtype) + EPSILON)

    def mean_of_weights(self, x_B: Tensor) -> float:
        """NeMo-RL's mean of one weight a row: its [B, 1] times [B] sums every weight once for each row in the batch."""
        return float(x_B.sum() * self.sample_B.sum() / (self.totals.rows + EPSILON))

    def mean_of_rows(self, x_B: Tensor) -> float:
        """Σ over the rows in the batch / (global rows + 1e-8)."""
        return float(only(x_B, self.sample_B).sum() / (self.totals.rows + EPSILON))


def loss_metrics(
    *,
    current_N: Tensor,
    proximal_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    options: Options,
    loss: float | Tensor,
    reference_N: Tensor | None = None,
    reward_B: Tensor | None = None,
    sample_B: Tensor | None = None,
    totals: Counts | None = None,
) -> dict[str, float]:
    """Metrics of one (micro-)batch. N flat tokens, float32 or float64, log-probs in nats, computed in their dtype.

    ``valid_N``: token mask times sample mask. ``sample_B`` (bool): rows that count even without a valid token; empty:
    those with one. ``totals``: global valid tokens and rows; empty: this batch's. ``loss``: the total loss.
    """
    if options.force_on_policy_ratio:
        proximal_N = current_N
    rows = len(length_B)
    filled_B = row_count(valid_N, row_N, rows) > 0
    sample_B = filled_B if sample_B is None else sample_B.bool()
    totals = Counts(int(valid_N.sum()), int(sample_B.sum())) if totals is None else totals
    current_N, proximal_N, rollout_N = (only(x_N, valid_N) for x_N in (current_N, proximal_N, rollout_N))
    batch = _Batch(current_N, proximal_N, rollout_N, valid_N, row_N, sample_B, totals)
    entropy_N = (current_N - rollout_N).exp() * current_N
    return {
        "loss": float(loss),
        **_ratios(batch, options),
        "kl_penalty": 0.0 if reference_N is None else _kl_penalty(batch, only(reference_N, valid_N), options),
        **_mismatch(batch, options.reference_policy_kl_type),
        **_weights(batch, options),
        "num_valid_samples": float(sample_B.sum()),
        "approx_entropy": -batch.mean(entropy_N),
        "positive_nll_loss": _positive_nll(batch, reward_B, options.positive_example_nll_weight),
    }


def _ratios(batch: _Batch, options: Options) -> dict[str, float]:
    """The PPO ratio current/proximal: of a token, geometric of a row, or (without a ratio) the log-prob itself."""
    log_ratio_N, clip = batch.current_N - batch.proximal_N, True
    if options.force_on_policy_ratio:
        ratio_N, clip = torch.ones_like(log_ratio_N), False
    elif options.disable_ppo_ratio:
        ratio_N, clip = batch.current_N, False
    elif options.sequence_level_importance_ratios:
        ratio_N = batch.row_mean(log_ratio_N).exp()[batch.row_N]
    else:
        ratio_N = log_ratio_N.exp()
    clamped_N = ratio_N.clamp(1.0 - options.ratio_clip_min, 1.0 + options.ratio_clip_max) if clip else ratio_N
    found = {}
    for name, x_N in (("probs_ratio", ratio_N), ("probs_ratio_clamped", clamped_N)):
        x_M = x_N[batch.valid_N]
        found[name] = batch.mean(x_N)
        found[f"{name}_min"] = float(x_M.min()) if x_M.numel() else math.inf
        found[f"{name}_max"] = float(x_M.max()) if x_M.numel() else -math.inf
    return found


def _kl(x_N: Tensor, kind: KlEstimator) -> Tensor:
    """KL estimate from x = log-prob of the sampling policy minus the other's."""
    match kind:
        case KlEstimator.k1:
            return x_N
        case KlEstimator.k2:
            return x_N.square() / 2
        case KlEstimator.k3:
            return (-x_N).exp() - 1 + x_N


def _mismatch(batch: _Batch, kind: KlEstimator) -> dict[str, float]:
    """How far proximal and rollout are apart: |d| as a factor, both KLs, and Jensen-Shannon, unclamped."""
    p_N, g_N = batch.proximal_N, batch.rollout_N
    mixture_N = (0.5 * p_N.exp() + 0.5 * g_N.exp()).log()
    js_N = 0.5 * _kl(mixture_N - p_N, KlEstimator.k3) + 0.5 * _kl(mixture_N - g_N, KlEstimator.k3)
    return {
        "token_mult_prob_error": batch.mean((g_N - p_N).abs().exp()),
        "gen_kl_error": batch.mean(_kl(g_N - p_N, kind)),
        "policy_kl_error": batch.mean(_kl(p_N - g_N, kind)),
        "js_divergence_error": batch.mean(js_N),
    }


def _weights(batch: _Batch, options: Options) -> dict[str, float]:
    """Mean weight proximal/rollout after truncation, logged even when the loss does not use it; NaN and inf are 0."""
    log_ratio_N = batch.proximal_N - batch.rollout_N
    by_row = options.sequence_level_importance_ratios
    level_L = row_sum(log_ratio_N, batch.valid_N, batch.row_N, batch.rows) if by_row else log_ratio_N
    weight_L = level_L.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    found: dict[str, float] = {}
    if options.truncation is not None:
        weight_L, found["is_oob_ratio"] = _truncated(batch, weight_L, log_ratio_N, by_row, options.truncation)
    found["sampling_importance_ratio"] = batch.mean_of_weights(weight_L) if by_row else batch.mean(weight_L)
    return found


def _truncated(
    batch: _Batch, weight_L: Tensor, log_ratio_N: Tensor, by_row: bool, rule: Truncation
) -> tuple[Tensor, float]:
    """Truncated weights and the share of valid tokens (seq-mask-tis: of rows) out of bounds."""
    lower = 0.0 if rule.lower is None else rule.lower
    out_L = (weight_L < lower) | (weight_L > rule.upper)
    if rule.kind is TruncationKind.seq_mask_tis:
        finite_N = log_ratio_N.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        geometric_B = batch.row_mean(finite_N).exp()
        out_B = ~((geometric_B >= lower) & (geometric_B <= rule.upper))
        return weight_L.where(~out_B[batch.row_N], 0.0), batch.mean_of_rows(out_B.to(weight_L.dtype))
    out_N = out_L[batch.row_N] if by_row else out_L
    share = batch.mean(out_N.to(weight_L.dtype))
    match rule.kind:
        case TruncationKind.tis:
            return weight_L.clamp(lower, rule.upper), share
        case TruncationKind.icepop:
            return weight_L.where(~out_L, 0.0), share


def _kl_penalty(batch: _Batch, reference_N: Tensor, options: Options) -> float:
    """The KL to the reference, reduced as the loss is, without its coefficient; 0 where it has none."""
    if options.reference_policy_kl_penalty == 0:
        return 0.0
    x_N = batch.current_N - reference_N
    if options.kl_input_clamp_value is not None:
        x_N = x_N.clamp(-options.kl_input_clamp_value, options.kl_input_clamp_value)
    kl_N = _kl(x_N, options.reference_policy_kl_type)
    if options.use_on_policy_kl_approximation:
        weight_N = (batch.current_N - batch.rollout_N).exp()
        kl_N = kl_N * weight_N.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if options.kl_output_clamp_value is not None:
        kl_N = kl_N.clamp(-options.kl_output_clamp_value, options.kl_output_clamp_value)
    return batch.mean(kl_N) if options.token_level_loss else batch.mean_of_rows(batch.row_mean(kl_N))


def _positive_nll(batch: _Batch, reward_B: Tensor | None, weight: float) -> float:
    """Mean of -log-prob over valid tokens of rows with a positive reward; 0 where the loss has no such term."""
    if weight <= 0 or reward_B is None:
        return 0.0
    correct_N = batch.valid_N & (reward_B > 0)[batch.row_N]
    tokens = int(correct_N.sum())
    return float(-batch.current_N[correct_N].sum() / (tokens + EPSILON)) if tokens else 0.0


def sequence_error(
    *, proximal_N: Tensor, rollout_N: Tensor, valid_N: Tensor, row_N: Tensor, length_B: Tensor
) -> Tensor:
    """Each row's mean of exp|rollout - proximal| over its valid tokens, [B]: at least 1; 0 for a row without any."""
    factor_N = (only(rollout_N, valid_N) - only(proximal_N, valid_N)).abs().exp()
    count_B = row_count(valid_N, row_N, len(length_B)).clamp(min=1)
    return row_sum(factor_N, valid_N, row_N, len(length_B)) / count_B


def sequence_filter_metrics(
    *,
    proximal_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    reward_B: Tensor,
    threshold: float | None,
    sample_B: Tensor | None = None,
) -> dict[str, float | Tensor]:
    """``seq_logprob_error_threshold``: rows whose error is above it are left out; None only measures.

    ``sample_mask`` [B] holds the rows that stay. Extremes and means are over rows with a valid token, 0 without any.
    ``masked_correct_pct``: share of the rows left out whose reward is 1. ``sample_B`` as in ``loss_metrics``.
    """
    error_B = sequence_error(
        proximal_N=proximal_N, rollout_N=rollout_N, valid_N=valid_N, row_N=row_N, length_B=length_B
    )
    filled_B = row_count(valid_N, row_N, len(length_B)) > 0
    sample_B = filled_B if sample_B is None else sample_B.bool()
    stays_B = sample_B if threshold is None else sample_B & (error_B <= threshold)
    gone_B = sample_B & ~stays_B
    masked = int(gone_B.sum())
    correct = int((reward_B[gone_B] == 1).sum())
    return {
        "sample_mask": stays_B,
        **_spread("seq_mult_prob_error", error_B[filled_B]),
        **_spread("seq_mult_prob_error_after_mask", error_B[filled_B & stays_B]),
        "num_masked_seqs": float(masked),
        "masked_correct_pct": correct / masked if masked else 0.0,
    }


def _spread(name: str, x_L: Tensor) -> dict[str, float]:
    return {
        f"max_{name}": float(x_L.max()) if x_L.numel() else 0.0,
        f"mean_{name}": float(x_L.mean()) if x_L.numel() else 0.0,
        f"min_{name}": float(x_L.min()) if x_L.numel() else 0.0,
    }
