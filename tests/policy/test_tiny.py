"""The tiny model: size, files, warm-up, cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from trimtab.errors import ModelError
from trimtab.policy import tiny
from trimtab.policy.load import load, prepare
from trimtab.spec import PolicySpec


def copies(draw: random.Random) -> tuple[str, str]:
    """An easy task: one digit, to be repeated."""
    digit = str(draw.randint(0, 9))
    return f"{digit}=", digit


def spec(tmp_path: Path, accuracy: float) -> PolicySpec:
    return PolicySpec(cache_dir=str(tmp_path), warmup_accuracy=accuracy)


def test_random_weights_need_no_problems_and_no_time(tmp_path: Path) -> None:
    folder = prepare(spec(tmp_path, 0.0))
    policy = load(folder, spec(tmp_path, 0.0))
    assert 850_000 < sum(p.numel() for p in policy.parameters()) < 1_000_000
    assert policy.tokenizer.vocabulary == 100 and policy.tokenizer.end_ids == (2,)
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["LlamaForCausalLM"] and config.head_dim == 32 and config.tie_word_embeddings
    assert AutoTokenizer.from_pretrained(folder)("12+3=")["input_ids"] == list(policy.tokenizer.encode("12+3="))
    with pytest.raises(ModelError, match=r"policy\.warmup_accuracy=0"):
        prepare(spec(tmp_path, 0.4))


def test_warm_up_reaches_its_accuracy_is_cached_and_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "BATCH", 32)
    said: list[str] = []
    torch.manual_seed(123)
    before = torch.get_rng_state()
    folder = prepare(spec(tmp_path / "one", 0.5), copies, lambda done, total, text: said.append(text))
    assert torch.equal(torch.get_rng_state(), before)
    assert any("wanted 0.78" in text for text in said) and "wanted 0.50" in said[-1]
    policy = load(folder, spec(tmp_path, 0.5))
    assert 0.3 < tiny.sampled_accuracy(policy, [copies(random.Random(i)) for i in range(500)], seed=9) < 0.6
    count = len(said)
    again = prepare(spec(tmp_path / "one", 0.5), copies, lambda done, total, text: said.append(text))
    assert again == folder and len(said) == count
    torch.manual_seed(7)
    other = load(prepare(spec(tmp_path / "two", 0.5), copies), spec(tmp_path, 0.5))
    assert all(torch.equal(other.state()[name], tensor) for name, tensor in policy.state().items())
    assert prepare(spec(tmp_path / "one", 0.5), lambda draw: ("1=", "1")) != folder


def test_answers_slip_at_the_rate_that_leaves_the_wanted_share_right() -> None:
    draw = random.Random(0)
    answers = [str(draw.randint(10, 999)) for _ in range(4000)]
    rate = tiny.slip_rate(0.4, answers)
    pairs = [(answer, tiny.slipped(answer, rate, draw)) for answer in answers]
    assert sum(a == b for a, b in pairs) / 4000 == pytest.approx(0.4, abs=0.03)
    changed = sum(x != y for a, b in pairs for x, y in zip(a, b, strict=True))
    assert changed / sum(map(len, answers)) == pytest.approx(rate, abs=0.02)
    assert tiny.slipped("-7", 1.0, draw)[0] == "-" and tiny.slipped("12", 0.0, draw) == "12"


def test_damaged_weights_are_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = prepare(spec(tmp_path, 0.0))
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-4] + b"\x00\x00\x80\x7f")
    assert prepare(spec(tmp_path, 0.0)) == folder
    assert weights.read_bytes() == good and "is damaged" in caplog.text


def test_a_warm_up_that_cannot_succeed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "MAX_STEPS", 20)
    monkeypatch.setattr(tiny, "BATCH", 4)
    monkeypatch.setattr(tiny, "PROBES", 32)
    with pytest.raises(ModelError, match="warmup_accuracy"):
        prepare(spec(tmp_path, 0.9), lambda draw: ("?", str(draw.randint(0, 9))))


def test_sampler_draws_from_the_models_distribution(tmp_path: Path) -> None:
    """Two tokens after prompts of unequal length, 4,000 times, against the product of the model's softmax."""
    policy = load(prepare(spec(tmp_path, 0.0)), spec(tmp_path, 0.0))
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(8)
    prompts = [(5, 6, 7)] * 2000 + [(9,)] * 2000
    drawn = tiny.sample(policy, prompts, 2, seed=0)
    for prompt, some in (((5, 6, 7), drawn[:2000]), ((9,), drawn[2000:])):
        with torch.no_grad():
            p = policy.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
            first = some[0][0]
            q = policy.model(torch.tensor([[*prompt, first]])).logits[0, -1].softmax(-1)
        counts = torch.bincount(torch.tensor([r[0] for r in some]), minlength=100)
        expected = p * len(some)
        chi2 = ((counts - expected).square() / expected).sum().item()
        assert chi2 < 99 + 5 * (2 * 99) ** 0.5
        after = [r[1] for r in some if r[0] == first]
        mean = sum(q[t].item() for t in after) / len(after)
        assert mean == pytest.approx(q.square().sum().item(), rel=0.5)
