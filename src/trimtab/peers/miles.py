"""miles' metrics (commit 31f1ca96; slime 624b824a computes the same unless said otherwise).

Most are token-shaped [N]: each is averaged over a row's valid tokens, then over all rows (``sample_mean``). Numbers of
a row stand at each of its tokens. d = train - rollout in nats, train being the trainer's proximal policy. Every
function takes float32 or float64 [N] and computes in that dtype unless it says float32. Shapes as in ``rows``.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.peers.rows import TINY, ValidTokens
from trimtab.spec import Level, TisMode
from trimtab.stat import LOG_RATIO_CLAMP

KL_CLAMP = 10.0

TokenMetrics = dict[str, Tensor]

E = TypeVar("E", bound=Enum)


def sample_mean(metrics: TokenMetrics, valid_N: Tensor, row_N: Tensor, length_B: Tensor) -> dict[str, float]:
    """What is logged of token-shaped ones: mean over rows of the mean over valid tokens; an empty row counts as 0."""
    at = ValidTokens(valid_N, row_N, length_B)
    return {name: float(at.mean_rows_exact(x_N).mean()) for name, x_N in metrics.items()}


# -- the masked importance sampling example, prefix mis_ -----------------------------------------------------------


def bounds(
    tis: tuple[float | None, float], rs: tuple[float | None, float | None]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(lower, upper) of weights and of rejection: a lower bound left empty is 1/upper, an rs bound the tis one."""
    low, high = tis
    low = 1 / high if low is None else low
    return (low, high), (low if rs[0] is None else rs[0], high if rs[1] is None else rs[1])


def mode(name: str) -> TisMode:
    """``tis_mode``: truncate, clip or mask."""
    return _one_of("tis_mode", name, (TisMode.truncate, TisMode.clip, TisMode.mask))


def level(option: str, name: str) -> Level:
    """``tis_level`` or ``rs_level``: token, sequence or geometric."""
    return _one_of(option, name, tuple(Level))


def check_bounds(mode: TisMode, lower: float, upper: float) -> None:
    """Raise ConfigError unless lower < upper where both are bounds (clip, mask)."""
    if mode is not TisMode.truncate and not lower < upper:
        raise ConfigError(
            f"tis_lower_bound={lower:g} and tis_upper_bound={upper:g}: tis_mode={mode.value} needs lower < upper; "
            "for example 0.5 and 2.0"
        )


def _one_of(option: str, name: str, allowed: tuple[E, ...]) -> E:
    for one in allowed:
        if one.value == name:
            return one
    raise ConfigError(f"{option}={name!r} is refused; allowed: {', '.join(str(one.value) for one in allowed)}")


def off_policy(train_N: Tensor, rollout_N: Tensor, valid_N: Tensor, row_N: Tensor, length_B: Tensor) -> TokenMetrics:
    """Perplexities, KL estimates and chi-squared; log perplexity = -mean log-prob of a row, 0 without tokens.

    Of tokens: kl = -d, k3_kl = exp(d) - d - 1, not clamped. Of rows: chi2_token = mean exp(2 clamp d) - 1 (-1 without
    tokens), chi2_seq = exp(2 clamp(sum d)) - 1, clamps to +-20.
    """
    at, d_N = ValidTokens(valid_N, row_N, length_B), train_N - rollout_N
    training_B, rollout_B = -at.mean_rows_exact(train_N), -at.mean_rows_exact(rollout_N)
    diff_B = training_B - rollout_B
    of_rows = {
        "training_log_ppl": training_B,
        "training_ppl": training_B.exp(),
        "rollout_log_ppl": rollout_B,
        "rollout_ppl": rollout_B.exp(),
        "log_ppl_diff": diff_B,
        "log_ppl_abs_diff": diff_B.abs(),
        "ppl_ratio": diff_B.exp(),
        "chi2_token": at.mean_rows_exact(_clamped(d_N).exp().square()) - 1,
        "chi2_seq": (2 * _clamped(at.sum_rows(d_N))).exp() - 1,
    }
    found = {name: at.spread(x_B) for name, x_B in of_rows.items()}
    return _named(found | {"kl": -d_N, "k3_kl": d_N.exp() - d_N - 1})


def importance(
    train_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    *,
    level: Level,
    mode: TisMode,
    lower: float,
    upper: float,
    batch_normalize: bool = False,
) -> TokenMetrics:
    """``mis_tis_*`` and ``mis_is_ratio_*``: before_bound = exp(clamp(level's log-ratio)), at every token, valid or not.

    after_bound: clamped to [0 or lower, upper] (truncate, clip) or as it is (mask), 0 at tokens that are not valid;
    shares are strict. is_ratio_mean_after_tis_rs is after_bound: no mask is applied. batch_norm_factor: mean weight of
    tokens, or over rows of the row's mean weight, an empty one counting as 0; then divided by. ``*_final``: of a row's
    weights after that, 0 without tokens.
    """
    at = ValidTokens(valid_N, row_N, length_B)
    raw_N = _ratio(at, train_N - rollout_N, level)
    low_N, high_N = (raw_N < lower).to(raw_N.dtype), (raw_N > upper).to(raw_N.dtype)
    match mode:
        case TisMode.truncate:
            w_N, shares = raw_N.clamp(0, upper), {"tis_truncate_fraction": high_N}
        case TisMode.clip:
            w_N = raw_N.clamp(lower, upper)
            shares = {"tis_clip_fraction_low": low_N, "tis_clip_fraction_high": high_N}
        case TisMode.mask:
            w_N, shares = raw_N, {"tis_mask_fraction_low": low_N, "tis_mask_fraction_high": high_N}
        case TisMode.off | TisMode.zero:
            raise ConfigError(f"miles has no mis.tis_mode={mode.name}; it has truncate, clip and mask")
    w_N = w_N.where(valid_N, 0.0)
    found = {"tis_weight_before_bound": raw_N, **shares, "tis_weight_after_bound": w_N}
    found["is_ratio_mean_after_tis_rs"] = w_N
    if batch_normalize:
        factor = _factor(at, w_N, level)
        found["batch_norm_factor"] = factor.expand_as(w_N)
        w_N = w_N / factor
    finals = {"mean": at.mean_rows_exact(w_N), "min": at.lowest(w_N, 0.0), "max": at.highest(w_N, 0.0)}
    return _named(found | {f"is_ratio_{name}_final": at.spread(x_B) for name, x_B in finals.items()})


def rejection(
    train_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    *,
    level: Level,
    lower: float,
    upper: float,
    veto: float | None,
) -> TokenMetrics:
    """``mis_rs_*``: where the level's ratio, clamped to exp(+-20), is outside the bounds, strictly.

    With a veto: valid tokens with d < log(veto), not clamped, and the rows that have one.
    """
    at, d_N = ValidTokens(valid_N, row_N, length_B), train_N - rollout_N
    ratio_N = _ratio(at, d_N, level)
    found = {"rs_mask_fraction_low": ratio_N < lower, "rs_mask_fraction_high": ratio_N > upper}
    if veto is not None:
        # miles takes this logarithm in float32
        bad_N = (d_N < float(torch.tensor(veto).log())) & valid_N
        found["rs_catastrophic_token_fraction"] = bad_N
        found["rs_catastrophic_seq_fraction"] = at.spread(at.any_rows(bad_N))
    return _named({name: flag_N.to(d_N.dtype) for name, flag_N in found.items()})


# -- built in ------------------------------------------------------------------------------------------------------


def built_in(train_N: Tensor, rollout_N: Tensor, *, lower: float, upper: float) -> TokenMetrics:
    """``tis`` = exp(d), not clamped; ``tis_clipfrac``: its weight differs from it; ``tis_abs`` = |tis - 1|.

    The same for vanilla TIS, which clamps to [lower, upper], and IcePop, which puts 0 outside of them.
    """
    ratio_N = (train_N - rollout_N).exp()
    inside_N = (ratio_N >= lower) & (ratio_N <= upper)
    return {"tis": ratio_N, "tis_clipfrac": (~inside_N).to(ratio_N.dtype), "tis_abs": (ratio_N - 1).abs()}


def mismatch(train_N: Tensor, rollout_N: Tensor, valid_N: Tensor | None = None, *, clamp: bool = True) -> TokenMetrics:
    """``train_rollout_logprob_abs_diff`` = |d| and ``train_rollout_kl`` = exp(d) - 1 - d in float32, at most 10.

    ``clamp``: d to +-20 before exp (miles; slime does not). With valid_N (what miles logs), 0 at other tokens and
    where a number is not finite. Bypass: miles puts rollout for train, so both are 0; slime the current policy.
    """
    abs_N = (train_N - rollout_N).abs()
    d_N = -(rollout_N.float() - train_N.float())
    if clamp:
        d_N = _finite(d_N, LOG_RATIO_CLAMP).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    kl_N = (d_N.exp() - 1 - d_N).clamp(-KL_CLAMP, KL_CLAMP)
    if valid_N is not None:
        abs_N, kl_N = (_finite(x_N, 0.0).where(valid_N, 0.0) for x_N in (abs_N, kl_N))
    return {"train_rollout_logprob_abs_diff": abs_N, "train_rollout_kl": kl_N}


def opsm(
    current_N: Tensor,
    old_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    *,
    advantage_N: Tensor,
    delta: float,
) -> dict[str, Tensor | float]:
    """``opsm_mask``: 0 at tokens with A < 0 in rows with mean(old - current) > delta, valid or not, else 1 [N].

    ``opsm_clipfrac``: sum over rows of masked tokens / valid tokens, which can exceed 1 each; in float32.
    """
    at = ValidTokens(valid_N, row_N, length_B)
    drop_N = (advantage_N < 0) & at.spread(at.mean_rows_exact(old_N - current_N) > delta)
    dropped_B = torch.zeros_like(length_B).index_add_(0, row_N, drop_N.to(length_B.dtype))
    total = torch.zeros((), dtype=torch.float32)
    for share in dropped_B.double() / at.count_B.clamp(min=1):
        total += share
    return {"opsm_mask": (~drop_N).float(), "opsm_clipfrac": float(total)}


def ppo_kl(
    current_N: Tensor, old_N: Tensor, valid_N: Tensor, row_N: Tensor, length_B: Tensor, *, gspo: bool = False
) -> Tensor:
    """old - current [N]; gspo: its mean over the row's valid tokens, at every token."""
    if not gspo:
        return old_N - current_N
    at = ValidTokens(valid_N, row_N, length_B)
    return at.spread(at.mean_rows_exact(old_N - current_N))


def policy_loss(
    current_N: Tensor,
    old_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    *,
    advantage_N: Tensor,
    clip_low: float,
    clip_high: float,
    gspo: bool = False,
) -> TokenMetrics:
    """``ppo_kl``, 0 at other tokens and where not finite; ``pg_clipfrac``: clipping makes the loss greater, with the
    ratio exp(clamp(-ppo_kl)) in float32; ``ois`` = exp(-ppo_kl), not clamped.
    """
    kl_N = ppo_kl(current_N, old_N, valid_N, row_N, length_B, gspo=gspo)
    kl_N = _finite(kl_N, 0.0).where(valid_N, 0.0)
    advantage_N = _finite(advantage_N, 0.0).where(valid_N, 0.0)
    ratio_N = _clamped(-kl_N.float()).exp()
    clipped_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantage_N > -ratio_N * advantage_N
    return {"ppo_kl": kl_N, "pg_clipfrac": clipped_N.to(kl_N.dtype), "ois": (-kl_N).exp()}


def ess_ratio(ppo_kl_N: Tensor, valid_N: Tensor, row_N: Tensor, length_B: Tensor) -> dict[str, float]:
    """``ess_ratio``: mean over rows of (sum w)^2 / (n sum w^2), w = exp(clamp(-ppo_kl)), float32; 0 if empty."""
    at = ValidTokens(valid_N, row_N, length_B)
    w_N = _clamped(_finite(-ppo_kl_N.float(), LOG_RATIO_CLAMP)).exp()
    squares_B = at.count_B.clamp(min=1) * at.sum_rows(w_N.square()).clamp(min=TINY)
    return {"ess_ratio": float((at.sum_rows(w_N).square() / squares_B).mean())}


# -- shared --------------------------------------------------------------------------------------------------------


def _ratio(at: ValidTokens, d_N: Tensor, level: Level) -> Tensor:
    match level:
        case Level.token:
            return _clamped(d_N).exp()
        case Level.sequence:
            return at.spread(_clamped(at.sum_rows(d_N)).exp())
        case Level.geometric:
            return at.spread(_clamped(at.mean_rows_exact(d_N)).exp())


def _factor(at: ValidTokens, w_N: Tensor, level: Level) -> Tensor:
    match level:
        case Level.token:
            mean = at.sum(w_N) / max(at.count, 1)
        case Level.sequence:
            mean = at.mean_rows_exact(w_N).mean()
        case Level.geometric:
            raise ConfigError(
                "miles refuses mis.tis_batch_normalize=true with mis.tis_level=geometric; use mis.tis_level=sequence"
            )
    return mean if mean > TINY else torch.ones_like(mean)


def _clamped(x: Tensor) -> Tensor:
    return x.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def _finite(x: Tensor, limit: float) -> Tensor:
    """NaN becomes 0, an infinity ``limit`` with its sign."""
    return x.nan_to_num(nan=0.0, posinf=limit, neginf=-limit)


def _named(found: TokenMetrics) -> TokenMetrics:
    return {f"mis_{name}": x_N for name, x_N in found.items()}
