"""Warnings: begun at once, not repeated each step."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from toy import ToyPolicy, toy_batch

from trimtab.config import compose
from trimtab.train.watch import Watch


def test_rows_without_log_probs_are_said_with_their_share_and_not_at_every_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = toy_batch(ToyPolicy(), prompts=5, group=4)
    spoilt_N = torch.where((batch.row_N == 3) | (batch.row_N == 7), math.nan, batch.rollout_logp_N)
    watch = Watch(compose([]).mis)
    with caplog.at_level(logging.WARNING):
        watch(1, batch, {})
        assert caplog.text == ""
        for step in range(2, 150):
            watch(step, replace(batch, rollout_logp_N=spoilt_N), {"train/mis_missing_logprob_count": 5.0})
    assert [record.message.split(" of")[0] for record in caplog.records] == ["step 2: 10%", "step 102: 10%"]


@pytest.mark.parametrize(
    ("level", "kl", "said"), [("sequence", 0.011, True), ("sequence", 0.009, False), ("token", 9.0, False)]
)
def test_sequence_weights_about_to_saturate_are_said(
    level: str, kl: float, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        metrics = {"train/mis_k3_kl": kl, "train/response_length": 1000.0}
        Watch(compose([f"level={level}"]).mis)(1, toy_batch(ToyPolicy()), metrics)
    assert ("sequence weights saturate" in caplog.text) is said
