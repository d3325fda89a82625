"""What PipelineRL logs of its step, by its names.

Commit 58d39345, ``pipelinerl/finetune/rl/__init__.py``. Old is the rollout policy, new the current one. Most metrics
are Σ over rows of the row's mean (divided by the number of samples later); min, max and sums are over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from trimtab.peers.segments import only, row_count, row_mean


class PolicyLoss(Enum):
    """``policy_loss``."""

    ppo = "ppo"
    reinforce = "reinforce"
    gspo = "gspo"


@dataclass(frozen=True)
class Options:
    """The options of ``RLConfig`` that its metrics depend on, by its names."""

    policy_loss: PolicyLoss = PolicyLoss.ppo
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    clamp_log_ratio_ref_new_value: float = 10.0


def linear_decay(step: int, max_step: int, initial: float, final: float) -> float:
    """A coefficient of the KL or entropy term: initial at step 0, final at ``max_step``, linear between."""
    return initial + (final - initial) * step / max_step


def token_weights(
    row_N: Tensor,
    *,
    batch_size: int,
    group_tokens_B: Tensor | None = None,
    overflow_B: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Coefficient of each token's loss, [N]: 1/batch_size, or 1/(mean tokens of the group) if ``group_tokens_B``.

    ``overflow_B``: 1 for rows cut before their end, whose weight is 0 (``overlong_filtering``).
    """
    weight_N = torch.full(row_N.shape, 1.0 / batch_size, dtype=dtype)
    if group_tokens_B is not None:
        weight_N = 1.0 / group_tokens_B.to(dtype)[row_N]
    return weight_N if overflow_B is None else weight_N * (1.0 - overflow_B.to(dtype)[row_N])


def policy_weights(
    advantage_B: Tensor, reward_B: Tensor, *, use_advantages: bool = True, relu_log_p_weights: bool = False
) -> Tensor:
    """What multiplies the ratio in ppo and reinforce, [B]: advantages or rewards, negative ones as 0 if relu."""
    weight_B = advantage_B if use_advantages else reward_B
    return weight_B.clamp(min=0) if relu_log_p_weights else weight_B


@dataclass(frozen=True)
class _Batch:
    valid_N: Tensor
    row_N: Tensor
    labels_B: Tensor

    def sum(self, x_N: Tensor) -> float:
        return float(only(x_N, self.valid_N).sum())

    def mean(self, x_N: Tensor) -> float:
        """Σ over valid tokens of value / labels of its row."""
        return self.sum(x_N / self.labels_B.to(x_N.dtype)[self.row_N])

    def extremes(self, name: str, x_N: Tensor) -> dict[str, float]:
        x_M = x_N[self.valid_N]
        return {f"max_{name}": float(x_M.max()), f"min_{name}": float(x_M.min())}


def step_metrics(
    *,
    current_N: Tensor,
    rollout_N: Tensor,
    reference_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    advantage_B: Tensor,
    reward_B: Tensor,
    entropy_N: Tensor,
    weight_N: Tensor,
    loss: float | Tensor,
    options: Options,
    kl_coef: float = 0.0,
    entropy_bonus_coef: float = 0.0,
    labels_B: Tensor | None = None,
    input_size: int | None = None,
) -> dict[str, float]:
    """``stats`` of one (micro-)batch. N flat tokens, log-probs in nats; ``weight_N``: see ``token_weights``.

    ``labels_B``: tokens of the row that means divide by; empty: its valid ones. ``input_size``: tokens of the forward,
    prompts and padding included; empty: N. A batch without a valid token has ``input_size`` only.
    """
    size = float(row_N.numel() if input_size is None else input_size)
    if not bool(valid_N.any()):
        return {"input_size": size}
    rows = len(length_B)
    labels_B = row_count(valid_N, row_N, rows) if labels_B is None else labels_B
    batch = _Batch(valid_N, row_N, labels_B)
    new_N, old_N, ref_N = (only(x_N, valid_N) for x_N in (current_N, rollout_N, reference_N))
    reward_N, advantage_N = (x_B.to(new_N.dtype)[row_N] for x_B in (reward_B, advantage_B))
    x_N, bound = ref_N - new_N, options.clamp_log_ratio_ref_new_value
    clamped_N = x_N.clamp(-bound, bound)
    kl_N = clamped_N.exp() - clamped_N - 1
    return {
        **dict.fromkeys(("loss", "max_loss", "min_loss"), float(loss)),
        "reward": batch.mean(reward_N),
        **batch.extremes("reward", reward_N),
        "entropy": batch.mean(only(entropy_N, valid_N)),
        "old_logprobs": batch.mean(old_N),
        "new_logprobs": batch.mean(new_N),
        "ref_logprobs": batch.mean(ref_N),
        "advantage": batch.mean(advantage_N),
        **batch.extremes("advantage", advantage_N),
        "kl": batch.mean(kl_N),
        **batch.extremes("kl", kl_N),
        **_ratio_metrics(batch, new_N - old_N, rows, options),
        "ratio_ref_new": batch.mean(x_N.exp()),
        "ratio_ref_old": batch.mean((ref_N - old_N).exp()),
        "clamp_log_ratio_ref_new_indicator": batch.mean((x_N.abs() > bound).to(x_N.dtype)),
        "token_weight": batch.mean(weight_N.detach()),
        **batch.extremes("token_weight", weight_N.detach()),
        "kl_coef": rows * kl_coef,
        "entropy_bonus_coef": rows * entropy_bonus_coef,
        "num_output_tokens_sum": float(valid_N.sum()),
        "input_size": size,
    }


def ratio_metrics(
    *,
    current_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    options: Options,
    labels_B: Tensor | None = None,
) -> dict[str, float]:
    """The part of ``step_metrics`` about current/rollout, and ``rl/ess``; {} for a batch without a valid token."""
    if not bool(valid_N.any()):
        return {}
    rows = len(length_B)
    labels_B = row_count(valid_N, row_N, rows) if labels_B is None else labels_B
    apart_N = only(current_N, valid_N) - only(rollout_N, valid_N)
    return _ratio_metrics(_Batch(valid_N, row_N, labels_B), apart_N, rows, options)


def ess(ratio_sum: float, ratio_squared_sum: float, tokens: float) -> float:
    """``rl/ess``: (Σr)² / Σr² / tokens, over a step's tokens; 0 when all ratios are 0."""
    return ratio_sum**2 / ratio_squared_sum / tokens if ratio_squared_sum > 0 else 0.0


def _ratio_metrics(batch: _Batch, apart_N: Tensor, rows: int, options: Options) -> dict[str, float]:
    """reinforce clamps the ratio before it is measured; the clamp indicator ignores the advantage's sign."""
    low, high = 1 - options.epsilon_low, 1 + options.epsilon_high
    ratio_N = apart_N.exp()
    match options.policy_loss:
        case PolicyLoss.ppo:
            bites_N = ratio_N.clamp(low, high) != ratio_N
        case PolicyLoss.reinforce:
            bites_N = ratio_N > high
            ratio_N = ratio_N.clamp(0, high)
        case PolicyLoss.gspo:
            row_B = row_mean(apart_N, batch.valid_N, batch.row_N, rows).exp()
            bites_N = (row_B.clamp(low, high) != row_B)[batch.row_N]
    total, squares = batch.sum(ratio_N), batch.sum(ratio_N * ratio_N)
    return {
        "kl_new_old": batch.mean(apart_N.exp() - apart_N - 1),
        "mean_abs_log_ratio_new_old": batch.mean(apart_N.abs()),
        "ratio_new_old": batch.mean(ratio_N),
        "ratio_new_old_sum": total,
        "ratio_new_old_squared_sum": squares,
        "clamp_log_ratio_new_old_indicator": batch.mean(bites_N.to(apart_N.dtype)),
        "rl/ess": ess(total, squares, float(batch.valid_N.sum())),
    }
