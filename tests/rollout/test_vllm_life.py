"""vLLM's life cycle: weights handed over, engines one after the other, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rollout.tiny import END, full_logps, gap, make_model, prompt_of, save, weights_of
from transformers import LlamaForCausalLM

from trimtab.batch import Prompt, Sampling
from trimtab.errors import ConfigError, EngineError
from trimtab.rollout.vllm import VllmEngine
from trimtab.spec import LogprobsMode, RolloutSpec

pytestmark = pytest.mark.vllm

SPEC = RolloutSpec(kv_cache_gib=0.1)
SAMPLING = Sampling(max_tokens=8, temperature=1.0, stop_ids=(END, 17, 23), seed=3, samples_per_prompt=6)


@pytest.mark.parametrize("tied", [False, True])
def test_handed_over_weights_are_the_ones_that_sample(tmp_path: Path, prompts: list[Prompt], tied: bool) -> None:
    """One engine after the other in one process; prompts long enough to be cached under the old weights."""
    old, new = make_model(0, tied), make_model(1, tied)
    engine = VllmEngine(save(old, tmp_path), dataclasses.replace(SPEC, prefix_caching=True))
    long = [*prompts, prompt_of(*[(7 * i) % 30 + 2 for i in range(200)])]
    assert gap(engine.generate(long, SAMPLING), old) < 1e-4
    engine.load(weights_of(new), version=5)
    samples = engine.generate(long, SAMPLING)
    assert gap(samples, new) < 1e-4 and gap(samples, old) > 0.5
    assert all(set(s.versions) == {5} for s in samples)
    rows = [s.prompt.ids + s.ids for s in samples]
    for scored, row in zip(engine.score(rows), rows, strict=True):
        assert scored == pytest.approx(full_logps(new, row), abs=1e-4)
    with pytest.raises(EngineError, match=r"not handed over: \['model.norm.weight'\]"):
        engine.load([(n, w) for n, w in weights_of(new) if n != "model.norm.weight"], 6)
    engine.close()
    engine.close()


def test_a_kept_prefix_cache_would_be_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: without the reset, the old weights' cache is used."""
    old, new = make_model(0, False), make_model(1, False)
    engine = VllmEngine(save(old, tmp_path), dataclasses.replace(SPEC, prefix_caching=True))
    long = [prompt_of(*[(7 * i) % 30 + 2 for i in range(200)])]
    engine.generate(long, SAMPLING)
    monkeypatch.setattr(engine, "_drop_cache", lambda: None)
    engine.load(weights_of(new), version=1)
    assert gap(engine.generate(long, SAMPLING), new) > 0.01
    monkeypatch.undo()
    assert gap(engine.generate(long, SAMPLING), new) < 1e-4
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(EngineError, match=r"rollout.prefix_caching=false"):
        engine.load(weights_of(new), version=2)
    monkeypatch.undo()
    engine.close()


def test_raw_log_probs_are_at_temperature_one(
    folder: Path, model: LlamaForCausalLM, prompts: list[Prompt], capfd: pytest.CaptureFixture[str]
) -> None:
    engine = VllmEngine(folder, dataclasses.replace(SPEC, logprobs_mode=LogprobsMode.raw))
    assert engine.describe()["logprobs_mode"] == "raw_logprobs"
    samples = engine.generate(prompts, dataclasses.replace(SAMPLING, temperature=0.7))
    engine.close()
    assert gap(samples, model) < 1e-4 and gap(samples, model, 0.7) > 0.05
    assert capfd.readouterr() == ("", "")


def test_options_that_vllm_would_change_silently_are_refused(folder: Path) -> None:
    with pytest.raises(
        EngineError, match=r"rollout.async_scheduling=True was asked for, but vLLM runs .*=False on cpu"
    ):
        VllmEngine(folder, dataclasses.replace(SPEC, async_scheduling=True))


def test_a_model_that_vllm_does_not_support_is_refused_with_its_reason(tmp_path: Path) -> None:
    folder = save(make_model(0, False, head_dim=16), tmp_path)
    with pytest.raises(EngineError, match=r"head_dim=16.*rollout=transformers"):
        VllmEngine(folder, SPEC)


def test_a_failed_start_leaves_the_process_usable(folder: Path, prompts: list[Prompt]) -> None:
    with pytest.raises(EngineError, match="vLLM refused to start"):
        VllmEngine(folder, dataclasses.replace(SPEC, kv_cache_gib=1e-5))
    engine = VllmEngine(folder, SPEC)
    with pytest.raises(EngineError, match="another vLLM engine lives"):
        VllmEngine(folder, SPEC)
    assert len(engine.generate(prompts, SAMPLING)) == 24
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(prompts, SAMPLING)


def test_without_vllm_the_error_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.rollout.vllm_process.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"pip install .*rollout=transformers"):
        VllmEngine(folder, SPEC)


def test_a_separate_engine_process_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(EngineError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1"):
        VllmEngine(folder, SPEC)


def test_a_warm_prefix_cache_does_not_change_a_bit(folder: Path) -> None:
    engine = VllmEngine(folder, dataclasses.replace(SPEC, prefix_caching=True))
    long = [prompt_of(*[(7 * i) % 30 + 2 for i in range(200)])]
    first = engine.generate(long, SAMPLING)
    assert engine.generate(long, SAMPLING) == first
    engine.close()


def test_truncated_sampling_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.top_k=5: .*set rollout.top_k=0"):
        VllmEngine(folder, dataclasses.replace(SPEC, top_k=5))
