"""The engine without vLLM: exact log-probs, rows on their own, the right distribution, hand-over, noise."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout.tiny import END, VOCABULARY, full_logps, make_model, prompt_of, save, weights_of
from transformers import LlamaForCausalLM

from trimtab.batch import Finish, Prompt, Sampling
from trimtab.errors import ConfigError, DataError, EngineError, ModelError
from trimtab.rollout.sampling import logit_noise, sample_step, uniforms
from trimtab.rollout.seeds import row_seed
from trimtab.rollout.transformers import TransformersEngine
from trimtab.spec import Dtype, LogprobsMode, Mismatch, MismatchSpec, RolloutSpec

SPEC = RolloutSpec()
SAMPLING = Sampling(max_tokens=12, temperature=1.0, stop_ids=(END, 17, 23), seed=3, samples_per_prompt=6)


@pytest.fixture(scope="module")
def engine(folder: Path) -> TransformersEngine:
    return TransformersEngine(folder, SPEC)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.3])
def test_logps_are_those_of_a_full_forward(
    engine: TransformersEngine, model: LlamaForCausalLM, prompts: list[Prompt], temperature: float
) -> None:
    samples = engine.generate(prompts, dataclasses.replace(SAMPLING, temperature=temperature))
    assert len(samples) == 24
    for sample in samples:
        row = (*sample.prompt.ids, *sample.ids)
        expected = full_logps(model, row, temperature or 1.0)[len(sample.prompt.ids) - 1 :]
        assert sample.logps == pytest.approx(expected, abs=1e-5)


def test_raw_logps_are_at_temperature_one(folder: Path, model: LlamaForCausalLM, prompts: list[Prompt]) -> None:
    raw = TransformersEngine(folder, dataclasses.replace(SPEC, logprobs_mode=LogprobsMode.raw))
    for sample in raw.generate(prompts, dataclasses.replace(SAMPLING, temperature=0.7)):
        row = (*sample.prompt.ids, *sample.ids)
        assert sample.logps == pytest.approx(full_logps(model, row)[len(sample.prompt.ids) - 1 :], abs=1e-5)


def test_greedy_takes_the_largest_logit(engine: TransformersEngine, model: LlamaForCausalLM) -> None:
    prompt = prompt_of(5, 9, 3)
    (sample,) = engine.generate([prompt], Sampling(5, 0.0, (), 0))
    ids = list(prompt.ids)
    for token in sample.ids:
        with torch.no_grad():
            assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


def test_a_response_ends_with_its_stop_token(engine: TransformersEngine, prompts: list[Prompt]) -> None:
    samples = engine.generate(prompts, dataclasses.replace(SAMPLING, samples_per_prompt=16))
    ends = [s for s in samples if s.finish is Finish.stop]
    assert ends and len(ends) < len(samples)
    for sample in samples:
        before = sample.ids[:-1] if sample.finish is Finish.stop else sample.ids
        assert not set(before) & set(SAMPLING.stop_ids)
        assert len(sample.logps) == len(sample.versions) == len(sample.ids) >= 1
        if sample.finish is Finish.stop:
            assert sample.ids[-1] in SAMPLING.stop_ids
        else:
            assert len(sample.ids) == SAMPLING.max_tokens


def test_the_end_of_the_models_own_configuration_does_not_end_a_response(engine: TransformersEngine) -> None:
    samples = engine.generate([prompt_of(5)], Sampling(20, 1.0, (), 0, samples_per_prompt=32))
    assert all(len(s.ids) == 20 for s in samples)
    assert any(END in s.ids for s in samples)


def test_rows_do_not_touch_each_other(folder: Path, engine: TransformersEngine, prompts: list[Prompt]) -> None:
    together = engine.generate(prompts, SAMPLING)
    one_by_one = TransformersEngine(folder, dataclasses.replace(SPEC, max_num_seqs=1)).generate(prompts, SAMPLING)
    for a, b in zip(together, one_by_one, strict=True):
        assert a.ids == b.ids
        assert a.logps == pytest.approx(b.logps, abs=1e-5)
    # A prompt alone, or in other company, gives the same responses as long as it stays in its place.
    swapped = engine.generate([prompts[0], prompts[3]], SAMPLING)
    assert [s.ids for s in swapped[:6]] == [s.ids for s in together[:6]]


def test_the_same_call_gives_the_same_bits(folder: Path, engine: TransformersEngine, prompts: list[Prompt]) -> None:
    first = engine.generate(prompts, SAMPLING)
    engine.generate(prompts[:1], dataclasses.replace(SAMPLING, seed=8))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert engine.generate(prompts, SAMPLING) == first
    assert TransformersEngine(folder, SPEC).generate(prompts, SAMPLING) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert [s.ids for s in engine.generate(prompts, dataclasses.replace(SAMPLING, seed=4))] != [s.ids for s in first]


def test_frequencies_fit_the_exact_probabilities(engine: TransformersEngine, model: LlamaForCausalLM) -> None:
    """Chi-square over first tokens at T=0.8, and over second tokens given the most frequent first one."""
    prompt, count = prompt_of(7, 2, 30), 6000
    samples = engine.generate([prompt], Sampling(2, 0.8, (), 11, samples_per_prompt=count))
    first = np.bincount([s.ids[0] for s in samples], minlength=VOCABULARY)
    top = int(first.argmax())
    second = np.bincount([s.ids[1] for s in samples if s.ids[0] == top], minlength=VOCABULARY)
    for observed, ids in ((first, prompt.ids), (second, (*prompt.ids, top))):
        with torch.no_grad():
            p = torch.softmax(model(torch.tensor([ids])).logits[0, -1].double() / 0.8, -1).numpy()
        expected = p * observed.sum()
        big = expected >= 5
        o, e = np.append(observed[big], observed[~big].sum()), np.append(expected[big], expected[~big].sum())
        statistic, df = float(((o - e) ** 2 / np.maximum(e, 1e-9)).sum()), len(o) - 1
        assert statistic < df + 4 * math.sqrt(2 * df)  # about 4 standard deviations; the seed is fixed


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.full((4, 6), -math.inf)
    logits[:, 2] = 0.0
    logits[:, 4] = 0.0
    edge = float(np.nextafter(1.0, 0.0))
    token, logp = sample_step(logits, torch.tensor([0.0, 0.4999, 0.5, edge]).double(), 1.0, LogprobsMode.processed)
    assert token.tolist() == [2, 2, 4, 4]
    assert logp.tolist() == pytest.approx([math.log(0.5)] * 4)


def test_random_numbers_of_a_row_are_fixed() -> None:
    assert row_seed(0, 0, 0) != row_seed(0, 0, 1) != row_seed(0, 1, 0) != row_seed(1, 0, 0)
    assert row_seed(0, 1, 23) != row_seed(0, 12, 3)
    assert row_seed(3, 1, 2) == 814715038198145341  # the same in every process and version
    assert torch.equal(uniforms(7, 3), uniforms(7, 10)[:3])
    assert not torch.equal(logit_noise(7, 0, 8), logit_noise(7, 1, 8))
    assert torch.equal(logit_noise(7, 4, 8), logit_noise(7, 4, 8))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_injected_noise_is_the_policy_that_samples(
    folder: Path, model: LlamaForCausalLM, prompts: list[Prompt], temperature: float
) -> None:
    noisy = TransformersEngine(folder, SPEC, MismatchSpec(Mismatch.logit_noise, 0.5))
    samples = noisy.generate(prompts, dataclasses.replace(SAMPLING, temperature=temperature))
    gaps = []
    for i, sample in enumerate(samples):
        seed = row_seed(SAMPLING.seed, i // 6, i % 6)
        row, start = (*sample.prompt.ids, *sample.ids), len(sample.prompt.ids) - 1
        with torch.no_grad():
            logits = model(torch.tensor([row])).logits[0, start:-1].double()
        noise = torch.stack([logit_noise(seed, t, VOCABULARY) for t in range(len(sample.ids))]).double()
        exact = torch.log_softmax((logits + 0.5 * noise) / temperature, -1)
        assert sample.logps == pytest.approx([float(exact[t, x]) for t, x in enumerate(sample.ids)], abs=1e-5)
        cdf = exact.exp().cumsum(-1)  # and the token is the one that the row's own uniform number picks there
        for t, (u, token) in enumerate(zip(uniforms(seed, 12).tolist(), sample.ids, strict=False)):
            assert (cdf[t, token - 1] if token else 0.0) - 1e-6 <= u <= cdf[t, token] + 1e-6
        gaps += [abs(a - b) for a, b in zip(sample.logps, full_logps(model, row, temperature)[start:], strict=True)]
    assert np.mean(gaps) > 0.1
    row = (*prompts[0].ids, *samples[0].ids)
    assert noisy.score([row])[0] == pytest.approx(full_logps(model, row), abs=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_handed_over_weights_are_the_ones_that_sample(tmp_path: Path, prompts: list[Prompt], tied: bool) -> None:
    old, new = make_model(0, tied), make_model(1, tied)
    engine = TransformersEngine(save(old, tmp_path), SPEC)
    engine.generate(prompts, SAMPLING)
    engine.load(weights_of(new), version=5)
    for sample in engine.generate(prompts, SAMPLING):
        row = (*sample.prompt.ids, *sample.ids)
        assert sample.logps == pytest.approx(full_logps(new, row)[len(sample.prompt.ids) - 1 :], abs=1e-5)
        assert set(sample.versions) == {5}
    rows = [(4, 7, 9, 30, 2), (8, 8), (3,), tuple(range(20))]
    for scored, row in zip(engine.score(rows), rows, strict=True):
        assert scored == pytest.approx(full_logps(new, row), abs=1e-5)


def test_a_hand_over_that_does_not_fit_is_refused(engine: TransformersEngine, model: LlamaForCausalLM) -> None:
    weights = weights_of(model)
    with pytest.raises(EngineError, match=r"not handed over: \['model.norm.weight'\]"):
        engine.load([(n, w) for n, w in weights if n != "model.norm.weight"], 1)
    with pytest.raises(EngineError, match=r"not in the engine: \['other'\]"):
        engine.load([*weights, ("other", torch.zeros(1))], 1)
    with pytest.raises(EngineError, match=r"lm_head.weight: .*policy.path"):
        engine.load([("lm_head.weight", torch.zeros(3, 3))], 1)
    engine.load(weights, 0)


def test_bfloat16_is_close_and_reported(folder: Path, model: LlamaForCausalLM, prompts: list[Prompt]) -> None:
    engine = TransformersEngine(folder, dataclasses.replace(SPEC, dtype=Dtype.bfloat16))
    assert engine.describe()["dtype"] == "bfloat16"
    engine.load(weights_of(model), 1)  # float32 in, converted
    gaps = []
    for sample in engine.generate(prompts, SAMPLING):
        row = (*sample.prompt.ids, *sample.ids)
        exact = full_logps(model, row)[len(sample.prompt.ids) - 1 :]
        gaps += [abs(a - b) for a, b in zip(sample.logps, exact, strict=True)]
    assert 1e-5 < np.mean(gaps) < 0.1


def test_what_cannot_be_sampled_is_refused(engine: TransformersEngine, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prompt p9 has 250 tokens.*rollout.max_model_len=256"):
        engine.generate([prompt_of(*[9] * 250)], SAMPLING)
    with pytest.raises(DataError, match="no tokens"):
        engine.generate([Prompt(prompt_of(1).problem, ())], SAMPLING)
    with pytest.raises(DataError, match=r"prompt p3 has token ids from 3 to 32; the engine's model has 32"):
        engine.generate([prompt_of(3, 32)], SAMPLING)
    with pytest.raises(DataError, match="row 1 of the 2 to score"):
        engine.score([(1, 2), ()])
    assert engine.generate([], SAMPLING) == [] and engine.score([]) == []
    with pytest.raises(ConfigError, match=r"rollout.top_k=9: .*set rollout.top_k=0"):
        TransformersEngine(tmp_path, dataclasses.replace(SPEC, top_k=9))
    with pytest.raises(ConfigError, match=r"rollout.temperature=-1"):
        engine.generate([prompt_of(3)], dataclasses.replace(SAMPLING, temperature=-1.0))
    with pytest.raises(ModelError, match=r"config.json"):
        TransformersEngine(tmp_path / "nothing", SPEC)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        TransformersEngine(tmp_path, SPEC)


def test_closed_twice_and_unusable_afterwards(folder: Path) -> None:
    engine = TransformersEngine(folder, SPEC)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([prompt_of(3)], SAMPLING)
