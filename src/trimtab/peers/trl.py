"""What TRL's GRPOTrainer logs: of the vLLM importance sampling and of its losses, by its names.

Commit f2cd5771, ``trl/trainer/grpo_trainer.py``. A quantity with one value a row is averaged over rows, empty ones too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.peers.segments import only, row_count, row_sum
from trimtab.spec import LOG_RATIO_CLAMP, RatioLevel

VESPO_FLOOR = math.log(1e-8)
"""Smallest log-weight, of a token's correction and of a row."""


class SamplingMode(Enum):
    """``vllm_importance_sampling_mode``."""

    token_truncate = "token_truncate"
    token_mask = "token_mask"
    sequence_truncate = "sequence_truncate"
    sequence_mask = "sequence_mask"


class LossType(Enum):
    """``loss_type``."""

    grpo = "grpo"
    bnpo = "bnpo"
    dr_grpo = "dr_grpo"
    dapo = "dapo"
    luspo = "luspo"
    cispo = "cispo"
    sapo = "sapo"
    vespo = "vespo"


@dataclass(frozen=True)
class Options:
    """The options of ``GRPOConfig`` that the loss's metrics depend on, by its names; ``vespo_*``: exponent, rate."""

    loss_type: LossType = LossType.dapo
    importance_sampling_level: RatioLevel = RatioLevel.token
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    vespo_negative: tuple[float, float] = (3.0, 2.0)


def check_sampling(mode: SamplingMode, clip_min: float | None, clip_max: float | None) -> None:
    """Raise ConfigError for what TRL refuses of ``vllm_importance_sampling_clip_{min,max}``: lower bounds that are not
    below the upper one, and a truncation without any."""
    given = f"vllm_importance_sampling_clip_min={clip_min} and vllm_importance_sampling_clip_max={clip_max}"
    if clip_min is not None and clip_max is not None and not clip_min < clip_max:
        raise ConfigError(f"{given}: bounds need clip_min < clip_max; for example 0.5 and 3.0")
    truncates = mode in (SamplingMode.token_truncate, SamplingMode.sequence_truncate)
    if truncates and clip_min is None and clip_max is None:
        raise ConfigError(
            f"{given}: vllm_importance_sampling_mode={mode.value} needs one of them; for example "
            "vllm_importance_sampling_clip_max=3.0"
        )


def sampling_ratio(
    *,
    proximal_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    mode: SamplingMode,
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> Tensor:
    """``importance_sampling_ratio``: proximal/rollout after its bounds, [N] (1, bounded, where not valid) or [B].

    A row's ratio is the product of its tokens', 1 for a row without any. truncate: min(max(r, clip_min), clip_max);
    mask: 0 outside the bounds, which are inclusive. Not clamped against overflow. In the inputs' dtype.
    """
    check_sampling(mode, clip_min, clip_max)
    log_ratio_N = only(proximal_N, valid_N) - only(rollout_N, valid_N)
    match mode:
        case SamplingMode.token_truncate | SamplingMode.token_mask:
            ratio_L = log_ratio_N.exp()
        case SamplingMode.sequence_truncate | SamplingMode.sequence_mask:
            ratio_L = row_sum(log_ratio_N, valid_N, row_N, len(length_B)).exp()
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    match mode:
        case SamplingMode.token_truncate | SamplingMode.sequence_truncate:
            return ratio_L.clamp(low, high)
        case SamplingMode.token_mask | SamplingMode.sequence_mask:
            return ratio_L.where((ratio_L >= low) & (ratio_L <= high), 0.0)


def sampling_metrics(
    *,
    proximal_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    mode: SamplingMode,
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> dict[str, float]:
    """``sampling/*``: |proximal - rollout| over valid tokens, and the ratio after its bounds (of rows: of all rows)."""
    ratio_L = sampling_ratio(
        proximal_N=proximal_N, rollout_N=rollout_N, valid_N=valid_N, row_N=row_N, length_B=length_B,
        mode=mode, clip_min=clip_min, clip_max=clip_max,
    )  # fmt: skip
    if mode in (SamplingMode.token_truncate, SamplingMode.token_mask):
        ratio_L = ratio_L[valid_N]
    apart_M = (proximal_N.detach()[valid_N] - rollout_N.detach()[valid_N]).abs()
    some, any_ratio = apart_M.numel() > 0, ratio_L.numel() > 0
    return {
        "sampling/sampling_logp_difference/mean": float(apart_M.mean()) if some else 0.0,
        "sampling/sampling_logp_difference/max": float(apart_M.max()) if some else 0.0,
        "sampling/importance_sampling_ratio/min": float(ratio_L.min()) if any_ratio else 0.0,
        "sampling/importance_sampling_ratio/mean": float(ratio_L.mean()) if any_ratio else 0.0,
        "sampling/importance_sampling_ratio/max": float(ratio_L.max()) if any_ratio else 0.0,
    }


@dataclass(frozen=True)
class _Batch:
    valid_N: Tensor
    row_N: Tensor
    count_B: Tensor

    @property
    def rows(self) -> int:
        return len(self.count_B)

    def mean(self, x_N: Tensor) -> float:
        """Over valid tokens; 0 without any."""
        return float(only(x_N, self.valid_N).sum() / max(int(self.count_B.sum()), 1))

    def means(self, x_L: Tensor, by_row: bool) -> tuple[float, Tensor]:
        """The batch's mean and each row's; a row without a valid token has none (left out) at token level."""
        if by_row:
            return float(x_L.mean()) if self.rows else 0.0, x_L
        filled_B = self.count_B > 0
        row_B = row_sum(x_L, self.valid_N, self.row_N, self.rows) / self.count_B
        return self.mean(x_L), row_B[filled_B]


def loss_metrics(
    *,
    current_N: Tensor,
    proximal_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    advantage_B: Tensor,
    options: Options,
    entropy_N: Tensor | None = None,
    reference_N: Tensor | None = None,
    weight_N: Tensor | None = None,
) -> dict[str, float]:
    """Metrics of one batch: ``entropy``, ``kl`` (beta not 0), and clip shares or vespo's weight, as its loss has them.

    The ratio is current/proximal, of a token or geometric of a row. ``weight_N``: correction after its bounds (vespo).
    """
    batch = _Batch(valid_N, row_N, row_count(valid_N, row_N, len(length_B)))
    log_ratio_N = only(current_N, valid_N) - only(proximal_N, valid_N)
    by_row = options.importance_sampling_level is RatioLevel.sequence
    row_B = row_sum(log_ratio_N, valid_N, row_N, batch.rows) / batch.count_B.clamp(min=1)
    match options.importance_sampling_level:
        case RatioLevel.token:
            ratio_L, advantage_L = log_ratio_N.exp(), advantage_B[row_N]
        case RatioLevel.sequence:
            ratio_L, advantage_L = row_B.exp(), advantage_B
        case RatioLevel.sequence_token:
            ratio_L, advantage_L = row_B.exp()[row_N], advantage_B[row_N]
    found: dict[str, float] = {}
    if options.beta != 0.0 and reference_N is not None:
        x_N = only(reference_N, valid_N) - only(current_N, valid_N)
        kl_N = x_N.exp() - x_N - 1
        if options.use_bias_correction_kl:
            kl_N = kl_N * (ratio_L[row_N] if by_row else ratio_L)
        found["kl"] = batch.mean(kl_N)
    if entropy_N is not None:
        found["entropy"] = batch.mean(entropy_N)
    match options.loss_type:
        case LossType.grpo | LossType.bnpo | LossType.dr_grpo | LossType.dapo | LossType.luspo:
            found |= _clip_shares(batch, ratio_L, advantage_L, by_row, options)
        case LossType.cispo:
            clipped_L = (ratio_L > options.epsilon_high) & (advantage_L > 0)
            found["cispo_clip_ratio"], _ = batch.means(clipped_L.to(ratio_L.dtype), by_row)
        case LossType.sapo:
            pass
        case LossType.vespo:
            phi_B = _vespo_weight(batch, log_ratio_N, advantage_B, weight_N, options)
            found["vespo/phi_seq_mean"], _ = batch.means(phi_B, True)
    return found


def _clip_shares(
    batch: _Batch, ratio_L: Tensor, advantage_L: Tensor, by_row: bool, options: Options
) -> dict[str, float]:
    """``clip_ratio/*``: shares where the clip takes the gradient; ``delta`` bounds the ratio first."""
    if options.delta is not None:
        ratio_L = ratio_L.clamp(max=options.delta)
    low_L = (ratio_L < 1 - options.epsilon) & (advantage_L < 0)
    high_L = (ratio_L > 1 + options.epsilon_high) & (advantage_L > 0)
    low, low_B = batch.means(low_L.to(ratio_L.dtype), by_row)
    high, high_B = batch.means(high_L.to(ratio_L.dtype), by_row)
    region, _ = batch.means((low_L | high_L).to(ratio_L.dtype), by_row)
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": region,
        "clip_ratio/low_min": float(low_B.min()) if len(low_B) else math.nan,
        "clip_ratio/high_max": float(high_B.max()) if len(high_B) else math.nan,
    }


def _vespo_weight(
    batch: _Batch, log_ratio_N: Tensor, advantage_B: Tensor, weight_N: Tensor | None, options: Options
) -> Tensor:
    """phi = exp(rate + k log w - rate w) of each row, with w the clamped product of its ratios and corrections, [B]."""
    log_w_N = log_ratio_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    if weight_N is not None and weight_N.shape != log_w_N.shape:
        raise ConfigError(
            "loss_type=vespo takes a weight for each token; use vllm_importance_sampling_mode=token_truncate "
            "or token_mask"
        )
    if weight_N is not None:
        log_w_N = log_w_N + weight_N.detach().log().clamp(VESPO_FLOOR, LOG_RATIO_CLAMP)
    log_w_B = row_sum(log_w_N, batch.valid_N, batch.row_N, batch.rows).clamp(VESPO_FLOOR, LOG_RATIO_CLAMP)
    (k_up, rate_up), (k_down, rate_down) = options.vespo_positive, options.vespo_negative
    up_B = advantage_B >= 0
    k_B = torch.where(up_B, k_up, k_down).to(log_w_B.dtype)
    rate_B = torch.where(up_B, rate_up, rate_down).to(log_w_B.dtype)
    return (rate_B + k_B * log_w_B - rate_B * log_w_B.exp()).exp()
