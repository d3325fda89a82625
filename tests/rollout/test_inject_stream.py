"""Gaps on purpose around an engine that samples all the time."""

from __future__ import annotations

import math

import pytest
from rollout.tiny import prompt_of
from toy import END, ToyPolicy, ToyRollout, ToyStreaming

from trimtab.batch import Sampling
from trimtab.protocol import Streaming
from trimtab.rollout.inject import inject
from trimtab.spec import Mismatch, MismatchSpec


def test_streamed_groups_are_sampled_with_the_gap() -> None:
    """temperature: sampled and reported at T (1 + s), by the toy's own table in float64."""
    engine = ToyStreaming()
    rollout = inject(engine, MismatchSpec(Mismatch.temperature, 0.5))
    assert isinstance(rollout, Streaming) and rollout.restarts() == 0
    rollout.load(ToyPolicy().weights(), 3)
    rollout.submit(7, prompt_of(2), Sampling(5, 0.8, (END,), seed=1, samples_per_prompt=3))
    key, samples = rollout.finished() or (None, [])
    assert key == 7 and len(samples) == 3 and rollout.finished(wait=False) is None
    for sample in samples:
        before = 2
        for token, logp in zip(sample.ids, sample.logps, strict=True):
            logits = [x / (0.8 * 1.5) for x in engine.table[before]]
            assert logp == pytest.approx(logits[token] - math.log(sum(map(math.exp, logits))), abs=1e-12)
            before = token


def test_an_engine_in_turn_stays_one() -> None:
    assert not isinstance(inject(ToyRollout(), MismatchSpec(Mismatch.temperature, 0.5)), Streaming)
