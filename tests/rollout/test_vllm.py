"""vLLM against a full forward by transformers: log-probs, hand-over, caches, seeds, life cycle."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout.tiny import END, full_logps, gap, prompt_of
from transformers import LlamaForCausalLM

from trimtab.batch import Finish, Prompt, Sampling
from trimtab.errors import DataError, EngineError
from trimtab.rollout.vllm import VllmEngine
from trimtab.spec import RolloutSpec

pytestmark = pytest.mark.vllm

SPEC = RolloutSpec(kv_cache_gib=0.1)
SAMPLING = Sampling(max_tokens=8, temperature=1.0, stop_ids=(END, 17, 23), seed=3, samples_per_prompt=6)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmEngine]:
    engine = VllmEngine(folder, SPEC)
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.3])
def test_logps_are_those_of_a_full_forward(
    engine: VllmEngine, model: LlamaForCausalLM, prompts: list[Prompt], temperature: float
) -> None:
    samples = engine.generate(prompts, dataclasses.replace(SAMPLING, temperature=temperature))
    assert [s.prompt for s in samples] == [p for p in prompts for _ in range(6)]
    assert gap(samples, model, temperature or 1.0) < 1e-4


def test_stop_tokens_are_part_of_the_response(engine: VllmEngine, prompts: list[Prompt]) -> None:
    samples = engine.generate(prompts, dataclasses.replace(SAMPLING, samples_per_prompt=16))
    assert {s.finish for s in samples} == {Finish.stop, Finish.length}
    for sample in samples:
        before = sample.ids[:-1] if sample.finish is Finish.stop else sample.ids
        assert not set(before) & set(SAMPLING.stop_ids)
        assert (sample.ids[-1] in SAMPLING.stop_ids) == (sample.finish is Finish.stop)
        assert np.isfinite(sample.logps).all() and len(sample.logps) == len(sample.ids)
    endless = engine.generate(prompts[:1], Sampling(20, 1.0, (), 0, samples_per_prompt=32))
    assert all(len(s.ids) == 20 for s in endless) and any(END in s.ids for s in endless)


def test_seeds_fix_the_call_whatever_came_before(engine: VllmEngine, prompts: list[Prompt]) -> None:
    first = engine.generate(prompts, SAMPLING)
    engine.generate(prompts[1:], dataclasses.replace(SAMPLING, seed=9, max_tokens=3))
    engine.score([(1, 2, 3)])
    torch.manual_seed(4)
    before = torch.get_rng_state()
    assert engine.generate(prompts, SAMPLING) == first  # tokens and log-probs, bit for bit
    assert torch.equal(torch.get_rng_state(), before)
    other = engine.generate(prompts, dataclasses.replace(SAMPLING, seed=4))
    assert [s.ids for s in other] != [s.ids for s in first]
    assert len({s.ids for s in first[:6]}) > 1
    alone = engine.generate(prompts[:1], SAMPLING)
    assert [s.ids for s in alone] == [s.ids for s in first[:6]]


def test_frequencies_fit_the_exact_probabilities(engine: VllmEngine, model: LlamaForCausalLM) -> None:
    prompt = prompt_of(7, 2, 30)
    samples = engine.generate([prompt], Sampling(1, 0.8, (), 11, samples_per_prompt=3000))
    observed = np.bincount([s.ids[0] for s in samples], minlength=32)
    with torch.no_grad():
        p = torch.softmax(model(torch.tensor([prompt.ids])).logits[0, -1].double() / 0.8, -1).numpy()
    big = p * 3000 >= 5
    o, e = np.append(observed[big], observed[~big].sum()), 3000 * np.append(p[big], p[~big].sum())
    df = len(o) - 1
    assert ((o - e) ** 2 / np.maximum(e, 1e-9)).sum() < df + 4 * np.sqrt(2 * df)


def test_scores_are_those_of_a_full_forward(engine: VllmEngine, model: LlamaForCausalLM) -> None:
    rows = [(4, 7, 9, 30, 2), (8, 8), (3,), tuple(i % 32 for i in range(256))]
    scores = engine.score(rows)
    for scored, row in zip(scores[:3], rows, strict=False):
        assert scored == pytest.approx(full_logps(model, row), abs=1e-4)
    assert scores[3][:-1] == pytest.approx(full_logps(model, rows[3])[:-1], abs=1e-4)
    assert np.isnan(scores[3][-1])  # no room to sample behind a full row
    assert engine.score([]) == []


def test_what_cannot_be_sampled_is_refused(engine: VllmEngine, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prompt p9 has 250 tokens.*rollout.max_model_len=256"):
        engine.generate([prompt_of(*[9] * 250)], SAMPLING)
    with pytest.raises(DataError, match="row 1 of the 2 to score"):
        engine.score([(1, 2), ()])
    with pytest.raises(DataError, match=r"prompt p3 has token ids from 3 to 32; the engine's model has 32"):
        engine.generate([prompt_of(3, 32)], SAMPLING)
    assert engine.generate([], SAMPLING) == []
    with pytest.raises(EngineError, match=r"config.json"):
        VllmEngine(tmp_path, SPEC)


def test_seeded_prompts_beyond_one_step_are_prefilled_in_parts(engine: VllmEngine, model: LlamaForCausalLM) -> None:
    """vLLM alone fails here on a CPU: a generator of one can't be moved back."""
    budget = engine.describe()["max_num_batched_tokens"]
    prompts = [prompt_of(*[(7 * i + p) % 30 + 2 for i in range(200)]) for p in range(budget // 800 + 1)]
    sampling = dataclasses.replace(SAMPLING, samples_per_prompt=4, max_tokens=2)
    assert 200 * 4 * len(prompts) > budget
    samples = engine.generate(prompts, sampling)
    assert gap(samples, model) < 1e-4
    assert len({s.ids for s in samples}) > len(prompts)
    for p in range(len(prompts)):  # a response's seed is that of its place: behind short prompts all fits into one step
        alone = engine.generate([prompt_of(3)] * p + [prompts[p]], sampling)[-4:]
        assert [s.ids for s in alone] == [s.ids for s in samples[4 * p : 4 * p + 4]]


def test_missing_log_probs_name_the_prompt(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = engine._run

    def without(requests: list, params: list) -> list:
        outputs = run(requests, params)
        outputs[0].outputs[0].logprobs = None
        return outputs

    def partly(requests: list, params: list) -> list:
        outputs = run(requests, params)
        outputs[0].outputs[0].logprobs[0] = {}
        return outputs

    monkeypatch.setattr(engine, "_run", without)
    with pytest.raises(EngineError, match=r"prompt p5: vLLM returned .* none log-probs"):
        engine.generate([prompt_of(5)], SAMPLING)
    monkeypatch.setattr(engine, "_run", partly)
    assert np.isnan(engine.generate([prompt_of(5)], SAMPLING)[0].logps[0])


def test_describe_reads_the_engine(engine: VllmEngine) -> None:
    running = engine.describe()
    assert running["logprobs_mode"] == "processed_logprobs"
    assert (running["dtype"], running["prefix_caching"], running["async_scheduling"]) == ("float32", False, False)
    assert (running["device"], running["max_num_seqs"], running["max_model_len"]) == ("cpu", 128, 256)
    json.dumps(running)


FRESH = """
import json, sys
from pathlib import Path
from rollout.tiny import prompt_of
from trimtab.batch import Sampling
from trimtab.rollout.vllm import VllmEngine
from trimtab.spec import RolloutSpec
engine = VllmEngine(Path(sys.argv[1]), RolloutSpec(kv_cache_gib=0.1))
prompts = [prompt_of(*ids) for ids in json.loads(sys.argv[2])]
samples = engine.generate(prompts, Sampling(8, 1.0, (1, 17, 23), 3, 6))
print(json.dumps([[s.ids, [x.hex() for x in s.logps]] for s in samples]))
engine.close()
"""


def test_a_fresh_process_gives_the_same_bits(folder: Path, engine: VllmEngine, prompts: list[Prompt]) -> None:
    here = engine.generate(prompts, SAMPLING)
    command = [sys.executable, "-W", "ignore", "-c", FRESH, str(folder), json.dumps([p.ids for p in prompts])]
    root = Path(__file__).parents[2]
    path = f"{root / 'src'}:{root / 'tests'}"
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout)
    assert there == [[list(s.ids), [x.hex() for x in s.logps]] for s in here]
    assert done.stderr == ""
