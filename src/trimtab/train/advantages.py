"""Advantages of a batch as the run's settings say, and the rows that take no part."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.batch import Batch
from trimtab.objective.advantage import group_advantages
from trimtab.objective.overlong import overlong_penalty
from trimtab.spec import AdvantageSpec, EqualGroups, Overlong


def advantages(
    batch: Batch, cut_B: Tensor, spec: AdvantageSpec, max_tokens: int
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Advantages, the rows to leave out, and the shares of equal groups; ``cut_B``: responses cut at max_tokens."""
    reward_B, metrics = batch.reward_B, dict[str, float]()
    dropped_B = torch.zeros_like(cut_B)
    match spec.overlong:
        case Overlong.keep:
            pass
        case Overlong.drop:
            dropped_B = cut_B
        case Overlong.punish:
            penalty_B = overlong_penalty(batch.length_B, max_tokens, spec.overlong_buffer, spec.overlong_penalty)
            reward_B, metrics = reward_B + penalty_B, {"train/overlong_penalty": float(penalty_B.mean())}
    result = group_advantages(reward_B, batch.group_B, baseline=spec.baseline, scale=spec.scale, epsilon=spec.epsilon)
    match spec.equal_groups:
        case EqualGroups.keep:
            pass
        case EqualGroups.drop:
            dropped_B = dropped_B | result.equal_B
    metrics["train/equal_group_fraction"] = float(result.equal_B.double().mean())
    return result.advantage_B, dropped_B, metrics
