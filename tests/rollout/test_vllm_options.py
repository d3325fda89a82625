"""vLLM's options at the source, and gaps made around it; two engines for the whole file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout.tiny import END, full_logps, gap, make_model, prompt_of, save, weights_of
from torch import Tensor
from transformers import LlamaForCausalLM

from trimtab.batch import Prompt, Sampling
from trimtab.build import make_rollout
from trimtab.errors import EngineError
from trimtab.rollout.inject import inject
from trimtab.rollout.vllm import VllmEngine
from trimtab.rollout.vllm_options import silent_change
from trimtab.spec import CacheReset, Dtype, Engine, KvCacheDtype, Mismatch, MismatchSpec, RolloutSpec, RunSpec

pytestmark = pytest.mark.vllm

SPEC = RolloutSpec(kv_cache_gib=0.1, prefix_caching=True, chunked_prefill=False)
SAMPLING = Sampling(max_tokens=6, temperature=1.0, stop_ids=(END, 17, 23), seed=3, samples_per_prompt=4)
LONG = [prompt_of(*[(7 * i) % 30 + 2 for i in range(200)])]  # six blocks of prefix


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmEngine]:
    engine = VllmEngine(folder, SPEC)
    yield engine
    engine.close()


def cached(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects how many prompt tokens of each request came from the prefix cache."""
    found: list[int] = []
    run = engine._run

    def watched(*given: list) -> list:  # type: ignore[type-arg]
        outputs = run(*given)
        found.extend(int(output.num_cached_tokens or 0) for output in outputs)
        return outputs

    monkeypatch.setattr(engine, "_run", watched)
    return found


@pytest.mark.parametrize(("policy", "stale"), [(CacheReset.reset, False), (CacheReset.salt, False),
                                               (CacheReset.keep, True)])  # fmt: skip
def test_what_a_hand_over_does_to_cached_prefixes(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, policy: CacheReset, stale: bool
) -> None:
    old, new = make_model(0, False), make_model(1, False)
    monkeypatch.setattr(engine, "_spec", dataclasses.replace(SPEC, cache_reset=CacheReset.reset))
    engine.load(weights_of(old), 1)  # and empties the cache
    monkeypatch.setattr(engine, "_spec", dataclasses.replace(SPEC, cache_reset=policy))
    hits = cached(engine, monkeypatch)
    assert gap(engine.generate(LONG, SAMPLING), old) < 1e-4
    hits.clear()
    assert gap(engine.generate(LONG, dataclasses.replace(SAMPLING, seed=4)), old) < 1e-4
    warm = policy is not CacheReset.reset
    assert (hits[0] >= 160) == warm  # a second call under the same weights finds the prefix, unless it was dropped
    engine.load(weights_of(new), 2)
    hits.clear()
    off = gap(engine.generate(LONG, SAMPLING), new)
    assert (off > 0.01) == stale and (hits[0] >= 160) == stale
    assert stale or off < 1e-4
    rows = [(*LONG[0].ids, 3, 4)]
    assert engine.score(rows)[0] == pytest.approx(full_logps(new, rows[0]), abs=1e-4)  # scoring reads no prefix
    monkeypatch.setattr(engine, "_spec", dataclasses.replace(SPEC, cache_reset=policy))
    assert engine.describe()["cache_reset"].startswith(policy.value)
    assert ("fault" in engine.describe()["cache_reset"]) == stale


def test_salt_tells_two_hand_overs_of_one_version_apart(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_spec", dataclasses.replace(SPEC, cache_reset=CacheReset.salt))
    for seed in (0, 1):
        model = make_model(seed, False)
        engine.load(weights_of(model), 7)
        assert gap(engine.generate(LONG, SAMPLING), model) < 1e-4


def test_chunked_prefill_is_what_was_asked_for(engine: VllmEngine, model: LlamaForCausalLM) -> None:
    assert engine.describe()["chunked_prefill"] is False
    assert engine.describe()["kv_cache_dtype"] == "auto" and engine.describe()["head_dtype"] == "float32"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"chunked_prefill": True}, ("chunked_prefill", True, False)),
        ({"kv_cache_dtype": KvCacheDtype.fp8}, ("kv_cache_dtype", "fp8", "auto")),
        ({"dtype": Dtype.bfloat16}, ("dtype", "bfloat16", "float32")),
    ],
)
def test_what_vllm_would_change_is_found(engine: VllmEngine, changes: dict, told: tuple) -> None:  # type: ignore[type-arg]
    running = engine.describe()
    assert silent_change(running, SPEC) is None
    assert silent_change(running, dataclasses.replace(SPEC, **changes)) == told
    narrow = running | {"head_dtype": "bfloat16"}
    assert silent_change(narrow, dataclasses.replace(SPEC, fp32_head=True)) == ("fp32_head", True, False)


def test_injected_temperature_and_top_p(engine: VllmEngine, model: LlamaForCausalLM, prompts: list[Prompt]) -> None:
    engine.load(weights_of(model), 3)
    hot = inject(engine, MismatchSpec(Mismatch.temperature, 0.25))
    assert gap(hot.generate(prompts, SAMPLING), model, 1.25) < 1e-4
    cut = inject(engine, MismatchSpec(Mismatch.top_p, 0.3))
    for sample in cut.generate(prompts, SAMPLING):
        row, start = (*sample.prompt.ids, *sample.ids), len(sample.prompt.ids) - 1
        with torch.no_grad():
            p = torch.softmax(model(torch.tensor([row])).logits[0, start:-1].double(), -1).numpy()
        for t, token in enumerate(sample.ids):
            order = sorted(range(32), key=lambda v: -p[t, v])
            count = int(np.searchsorted(np.cumsum(p[t, order]), 0.7)) + 1
            assert token in order[:count]
            assert sample.logps[t] == pytest.approx(math.log(p[t, token] / p[t, order[:count]].sum()), abs=1e-4)


def test_injected_weights(engine: VllmEngine, prompts: list[Prompt]) -> None:
    models = [make_model(seed, False) for seed in range(3)]
    coarse = inject(engine, MismatchSpec(Mismatch.quantised_weights, 1 / 15))
    coarse.load(weights_of(models[1]), 4)
    expected = make_model(1, False)
    with torch.no_grad():
        for parameter in (p for p in expected.parameters() if p.ndim == 2):
            unit = parameter.abs().amax(1, keepdim=True) / 15
            parameter.copy_((parameter / unit).round() * unit)
    assert gap(coarse.generate(prompts, SAMPLING), expected) < 1e-4
    late = inject(engine, MismatchSpec(Mismatch.stale, 1))
    for version, source in ((5, 0), (6, 0), (7, 2)):
        late.load(weights_of(models[version - 5]), version)
        samples = late.generate(prompts, SAMPLING)
        assert gap(samples, models[source]) < 1e-4
        assert {v for s in samples for v in s.versions} == {5 + source}


# -- bfloat16: the head in float32, keys and values in eight bits ----------------------------------------------------


def test_a_float32_head_and_an_fp8_cache(tmp_path: Path, prompts: list[Prompt], engine: VllmEngine) -> None:
    engine.close()  # one at a time, and this test is the last
    old, new = make_model(0, tied=True), make_model(1, tied=True)
    rollout = RolloutSpec(engine=Engine.vllm, kv_cache_gib=0.1, dtype=Dtype.bfloat16, fp32_head=True)
    spec = dataclasses.replace(RunSpec(), rollout=rollout, mismatch=MismatchSpec(Mismatch.kv_fp8))
    narrow = make_rollout(spec, save(old, tmp_path), torch.device("cpu"))
    inner: VllmEngine = narrow._engine  # type: ignore[attr-defined]
    described = narrow.describe()
    assert (described["dtype"], described["head_dtype"], described["kv_cache_dtype"]) == ("bfloat16", "float32", "fp8")
    assert described["mismatch"]["label"] == "kv_fp8"
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def logits(model: torch.nn.Module) -> Tensor:
        return model.compute_logits(hidden)  # type: ignore[operator]

    for model in (old, new):  # a copy of the head that outlived the hand-over would show here
        narrow.load(weights_of(model), 1)
        (got,) = inner._live().apply_model(logits)
        exact = hidden.double() @ model.get_output_embeddings().weight.detach().bfloat16().double().T
        assert got.dtype is torch.float32 and float((got.double() - exact).abs().max()) < 1e-5
    samples = narrow.generate([*prompts, *LONG], SAMPLING)
    narrow.close()
    assert 1e-3 < gap(samples, new) < 2.0 < gap(samples, old)  # eight bits show, and the new weights sample
    with pytest.raises(EngineError, match="closed"):
        narrow.generate(prompts, SAMPLING)
