"""Advantages against loops over plain floats."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from trimtab.errors import DataError
from trimtab.objective.advantage import group_advantages
from trimtab.spec import Baseline, Scale

REWARDS = [1.0, 0.0, 0.25, 0.5, 0.1, 0.1, 0.1, 1.0, 3.0]
GROUPS = [7, 7, 2, 7, 4, 4, 4, 2, 9]  # unordered, of sizes 3, 2, 3 (all equal) and 1


def loop(baseline: Baseline, scale: Scale, epsilon: float) -> list[float]:
    out = []
    for reward, group in zip(REWARDS, GROUPS, strict=True):
        members = [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group]
        equal = len(set(members)) == 1
        if baseline is Baseline.none:
            advantage = reward
        elif equal:
            advantage = 0.0
        elif baseline is Baseline.group_mean:
            advantage = reward - statistics.fmean(members)
        else:
            advantage = reward - (sum(members) - reward) / (len(members) - 1)
        if scale is Scale.std and not equal:
            advantage /= statistics.stdev(members) + epsilon
        out.append(advantage)
    return out


@pytest.mark.parametrize("baseline", list(Baseline))
@pytest.mark.parametrize("scale", list(Scale))
def test_advantages_equal_a_loop(baseline: Baseline, scale: Scale) -> None:
    result = group_advantages(
        torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS), baseline=baseline, scale=scale, epsilon=1e-4
    )
    assert result.advantage_B.tolist() == pytest.approx(loop(baseline, scale, 1e-4), rel=1e-12, abs=1e-15)


def test_equal_groups_are_found_by_max_and_min_not_by_a_rounded_spread() -> None:
    reward_B = torch.full((8,), 0.1)  # float32 0.1: its computed mean need not be 0.1
    result = group_advantages(
        reward_B, torch.zeros(8, dtype=torch.int64), baseline=Baseline.group_mean, scale=Scale.std
    )
    assert result.equal_B.all()
    assert result.advantage_B.tolist() == [0.0] * 8


def test_leave_one_out_is_the_centred_reward_times_g_over_g_minus_1() -> None:
    reward_B, group_B = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]), torch.zeros(5, dtype=torch.int64)
    loo = group_advantages(reward_B, group_B, baseline=Baseline.leave_one_out, scale=Scale.none).advantage_B
    mean = group_advantages(reward_B, group_B, baseline=Baseline.group_mean, scale=Scale.none).advantage_B
    assert torch.allclose(loo, mean * 5 / 4, rtol=1e-12)
    assert math.isclose(float(loo.sum()), 0.0, abs_tol=1e-12)


@pytest.mark.parametrize("baseline", list(Baseline))
@pytest.mark.parametrize("scale", list(Scale))
@pytest.mark.parametrize(
    ("rewards", "found"),
    [
        ([1e308, -1e308, 0.0, 0.0], r"-1e\+308 to 1e\+308"),
        ([1e200, 0.0, 0.0, 0.0], r"0 to 1e\+200"),
        ([1e308, 1e308, 1e308, 1e308], r"1e\+308 to 1e\+308"),
        ([math.inf, math.inf, math.inf, math.inf], "inf to inf"),
        ([math.nan, 0.0, 0.0, 0.0], "nan to nan"),
    ],
)
def test_a_spread_that_overflows_is_refused(rewards, found, baseline, scale) -> None:
    reward_B = torch.tensor([1.0, 2.0, *rewards], dtype=torch.float64)
    group_B = torch.tensor([3, 3, 8, 8, 8, 8])
    with pytest.raises(DataError, match=f"group 8 has rewards from {found}"):
        group_advantages(reward_B, group_B, baseline=baseline, scale=scale)


def test_the_widest_float32_rewards_are_scaled() -> None:
    top = torch.finfo(torch.float32).max
    reward_B, group_B = torch.tensor([top, -top, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64)
    result = group_advantages(reward_B, group_B, baseline=Baseline.group_mean, scale=Scale.std)
    assert result.advantage_B.tolist() == pytest.approx([math.sqrt(1.5), -math.sqrt(1.5), 0.0, 0.0])
