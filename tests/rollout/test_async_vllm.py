"""vLLM in its own process: weights in mid-response, versions of tokens, deaths."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rollout.tiny import END, full_logps, gap, make_model, prompt_of, save, weights_of
from transformers import LlamaForCausalLM

from trimtab.batch import Sample, Sampling
from trimtab.errors import DataError, EngineError
from trimtab.protocol import Streaming
from trimtab.rollout.async_vllm import AsyncVllmEngine
from trimtab.rollout.async_vllm_weights import SharedWeights, mapped
from trimtab.spec import InflightCache, RolloutSpec

LONG = Sampling(max_tokens=160, temperature=1.0, stop_ids=(), seed=3, samples_per_prompt=4)
SHORT = Sampling(max_tokens=8, temperature=0.7, stop_ids=(END,), seed=3, samples_per_prompt=4)
PROMPTS = [prompt_of(5, 9, 3), prompt_of(7, 2, 30, 11, 4, 8, 21, 6), prompt_of(14)]


@pytest.fixture(scope="module")
def models() -> dict[int, LlamaForCausalLM]:
    """Models by policy version; tied, as it is there that a hand-over can go silently wrong."""
    return {version: make_model(version, tied=True) for version in range(6)}


@pytest.fixture(scope="module")
def engine(models: dict[int, LlamaForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncVllmEngine]:
    engine = AsyncVllmEngine(save(models[0], tmp_path_factory.mktemp("model")), RolloutSpec(kv_cache_gib=0.1))
    yield engine
    engine.close()
    engine.close()


def gaps(samples: list[Sample], models: dict[int, LlamaForCausalLM]) -> tuple[float, float]:
    """Largest |difference| to the log-probs under the weights of each token's own version: before and after a switch.

    Each token is scored by a forward of transformers over the row alone, softmax in float64.
    """
    before, after = [0.0], [0.0]
    for sample in samples:
        row = (*sample.prompt.ids, *sample.ids)
        exact = {v: full_logps(models[v], row)[len(sample.prompt.ids) - 1 :] for v in set(sample.versions)}
        for i, (logp, version) in enumerate(zip(sample.logps, sample.versions, strict=True)):
            side = before if version == sample.versions[0] else after
            side.append(abs(logp - exact[version][i]))
    return max(before), max(after)


def fetch(engine: AsyncVllmEngine) -> list[Sample]:
    """All open groups, in the order of their numbers."""
    found = {}
    while (group := engine.finished()) is not None:
        found[group[0]] = group[1]
    return [sample for key in sorted(found) for sample in found[key]]


def switched(
    engine: AsyncVllmEngine, models: dict[int, LlamaForCausalLM], version: int, cache: str, sampling: Sampling = LONG
) -> list[Sample]:
    """Responses that a hand-over to ``version`` met in the middle."""
    engine._spec = replace(engine._spec, inflight_cache=InflightCache(cache))
    for wait in (0.5, 0.2, 0.1, 0.05, 0.02):  # the engine's speed is not ours to say
        for key, prompt in enumerate(PROMPTS):
            engine.submit(key, prompt, sampling)
        time.sleep(wait)
        engine.load(weights_of(models[version]), version)
        samples = fetch(engine)
        if any(len(set(sample.versions)) == 2 for sample in samples):
            return samples
        engine.load(weights_of(models[version - 1]), version - 1)
    raise AssertionError("no hand-over met a response in the middle")


@pytest.mark.vllm
def test_samples_and_scores_are_the_weights_own(engine: AsyncVllmEngine, models: dict[int, LlamaForCausalLM]) -> None:
    assert isinstance(engine, Streaming)
    assert gap(engine.generate(PROMPTS, SHORT), models[0], 0.7) < 1e-4
    engine.load(weights_of(models[1]), 1)
    engine.submit(9, PROMPTS[0], LONG)
    samples = engine.generate(PROMPTS, SHORT)  # beside a group that is running
    assert gap(samples, models[1], 0.7) < 1e-4 and gap(samples, models[0], 0.7) > 0.5
    assert [sample.prompt for sample in samples] == [prompt for prompt in PROMPTS for _ in range(4)]
    assert {v for sample in samples for v in sample.versions} == {1}
    rows = [sample.prompt.ids + sample.ids for sample in samples]
    for scored, row in zip(engine.score(rows), rows, strict=True):
        assert scored == pytest.approx(full_logps(models[1], row), abs=1e-4)
    assert engine.generate(PROMPTS, SHORT)[0].ids == samples[0].ids
    key, group = engine.finished() or (None, [])
    assert key == 9 and len(group) == 4 and gaps(group, models)[0] < 1e-4
    assert engine.finished() is None


@pytest.mark.vllm
def test_with_a_cleared_cache_every_token_is_its_own_versions(
    engine: AsyncVllmEngine, models: dict[int, LlamaForCausalLM]
) -> None:
    engine.load(weights_of(models[1]), 1)
    # More tokens are computed anew than vLLM takes in one go (2048), and in parts of single responses.
    samples = switched(engine, models, 2, "clear", replace(LONG, samples_per_prompt=16))
    again = sum(sample.versions.count(1) for sample in samples if set(sample.versions) == {1, 2})
    assert again > 2048
    before, after = gaps(samples, models)
    assert before < 1e-4 and 0 < after < 1e-4
    assert all(list(sample.versions) == sorted(sample.versions) for sample in samples)


@pytest.mark.vllm
def test_with_a_kept_cache_the_tokens_after_the_switch_are_of_no_version(
    engine: AsyncVllmEngine, models: dict[int, LlamaForCausalLM]
) -> None:
    """The old weights' keys and values stay: tokens before the switch are exact, those behind it are off."""
    engine.load(weights_of(models[2]), 2)
    samples = switched(engine, models, 3, "keep")
    before, after = gaps(samples, models)
    assert before < 1e-4 and after > 0.1
    engine._spec = replace(engine._spec, inflight_cache=InflightCache.clear)


@pytest.mark.vllm
def test_a_killed_engine_is_started_again_with_the_last_weights(
    engine: AsyncVllmEngine, models: dict[int, LlamaForCausalLM], caplog: pytest.LogCaptureFixture
) -> None:
    engine.load(weights_of(models[4]), 4)
    for key, prompt in enumerate(PROMPTS):
        engine.submit(key, prompt, LONG)
    dead = engine.pid
    os.kill(dead, signal.SIGKILL)
    samples = fetch(engine)
    assert len(samples) == 12 and {v for sample in samples for v in sample.versions} == {4}
    assert gaps(samples, models)[0] < 1e-4
    assert engine.restarts() == 1 and engine.pid != dead
    assert "died: killed by SIGKILL; starting it again with policy version 4, 3 unfinished groups anew" in caplog.text


@pytest.mark.vllm
def test_what_cannot_be_sampled_or_taken_over_is_refused(
    engine: AsyncVllmEngine, models: dict[int, LlamaForCausalLM]
) -> None:
    with pytest.raises(DataError, match=r"rollout.max_model_len=256"):
        engine.submit(0, prompt_of(*[3] * 200), LONG)
    with pytest.raises(EngineError, match=r"not handed over: \['model.norm.weight'\]"):
        engine.load([(n, w) for n, w in weights_of(models[5]) if n != "model.norm.weight"], 5)
    engine.load(weights_of(models[5]), 5)
    assert gap(engine.generate(PROMPTS, SHORT), models[5], 0.7) < 1e-4


@pytest.mark.vllm
def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(EngineError, match=r"head_dim=16"):
        AsyncVllmEngine(save(make_model(0, False, head_dim=16), tmp_path), RolloutSpec(kv_cache_gib=0.1))
    assert set(multiprocessing.active_children()) == before


# -- shared memory ---------------------------------------------------------------------------------------------------


def test_weights_arrive_bit_by_bit_in_every_dtype_and_shape() -> None:
    weights = SharedWeights()
    assert not weights.written
    first = [
        ("a", torch.randn(3, 5)),
        ("empty", torch.zeros(0, 4)),
        ("b", torch.randn(7).bfloat16()),
        ("c", torch.arange(5, dtype=torch.int8)),
        ("scalar", torch.tensor(2.5, dtype=torch.float16)),
        ("view", torch.randn(4, 6).T),
    ]
    weights.write(first)
    for _ in range(2):
        found = mapped(*weights.address())
        assert [name for name, _ in found] == [name for name, _ in first] == list(weights.names)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(found, first, strict=True))
        found[0][1].zero_()  # the reader's own
    weights.write([(name, tensor + 1) for name, tensor in first])
    assert torch.equal(mapped(*weights.address())[0][1], first[0][1] + 1)
    weights.write(first[:2])  # another model: another layout
    assert [name for name, _ in mapped(*weights.address())] == ["a", "empty"]
    weights.close()
    weights.close()
    with pytest.raises(EngineError, match="no weights"):
        weights.address()
