"""Gaps made on purpose: each against an oracle that knows the policy which then samples, and what is reported."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout.tiny import END, full_logps, gap, make_model, save, weights_of
from torch import Tensor
from toy import ToyPolicy, ToyRollout
from transformers import LlamaForCausalLM

from trimtab.batch import Prompt, Sample, Sampling
from trimtab.errors import ConfigError, EngineError
from trimtab.protocol import Rollout, Stateful, Streaming
from trimtab.rollout.inject import Injected, chosen, engine_spec, inject, label, moves_scores, quantised, shifted
from trimtab.rollout.sampling import truncated, uniforms
from trimtab.rollout.seeds import row_seed
from trimtab.rollout.transformers import TransformersEngine
from trimtab.spec import Dtype, KvCacheDtype, LogprobsMode, Mismatch, MismatchSpec, RolloutSpec

SPEC = RolloutSpec()
SAMPLING = Sampling(max_tokens=12, temperature=0.8, stop_ids=(END, 17, 23), seed=3, samples_per_prompt=6)


def around(engine: Rollout, kind: Mismatch, strength: float = 0.0) -> Rollout:
    return inject(engine, MismatchSpec(kind, strength))


@pytest.fixture(scope="module")
def engine(folder: Path) -> TransformersEngine:
    return TransformersEngine(folder, SPEC)


def nucleus(logits: np.ndarray, mass: float) -> np.ndarray:
    """Oracle: log-probs after keeping the fewest most probable tokens that reach ``mass``, by a plain loop."""
    p = np.exp(logits - logits.max())
    p /= p.sum()
    kept, total = [], 0.0
    for token in sorted(range(len(p)), key=lambda v: -p[v]):
        kept.append(token)
        total += float(p[token])
        if total >= mass:
            break
    logp = np.full(len(p), -math.inf)
    logp[kept] = np.log(p[kept] / total)
    return logp


def exact(sample: Sample, model: LlamaForCausalLM, temperature: float, mass: float) -> list[np.ndarray]:
    start = len(sample.prompt.ids) - 1
    with torch.no_grad():
        logits = model(torch.tensor([(*sample.prompt.ids, *sample.ids)])).logits[0, start:-1].double() / temperature
    return [nucleus(row, mass) for row in logits.numpy()]


def test_temperature_is_that_of_the_sampler_and_of_its_report(
    engine: TransformersEngine, model: LlamaForCausalLM, prompts: list[Prompt]
) -> None:
    hot = around(engine, Mismatch.temperature, 0.25)
    samples = hot.generate(prompts, SAMPLING)
    assert gap(samples, model, 0.8 * 1.25) < 1e-5 and gap(samples, model, 0.8) > 0.1
    plain = engine.generate(prompts, dataclasses.replace(SAMPLING, temperature=1.0))
    assert samples == plain  # 0.8 * 1.25: the very responses of T=1, so it isn't only the report that moved
    greedy = dataclasses.replace(SAMPLING, temperature=0.0)
    assert hot.generate(prompts, greedy) == engine.generate(prompts, greedy)


@pytest.mark.parametrize("strength", [0.05, 0.4])
def test_top_p_samples_and_reports_the_kept_tokens(
    engine: TransformersEngine, model: LlamaForCausalLM, prompts: list[Prompt], strength: float
) -> None:
    samples = around(engine, Mismatch.top_p, strength).generate(prompts, SAMPLING)
    lost = []
    for i, sample in enumerate(samples):
        random = uniforms(row_seed(SAMPLING.seed, i // 6, i % 6), 12).tolist()
        for t, logp in enumerate(exact(sample, model, 0.8, 1 - strength)):
            token = sample.ids[t]
            assert sample.logps[t] == pytest.approx(logp[token], abs=1e-5)
            cdf = np.exp(logp).cumsum()
            assert (cdf[token - 1] if token else 0.0) - 1e-6 <= random[t] <= cdf[token] + 1e-6
            lost.append(np.isneginf(logp).any())
        full = full_logps(model, (*sample.prompt.ids, *sample.ids), 0.8)[len(sample.prompt.ids) - 1 :]
        # Renormalised: what is reported lies above the trainer's log-prob, by no more than log(1 / kept mass).
        assert all(-1e-5 <= a - b <= -math.log(1 - strength) + 1e-5 for a, b in zip(sample.logps, full, strict=True))
    assert np.mean(lost) > 0.9


def test_top_p_keeps_the_first_token_and_ties_in_order() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1], [0.97, 0.01, 0.01, 0.01], [0.25] * 4]))
    inf = math.inf
    kept = [[row[v] > -inf for v in range(4)] for row in truncated(logits, 0.7).tolist()]
    assert kept == [[True, True, False, False], [True, False, False, False], [True, True, True, False]]
    assert (truncated(logits, 1e-9) > -inf).sum(-1).tolist() == [1, 1, 1]
    assert truncated(logits, 1.0) is logits


def test_a_senseless_top_p_is_refused(engine: TransformersEngine, prompts: list[Prompt]) -> None:
    for value in (0.0, 1.5, -1.0):
        with pytest.raises(ConfigError, match=f"rollout.top_p={value}"):
            engine.generate(prompts, dataclasses.replace(SAMPLING, top_p=value))


def rounded(matrix: np.ndarray, step: float) -> np.ndarray:
    """Oracle: row by row, number by number."""
    out = np.zeros_like(matrix)
    for r, row in enumerate(matrix):
        unit = np.float32(step) * np.abs(row).max()
        for c, w in enumerate(row):
            out[r, c] = unit * np.round(w / unit) if unit > 0 else 0.0
    return out


@pytest.mark.parametrize("tied", [False, True])
def test_quantised_weights_are_those_that_sample_and_score(folder: Path, prompts: list[Prompt], tied: bool) -> None:
    new, expected = make_model(1, tied), make_model(1, tied)
    with torch.no_grad():
        for parameter in expected.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(rounded(parameter.numpy(), 1 / 15)))
    inner = TransformersEngine(folder, SPEC)
    engine = around(inner, Mismatch.quantised_weights, 1 / 15)
    weights = weights_of(new)
    if tied:  # the folder's model has a head of its own
        weights.append(("lm_head.weight", new.lm_head.weight))
    engine.load(weights, 4)
    samples = engine.generate(prompts, SAMPLING)
    assert gap(samples, expected, 0.8) < 1e-4 and gap(samples, new, 0.8) > 0.05
    assert all(set(s.versions) == {4} for s in samples)
    rows = [(*s.prompt.ids, *s.ids) for s in samples[:3]]
    scores = engine.score(rows)
    assert scores is not None
    for row, scored in zip(rows, scores, strict=True):
        assert scored == pytest.approx(full_logps(expected, row), abs=1e-4)


def test_a_step_of_one_in_127_is_int8_by_row() -> None:
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 4096, generator=draw)
    matrix[3] = 0.0
    vector = torch.randn(9, generator=draw)
    (_, done), (_, same) = quantised([("m", matrix), ("v", vector)], 1 / 127)
    assert same is vector and torch.equal(done[3], matrix[3])
    unit = matrix.abs().amax(-1, keepdim=True) / 127
    whole = done / unit.where(unit > 0, 1.0)
    assert float((whole - whole.round()).abs().max()) < 1e-3 and float(whole.abs().max()) == pytest.approx(127)
    assert bool(((done - matrix).abs() <= unit / 2 * 1.001).all())
    again = dict(quantised([("m", done)], 1 / 127))["m"]
    assert float((again - done).abs().max()) < 1e-6
    half = dict(quantised([("m", matrix.bfloat16())], 1 / 127))["m"]
    assert half.dtype is torch.bfloat16


def test_stale_weights_are_the_trainers_of_some_versions_ago() -> None:
    engine = around(ToyRollout(), Mismatch.stale, 2)
    tables, held = [], []
    sampling = Sampling(4, 1.0, (5,), 0)
    prompt = Prompt(None, (1,))  # type: ignore[arg-type]
    for version in range(8):
        policy = ToyPolicy(version)
        tables.append(policy.table.detach().numpy().copy())
        engine.load(policy.weights(), version)
        (sample,) = engine.generate([prompt], sampling)
        (source,) = set(sample.versions)
        held.append(source)
        row = (*prompt.ids, *sample.ids)
        for i, token in enumerate(sample.ids):
            logits = tables[source][row[i]]
            assert sample.logps[i] == pytest.approx(logits[token] - math.log(np.exp(logits).sum()))
    assert held == [0, 0, 0, 3, 3, 3, 6, 6]


def test_a_sampler_is_not_stale_for_ever_because_nothing_was_trained() -> None:
    toy = ToyRollout()
    engine = around(toy, Mismatch.stale, 2)
    taken = []
    for version in (0, 1, 1, 1, 1):  # all later batches are rejected
        engine.load(ToyPolicy(version).weights(), version)
        taken.append(toy.version)
    assert taken == [0, 0, 0, 1, 1]


def test_what_is_held_back_survives_a_resume() -> None:
    engine = around(ToyRollout(), Mismatch.stale, 3)
    for version in range(3):
        engine.load(ToyPolicy(version).weights(), version)
    assert isinstance(engine, Stateful)
    state: Mapping[str, Tensor] = engine.state()
    assert sorted(state) == ["left_out", "table", "version"]
    assert (int(state["version"]), int(state["left_out"])) == (0, 2)
    assert torch.equal(state["table"], ToyPolicy(0).table)
    toy = ToyRollout()
    resumed = around(toy, Mismatch.stale, 3)
    assert isinstance(resumed, Stateful)
    resumed.load_state(state)
    for version, source in ((2, 0), (3, 0), (4, 4)):  # 2 again: what a resumed run begins with is no new hand-over
        resumed.load(ToyPolicy(version).weights(), version)
        assert toy.version == source and np.array_equal(toy.table, ToyPolicy(source).table.detach().numpy())
    with pytest.raises(EngineError, match="resume=no"):
        resumed.load_state({})
    plain = around(ToyRollout(), Mismatch.shift, 0.5)
    assert isinstance(plain, Stateful) and plain.state() == {}
    plain.load_state({})
    assert not isinstance(ToyRollout(), Stateful)


def test_the_state_is_a_copy() -> None:
    policy = ToyPolicy(0)
    engine = around(ToyRollout(), Mismatch.stale, 3)
    engine.load(policy.weights(), 0)
    with torch.no_grad():
        policy.table.add_(1.0)  # the trainer's next update, in place
    assert isinstance(engine, Stateful)
    assert torch.equal(engine.state()["table"], ToyPolicy(0).table)


def test_shifted_log_probs_belong_to_the_token_before(
    engine: TransformersEngine, model: LlamaForCausalLM, prompts: list[Prompt]
) -> None:
    plain = engine.generate(prompts, SAMPLING)
    samples = around(engine, Mismatch.shift, 0.5).generate(prompts, SAMPLING)
    moved = 0
    for i, (a, b) in enumerate(zip(samples, plain, strict=True)):
        assert (a.ids, a.versions, a.finish) == (b.ids, b.versions, b.finish)
        if chosen(SAMPLING.seed, i // 6, i % 6, 0.5):
            moved += 1
            assert a.logps[0] == b.logps[0] and a.logps[1:] == b.logps[:-1]
            a.check(32)
        else:
            assert a == b
    assert 6 <= moved <= 18
    row = (*plain[0].prompt.ids, *plain[0].ids)
    scores = around(engine, Mismatch.shift, 1.0).score([row])
    assert scores is not None and scores[0] == pytest.approx(full_logps(model, row), abs=1e-5)


def test_the_share_that_is_shifted() -> None:
    draws = [(seed, p, s) for seed in range(10) for p in range(40) for s in range(10)]
    for share in (0.0, 0.1, 0.5, 1.0):
        got = np.mean([chosen(*at, share) for at in draws])
        assert abs(got - share) <= 3 * math.sqrt(share * (1 - share) / len(draws))
    assert all(chosen(*at, 0.5) for at in draws if chosen(*at, 0.1))  # a larger share takes more, not others
    empty = Sample(Prompt(None, (1,)), (), (), (), None)  # type: ignore[arg-type]
    assert shifted(empty).logps == ()


def test_gaps_that_are_made_where_the_engine_starts() -> None:
    changed = {
        Mismatch.dtype: {"dtype": Dtype.float16},
        Mismatch.kv_fp8: {"kv_cache_dtype": KvCacheDtype.fp8},
        Mismatch.raw_logprobs: {"logprobs_mode": LogprobsMode.raw},
    }
    for kind in Mismatch:
        expected = dataclasses.replace(SPEC, **changed.get(kind, {}))  # type: ignore[arg-type]
        assert engine_spec(SPEC, MismatchSpec(kind, 0.1, Dtype.float16)) == expected


def test_labels_and_what_a_probe_can_see(engine: TransformersEngine) -> None:
    assert [label(MismatchSpec(kind, 0.25)) for kind in Mismatch] == [
        "", "logit_noise 0.25", "temperature 0.25", "top_p 0.25", "dtype bfloat16", "kv_fp8", "quantised_weights 0.25",
        "stale 0.25", "raw_logprobs", "shift 0.25",
    ]  # fmt: skip
    assert [k.name for k in Mismatch if moves_scores(k)] == ["dtype", "kv_fp8", "quantised_weights", "stale"]
    described = around(engine, Mismatch.shift, 0.5).describe()
    assert described["mismatch"] == {"kind": "shift", "strength": 0.5, "label": "shift 0.5"}
    assert described | engine.describe() == described
    assert around(engine, Mismatch.none) is engine
    assert isinstance(around(engine, Mismatch.shift, 0.5), Injected)


class ToyStream(ToyRollout):
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, Prompt, Sampling]] = []

    def submit(self, key: int, prompt: Prompt, sampling: Sampling) -> None:
        self.asked.append((key, prompt, sampling))

    def finished(self, wait: bool = True) -> tuple[int, list[Sample]] | None:
        return self.asked.pop(0)[0], []

    def restarts(self) -> int:
        return 3


def test_an_engine_that_samples_all_the_time_stays_one() -> None:
    inner, prompt = ToyStream(), Prompt(None, (1,))  # type: ignore[arg-type]
    hot, cut = around(inner, Mismatch.temperature, 0.5), around(inner, Mismatch.top_p, 0.25)
    assert isinstance(hot, Streaming) and isinstance(cut, Streaming)
    hot.submit(4, prompt, SAMPLING)
    cut.submit(5, prompt, SAMPLING)
    assert inner.asked == [
        (4, prompt, dataclasses.replace(SAMPLING, temperature=0.8 * 1.5)),
        (5, prompt, dataclasses.replace(SAMPLING, top_p=0.75)),
    ]
    assert (hot.finished(), cut.finished(), hot.restarts()) == ((4, []), (5, []), 3)
    assert not isinstance(around(ToyRollout(), Mismatch.temperature, 0.5), Streaming)


# -- the float32 head ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_float32_head_multiplies_bfloat16_states_in_float32(tmp_path: Path, tied: bool) -> None:
    old, new = make_model(0, tied), make_model(1, tied)
    spec = dataclasses.replace(SPEC, dtype=Dtype.bfloat16)
    wide = TransformersEngine(save(old, tmp_path), dataclasses.replace(spec, fp32_head=True))
    narrow = TransformersEngine(tmp_path, spec)
    assert (wide.describe()["head_dtype"], narrow.describe()["head_dtype"]) == ("float32", "bfloat16")
    row = (4, 7, 9, 30, 2, 11, 5)
    for model in (old, new):  # a copy of the head that outlived the hand-over would show here
        for engine in (wide, narrow):
            engine.load(weights_of(model), 1)
        body = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)  # .to would round the rotary angles
        body.load_state_dict(model.state_dict())
        with torch.no_grad():
            hidden = body.model(torch.tensor([row])).last_hidden_state[0].float().double()
            logp = torch.log_softmax(hidden @ body.lm_head.weight.double().T, -1)
        expected = [float(logp[i, token]) for i, token in enumerate(row[1:])]
        assert wide.score([row])[0] == pytest.approx(expected, abs=1e-5)
        assert max(abs(a - b) for a, b in zip(narrow.score([row])[0], expected, strict=True)) > 1e-4
