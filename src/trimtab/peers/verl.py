"""verl's metrics of its rollout correction, ``rollout_corr/*``.

Commit 1dda039b; functions named ``legacy_*`` are of 418f964a, the last with a veto and with bounds on the ratio.
d = numerator - rollout in nats (decoupled: proximal, bypass: current), L = d clamped to +-20. A mean over tokens is
sum / (count + 1e-8), which a row's mean is too; a row without tokens so has mean 0 and, unless said otherwise, counts
among the rows. Every function takes float32 or float64 [N] and computes in that dtype. Shapes as in ``rows``.
"""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.peers.rows import TINY, ValidTokens
from trimtab.spec import Level
from trimtab.stat import LOG_RATIO_CLAMP

PREFIX = "rollout_corr/"

Metrics = dict[str, float]


class RsOption(Enum):
    """Options of ``rollout_rs``: over which tokens the statistic is aggregated, and which one it is."""

    token_k1 = "token_k1"
    token_k2 = "token_k2"
    token_k3 = "token_k3"
    seq_sum_k1 = "seq_sum_k1"
    seq_sum_k2 = "seq_sum_k2"
    seq_sum_k3 = "seq_sum_k3"
    seq_mean_k1 = "seq_mean_k1"
    seq_mean_k2 = "seq_mean_k2"
    seq_mean_k3 = "seq_mean_k3"
    seq_max_k2 = "seq_max_k2"
    seq_max_k3 = "seq_max_k3"

    @property
    def of_tokens(self) -> bool:
        return self.name.startswith("token")

    @property
    def two_sided(self) -> bool:
        return self.name.endswith("k1")


# -- distance of the two policies ----------------------------------------------------------------------------------


def off_policy(numerator_N: Tensor, rollout_N: Tensor, valid_N: Tensor, row_N: Tensor, length_B: Tensor) -> Metrics:
    """Perplexities, KL estimates and chi-squared; log perplexity = -mean log-prob of a row, averaged over rows.

    kl = mean -d; k3_kl = mean exp(d) - d - 1, not clamped; chi2_token = mean exp(2L) - 1 over tokens;
    chi2_seq = mean over rows of exp(2 clamp(sum d)) - 1; ppl_ratio = mean over rows of exp(log_ppl_diff).
    """
    at, d_N = ValidTokens(valid_N, row_N, length_B), numerator_N - rollout_N
    training_B, rollout_B = -at.mean_rows(numerator_N), -at.mean_rows(rollout_N)
    diff_B = training_B - rollout_B
    return _named(
        PREFIX,
        {
            "training_ppl": training_B.exp().mean(),
            "training_log_ppl": training_B.mean(),
            "kl": at.mean(-d_N),
            "k3_kl": at.mean(d_N.exp() - d_N - 1),
            "rollout_ppl": rollout_B.exp().mean(),
            "rollout_log_ppl": rollout_B.mean(),
            "log_ppl_diff": diff_B.mean(),
            "log_ppl_abs_diff": diff_B.abs().mean(),
            "log_ppl_diff_max": diff_B.max(),
            "log_ppl_diff_min": diff_B.min(),
            "ppl_ratio": diff_B.exp().mean(),
            "chi2_token": at.mean(_clamped(d_N).exp().square()) - 1,
            "chi2_seq": (2 * _clamped(at.sum_rows(d_N))).exp().mean() - 1,
        },
    )


# -- importance weights --------------------------------------------------------------------------------------------


def importance(
    numerator_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    *,
    level: Level,
    upper: float,
    lower: float | None = None,
    batch_normalize: bool = False,
) -> Metrics:
    """``rollout_is_*``: raw = exp(L) per token, or exp(clamp(sum d)) per row; w = min(raw, upper).

    With ``lower``, w = raw where lower <= raw <= upper, else 0 (``rollout_is_oob_ratio``); without, shares below are
    counted from 1/upper. Of w: mean, std, eff_sample_size and seq_*; of raw: the shares outside. At level sequence,
    max and min are of exp(sum d) over all rows, not truncated. batch_norm_factor: what w is divided by afterwards.
    """
    at = ValidTokens(valid_N, row_N, length_B)
    log_ratio_L, raw_N = _weights(at, numerator_N - rollout_N, level)
    floor = 1 / upper if lower is None else lower
    outside_N = (raw_N < floor) | (raw_N > upper)
    w_N = raw_N.clamp(max=upper) if lower is None else raw_N.where(~outside_N, 0.0)
    found = _weight_metrics(at, level, log_ratio_L, raw_N, w_N, low=floor, high=upper, spread_from=0.0)
    if lower is not None:
        found["oob_ratio"] = _share(at, outside_N, w_N.dtype)
    if batch_normalize:
        found["batch_norm_factor"] = _factor(at, w_N, level)
    return _named(f"{PREFIX}rollout_is_", found)


def legacy_importance(
    numerator_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    *,
    level: Level,
    upper: float,
    batch_normalize: bool = False,
) -> Metrics:
    """``rollout_is_*`` before IcePop came: all of raw weights, std and eff_sample_size clamped to [1/upper, upper]."""
    at = ValidTokens(valid_N, row_N, length_B)
    log_ratio_L, raw_N = _weights(at, numerator_N - rollout_N, level)
    found = _weight_metrics(at, level, log_ratio_L, raw_N, raw_N, low=1 / upper, high=upper, spread_from=1 / upper)
    if batch_normalize:
        found["batch_norm_factor"] = _factor(at, raw_N.clamp(max=upper), level)
    return _named(f"{PREFIX}rollout_is_", found)


def _weights(at: ValidTokens, d_N: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """The log-ratio of tokens [N] or rows [B], and exp of it clamped, at the tokens."""
    match level:
        case Level.token:
            return d_N, _clamped(d_N).exp()
        case Level.sequence:
            log_ratio_B = at.sum_rows(d_N)
        case Level.geometric:
            log_ratio_B = at.mean_rows(d_N)
    return log_ratio_B, at.spread(_clamped(log_ratio_B).exp())


def _weight_metrics(
    at: ValidTokens,
    level: Level,
    log_ratio_L: Tensor,
    raw_N: Tensor,
    w_N: Tensor,
    *,
    low: float,
    high: float,
    spread_from: float,
) -> dict[str, Tensor | float]:
    """What weights and the ratios of legacy rejection have in common; std and ESS clamp w to [spread_from, high]."""
    if level is Level.token:
        valid_M = at.pick(w_N)
        found: dict[str, Tensor | float] = {
            "max": valid_M.max(),
            "min": valid_M.min(),
            "ratio_fraction_high": _share(at, raw_N > high, w_N.dtype),
            "ratio_fraction_low": _share(at, raw_N < low, w_N.dtype),
        }
    else:
        found = {
            "max": log_ratio_L.max().clamp(max=LOG_RATIO_CLAMP).exp(),
            "min": log_ratio_L.min().exp(),
            "ratio_fraction_high": _row_share(log_ratio_L > _log32(high)),
            "ratio_fraction_low": _row_share(log_ratio_L < _log32(low)),
        }
    clamped_N = w_N.clamp(spread_from, high)
    normalised_N = clamped_N / (at.mean(clamped_N) + TINY)
    squares = float(at.mean(normalised_N.square()))
    seq_B, raw_B = at.mean_rows(w_N), at.mean_rows(raw_N)
    return found | {
        "mean": at.mean(w_N),
        "std": _std(at, clamped_N),
        "eff_sample_size": 1 / squares if squares > 0 else 0.0,
        "seq_mean": seq_B.mean(),
        "seq_std": _std_rows(seq_B),
        "seq_max": seq_B.max(),
        "seq_min": seq_B.min(),
        "seq_max_deviation": (seq_B - 1).abs().max(),
        "seq_fraction_high": _row_share(raw_B > high),
        "seq_fraction_low": _row_share(raw_B < low),
    }


def _factor(at: ValidTokens, w_N: Tensor, level: Level) -> float:
    """Mean weight of tokens, or over the rows that have any of the row's mean weight; 1 if that is (almost) 0."""
    mean = float(at.mean(w_N) if level is Level.token else at.mean_rows(w_N)[at.filled_B].mean())
    return mean if mean > TINY else 1.0


# -- rejection -----------------------------------------------------------------------------------------------------


def statistic(at: ValidTokens, d_N: Tensor, option: RsOption) -> Tensor:
    """What an option's bounds act on, of tokens [N] or rows [B]: k1 = -L, k2 = L^2/2, k3 = exp(L) - 1 - L.

    k1 is minus the log-ratio, so its bounds are bounds on rollout/numerator.
    """
    L_N = _clamped(d_N)
    match option:
        case RsOption.token_k1 | RsOption.seq_sum_k1 | RsOption.seq_mean_k1:
            k_N = -L_N
        case RsOption.token_k2 | RsOption.seq_sum_k2 | RsOption.seq_mean_k2 | RsOption.seq_max_k2:
            k_N = 0.5 * L_N**2
        case RsOption.token_k3 | RsOption.seq_sum_k3 | RsOption.seq_mean_k3 | RsOption.seq_max_k3:
            k_N = L_N.exp() - 1 - L_N
    match option:
        case RsOption.token_k1 | RsOption.token_k2 | RsOption.token_k3:
            return k_N
        case RsOption.seq_sum_k1 | RsOption.seq_sum_k2 | RsOption.seq_sum_k3:
            return at.sum_rows(k_N)
        case RsOption.seq_mean_k1 | RsOption.seq_mean_k2 | RsOption.seq_mean_k3:
            return at.mean_rows(k_N)
        case RsOption.seq_max_k2 | RsOption.seq_max_k3:
            return at.highest(k_N, empty=0.0)


def rejection(
    numerator_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    *,
    option: RsOption,
    upper: float,
    lower: float | None = None,
) -> Metrics:
    """``rollout_rs_{option}_*`` of one option; rows without tokens are left out.

    k1: bounds are given as ratios (``lower`` None: 1/upper) and act as logarithms; k2, k3: only ``upper``. Kept is
    low <= statistic <= high. std clamps the statistic to [low or 0, high]; mean and std weigh rows by their tokens.
    masked_fraction: rejected tokens; seq_masked_fraction: rows that have one.
    """
    if lower is not None and not option.two_sided:
        raise ConfigError(f"{option.name} has no lower bound, only an upper one; lower={lower:g} was given")
    at = ValidTokens(valid_N, row_N, length_B)
    low, high = 0.0, upper
    if option.two_sided:
        low, high = math.log(1 / upper if lower is None else lower), math.log(upper)
    stat_L = statistic(at, numerator_N - rollout_N, option)
    stat_N = stat_L if option.of_tokens else at.spread(stat_L)
    above_N, below_N = stat_N > high, (stat_N < low) & option.two_sided
    rejected_N = (above_N | below_N) & valid_N
    row_B = (at.mean_rows(stat_L) if option.of_tokens else stat_L)[at.filled_B]
    row_high, row_low = _row_share(row_B > high), _row_share((row_B < low) & option.two_sided)
    ends_L = at.pick(stat_L) if option.of_tokens else row_B
    found = {
        "mean": at.mean(stat_N),
        "max": ends_L.max(),
        "min": ends_L.min(),
        "fraction_high": _share(at, above_N, stat_N.dtype) if option.of_tokens else row_high,
        "fraction_low": _share(at, below_N, stat_N.dtype) if option.of_tokens else row_low,
        "std": _std(at, stat_N.clamp(low, high)),
        "seq_mean": row_B.mean(),
        "seq_std": _std_rows(row_B),
        "seq_max": row_B.max(),
        "seq_min": row_B.min(),
        "seq_max_deviation": row_B.abs().max(),
        "seq_fraction_high": row_high,
        "masked_fraction": _share(at, rejected_N, stat_N.dtype),
        "seq_masked_fraction": at.any_rows(rejected_N)[at.filled_B].to(stat_N.dtype).mean(),
    }
    if option.two_sided:
        found["seq_fraction_low"] = row_low
    return _named(f"{PREFIX}rollout_rs_{option.name}_", found)


def rejection_total(
    keep_N: Tensor, valid_N: Tensor, row_N: Tensor, length_B: Tensor, *, dtype: torch.dtype = torch.float64
) -> Metrics:
    """``rollout_rs_masked_fraction``: share of valid tokens that all options together reject (keep_N: bool [N]);
    ``rollout_rs_seq_masked_fraction``: share of all rows, with or without tokens, that have such a token.
    """
    at = ValidTokens(valid_N, row_N, length_B)
    rejected_N = valid_N & ~keep_N
    found = {
        "masked_fraction": _share(at, rejected_N, dtype),
        "seq_masked_fraction": _row_share(at.any_rows(rejected_N)),
    }
    return _named(f"{PREFIX}rollout_rs_", found)


def legacy_rejection(
    numerator_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    *,
    level: Level,
    upper: float,
    lower: float | None = None,
) -> Metrics:
    """``rollout_rs_*`` of the ratio (product or geometric mean for rows) against [lower or 1/upper, upper].

    At row levels seq_masked_fraction is of all rows, those without tokens having the ratio 1.
    """
    at = ValidTokens(valid_N, row_N, length_B)
    log_ratio_L, raw_N = _weights(at, numerator_N - rollout_N, level)
    low = 1 / upper if lower is None else lower
    rejected_N = (raw_N < low) | (raw_N > upper)
    found = _weight_metrics(at, level, log_ratio_L, raw_N, raw_N, low=low, high=upper, spread_from=low)
    found["masked_fraction"] = _share(at, rejected_N, raw_N.dtype)
    if level is Level.token:
        found["seq_masked_fraction"] = _row_share(at.any_rows(rejected_N))
    else:
        ratio_B = _clamped(log_ratio_L).exp()
        found["seq_masked_fraction"] = _row_share((ratio_B < low) | (ratio_B > upper))
    return _named(f"{PREFIX}rollout_rs_", found)


def legacy_veto(
    numerator_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    *,
    threshold: float | None,
) -> Metrics:
    """Share of valid tokens with d < log(threshold), strictly, and of all rows that have one; 0 without a threshold."""
    at, d_N = ValidTokens(valid_N, row_N, length_B), numerator_N - rollout_N
    bad_N = torch.zeros_like(valid_N) if threshold is None else (d_N < _log32(threshold)) & valid_N
    found = {
        "veto_fraction": _row_share(at.any_rows(bad_N)),
        "catastrophic_token_fraction": _share(at, bad_N, d_N.dtype),
    }
    return _named(f"{PREFIX}rollout_is_", found)


# -- shared --------------------------------------------------------------------------------------------------------


def _clamped(x: Tensor) -> Tensor:
    return x.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def _std(at: ValidTokens, x_N: Tensor) -> Tensor | float:
    """Of tokens, biased; 0 for a single one."""
    if at.count < 2:
        return 0.0
    return (at.mean(x_N.square()) - at.mean(x_N).square()).clamp(min=0).sqrt()


def _std_rows(x_B: Tensor) -> Tensor | float:
    """Unbiased; 0 for a single row."""
    return x_B.std() if len(x_B) > 1 else 0.0


def _share(at: ValidTokens, flag_N: Tensor, dtype: torch.dtype) -> Tensor:
    return at.mean(flag_N.to(dtype))


def _row_share(flag_B: Tensor) -> Tensor:
    """In float32, whatever the inputs' dtype."""
    return flag_B.float().mean()


def _log32(bound: float) -> float:
    """log of a bound in float32, which verl compares with."""
    return float(torch.tensor(bound).log())


def _named(prefix: str, found: dict[str, Tensor] | dict[str, Tensor | float]) -> Metrics:
    return {f"{prefix}{name}": float(value) for name, value in found.items()}
