"""Advantages from rewards of groups (all responses to one prompt)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.errors import DataError
from trimtab.spec import Baseline, Scale


@dataclass(frozen=True)
class Advantages:
    """``advantage_B`` float64; ``equal_B`` True for rows whose whole group has one reward."""

    advantage_B: Tensor
    equal_B: Tensor


def group_advantages(
    reward_B: Tensor, group_B: Tensor, *, baseline: Baseline, scale: Scale, epsilon: float = 1e-6
) -> Advantages:
    """Centre each reward on its group and scale by the group's spread.

    group_mean: A_i = r_i - mean(r); leave_one_out: A_i = r_i - mean of the other G - 1; none: A_i = r_i.
    std: A_i / (s + epsilon) with s the sample standard deviation (divisor G - 1). A group is *equal* when its
    largest reward is its smallest (never by a computed spread, which rounding makes nonzero); its advantages are
    exactly 0 under a baseline, and it is not scaled. Groups may have any size and order; a group of one has no
    baseline and counts as equal.

    reward_B: rewards, any float dtype; group_B: int64 group numbers. Source: arXiv:2402.03300 (GRPO),
    arXiv:2402.14740 (leave-one-out), arXiv:2503.20783 (without the standard deviation).
    Raises DataError for a group whose spread is no finite float64: its advantages would be 0 or NaN.
    """
    reward = reward_B.double()
    number, group = torch.unique(group_B, return_inverse=True)
    zeros = torch.zeros(len(number), dtype=torch.float64)
    size = zeros.scatter_add(0, group, torch.ones_like(reward))
    mean = zeros.scatter_add(0, group, reward) / size
    high = zeros.scatter_reduce(0, group, reward, "amax", include_self=False)
    low = zeros.scatter_reduce(0, group, reward, "amin", include_self=False)
    equal_B = (high == low)[group]
    centred = reward - mean[group]
    spread = (zeros.scatter_add(0, group, centred**2) / (size - 1).clamp(min=1)).sqrt()
    _check_spread(number, low, high, spread)
    match baseline:
        case Baseline.group_mean:
            advantage = torch.where(equal_B, 0.0, centred)
        case Baseline.leave_one_out:
            factor = size / (size - 1).clamp(min=1)
            advantage = torch.where(equal_B, 0.0, centred * factor[group])
        case Baseline.none:
            advantage = reward
    match scale:
        case Scale.std:
            advantage = torch.where(equal_B, advantage, advantage / (spread[group] + epsilon))
        case Scale.none:
            pass
    return Advantages(advantage, equal_B)


def _check_spread(number: Tensor, low: Tensor, high: Tensor, spread: Tensor) -> None:
    for g in (~spread.isfinite()).nonzero().flatten().tolist():
        raise DataError(
            f"group {int(number[g])} has rewards from {float(low[g]):g} to {float(high[g]):g}, whose spread is no "
            "finite number; rewards must be finite and well below 1e150"
        )
