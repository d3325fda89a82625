"""Evaluations are of the policy: ``Sampling.gap`` false leaves an injected mismatch out, for that call alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rollout.tiny import END, make_model, weights_of

from trimtab.batch import Prompt, Sampling
from trimtab.rollout.inject import inject
from trimtab.rollout.transformers import TransformersEngine
from trimtab.spec import Mismatch, MismatchSpec, RolloutSpec

SAMPLING = Sampling(max_tokens=8, temperature=0.8, stop_ids=(END, 17, 23), seed=3, samples_per_prompt=4)
EXACT = dataclasses.replace(SAMPLING, gap=False)
STRENGTHS = {
    Mismatch.logit_noise: 1.0,
    Mismatch.temperature: 0.5,
    Mismatch.top_p: 0.4,
    Mismatch.quantised_weights: 0.2,
    Mismatch.stale: 5.0,
    Mismatch.shift: 1.0,
}


@pytest.mark.parametrize("kind", STRENGTHS)
def test_an_evaluation_is_of_the_newest_policy_and_leaves_the_gap_as_it_was(
    folder: Path, prompts: list[Prompt], kind: Mismatch
) -> None:
    mismatch = MismatchSpec(kind, STRENGTHS[kind])
    gapped = inject(TransformersEngine(folder, RolloutSpec(), mismatch), mismatch)
    plain = TransformersEngine(folder, RolloutSpec())
    for version in (1, 2):
        for engine in (gapped, plain):
            engine.load(weights_of(make_model(version, tied=False)), version)
    before = gapped.generate(prompts, SAMPLING)
    assert gapped.generate(prompts, EXACT) == plain.generate(prompts, SAMPLING)
    assert gapped.generate(prompts, SAMPLING) == before != plain.generate(prompts, SAMPLING)
