"""Engine and trainer on one random model: what each reports of the same tokens, through the parts that a run uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trimtab.batch import Batch, Problem, Prompt, Sampling, pack
from trimtab.correction import WeightRule, correct, measure
from trimtab.policy.load import load, prepare
from trimtab.policy.model import CausalPolicy
from trimtab.rollout.transformers import TransformersEngine
from trimtab.spec import Level, LogprobsMode, Mismatch, MismatchSpec, PolicySpec, RolloutSpec, TisMode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(PolicySpec(warmup_accuracy=0.0, cache_dir=str(tmp_path_factory.mktemp("models"))))


@pytest.fixture(scope="module")
def policy(folder: Path) -> CausalPolicy:
    loaded = load(folder, PolicySpec())
    with torch.no_grad():  # random weights give a flat distribution, on which temperature would hardly show
        for parameter in loaded.parameters():
            parameter.mul_(3.0)
    return loaded


def sampled(folder: Path, policy: CausalPolicy, spec: RolloutSpec, mismatch: MismatchSpec | None = None) -> Batch:
    engine = TransformersEngine(folder, spec, mismatch)
    engine.load(policy.weights(), 1)
    texts = ["12+34=", "7=", "a longer prompt: 1+1=", "9*9="]
    prompts = [Prompt(Problem(t, t, ""), policy.tokenizer.encode(t)) for t in texts]
    sampling = Sampling(12, spec.temperature, policy.tokenizer.end_ids, seed=5, samples_per_prompt=8)
    samples = engine.generate(prompts, sampling)
    engine.close()
    return pack(samples, [i // 8 for i in range(32)], [0.0] * 32)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("level", list(Level))
def test_weights_are_1_at_every_temperature(
    folder: Path, policy: CausalPolicy, temperature: float, level: Level
) -> None:
    batch = sampled(folder, policy, RolloutSpec(temperature=temperature))
    with torch.no_grad():
        proximal_N = policy.score(batch, temperature=temperature).logp_N
    weight = WeightRule(level, TisMode.clip, 0.5, 2.0)
    correction = correct(proximal_N, batch.rollout_logp_N, batch.mask_N, batch.length_B, weight=weight)
    assert float(correction.weight_N.mean()) == pytest.approx(1.0, abs=1e-3)
    assert float((correction.weight_N - 1).abs().max()) < 1e-3
    assert measure(correction).as_dict()["train_rollout_logprob_abs_diff"] < 1e-5


def test_raw_log_probs_at_another_temperature_would_be_far_off(folder: Path, policy: CausalPolicy) -> None:
    batch = sampled(folder, policy, RolloutSpec(temperature=0.6, logprobs_mode=LogprobsMode.raw))
    with torch.no_grad():
        proximal_N = policy.score(batch, temperature=0.6).logp_N
    assert float((proximal_N - batch.rollout_logp_N).abs().mean()) > 0.1  # why config refuses raw with T other than 1


def test_injected_noise_shows_in_the_reported_log_probs_alone(folder: Path, policy: CausalPolicy) -> None:
    batch = sampled(folder, policy, RolloutSpec(), MismatchSpec(Mismatch.logit_noise, 0.5))
    with torch.no_grad():
        correction = correct(
            policy.score(batch).logp_N, batch.rollout_logp_N, batch.mask_N, batch.length_B, weight=None
        )
    metrics = measure(correction).as_dict()
    # How large the gap is depends on the model; that it is exactly the noise's is tested in tests/rollout.
    assert metrics["mis_abs_log_ratio_p50"] > 0.01
    assert metrics["mis_k3_kl"] > 0.01
    assert metrics["mis_ess_seq"] < 0.9


def test_ids_go_to_the_loss_as_they_were_sampled(folder: Path, policy: CausalPolicy) -> None:
    """decode and encode would not give them back: special tokens vanish from the text."""
    batch = sampled(folder, policy, RolloutSpec())
    starts = batch.length_B.cumsum(0) - batch.length_B
    for row in range(batch.rows):
        n, start = int(batch.length_B[row]), int(starts[row])
        ids = batch.token_N[start : start + n].tolist()
        assert batch.ids_B[row][-n:].tolist() == ids
    every = batch.token_N.tolist()
    assert policy.tokenizer.encode(policy.tokenizer.decode(every)) != tuple(every)
