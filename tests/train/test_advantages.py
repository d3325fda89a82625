"""Which rows a step leaves out, and what an overlong response costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toy import ToyPolicy, toy_batch

from trimtab.batch import Batch
from trimtab.spec import AdvantageSpec, Baseline, EqualGroups, Overlong, Scale
from trimtab.train.advantages import advantages

PLAIN = AdvantageSpec(baseline=Baseline.none, scale=Scale.none)


def batch_of(lengths: list[int], rewards: list[float]) -> Batch:
    """Rows of given response lengths, two a group."""
    rows = len(lengths)
    whole = toy_batch(ToyPolicy(), prompts=rows, group=1)
    return replace(whole, length_B=torch.tensor(lengths), reward_B=torch.tensor(rewards),
                   group_B=torch.arange(rows) // 2)  # fmt: skip


def test_a_punished_response_loses_reward() -> None:
    """DAPO, equation 13, with max_tokens 10 and a buffer of 4: 0 up to 6, half at 8, all at 10."""
    spec = replace(PLAIN, overlong=Overlong.punish, overlong_buffer=4, overlong_penalty=1.0)
    batch = batch_of([6, 8, 10, 7], [1.0, 1.0, 1.0, 0.0])
    advantage_B, dropped_B, metrics = advantages(batch, batch.length_B == 10, spec, 10)
    assert advantage_B.tolist() == [1.0, 0.5, 0.0, -0.25]
    assert not dropped_B.any()
    assert metrics["train/overlong_penalty"] == pytest.approx((0 - 0.5 - 1 - 0.25) / 4)


def test_dropped_are_those_cut_and_those_of_equal_groups() -> None:
    batch = batch_of([6, 10, 3, 4], [1.0, 0.0, 1.0, 1.0])
    cut_B = batch.length_B == 10
    kept = advantages(batch, cut_B, PLAIN, 10)[1]
    cut = advantages(batch, cut_B, replace(PLAIN, overlong=Overlong.drop), 10)[1]
    both = advantages(batch, cut_B, replace(PLAIN, overlong=Overlong.drop, equal_groups=EqualGroups.drop), 10)[1]
    assert kept.tolist() == [False] * 4
    assert cut.tolist() == [False, True, False, False]
    assert both.tolist() == [False, True, True, True]
