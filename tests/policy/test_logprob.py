"""Chunked token log-probs against torch's own log_softmax, closed forms and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trimtab.policy import logprob
from trimtab.policy.logprob import LogitOptions, token_logprobs

N, H, V = 13, 6, 37


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several vocabulary blocks even for a toy vocabulary, the last one incomplete."""
    monkeypatch.setattr(logprob, "TILE", 40)
    monkeypatch.setattr(logprob, "LEAST_BLOCK", 5)


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(V, (N,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, token: Tensor, bias: Tensor | None, o: LogitOptions) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) * o.scale
    if o.softcap is not None:
        logits = o.softcap * torch.tanh(logits / o.softcap)
    logs = (logits / o.temperature).log_softmax(-1)
    return logs[torch.arange(len(token)), token], -(logs.exp() * logs).sum(-1)


OPTIONS = [
    LogitOptions(chunk=4),
    LogitOptions(temperature=0.6, chunk=1),
    LogitOptions(temperature=1.7, chunk=100, scale=0.25),
    LogitOptions(temperature=0.8, chunk=5, scale=1.5, softcap=2.0),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_equals_plain_forward_and_backward(options: LogitOptions, with_bias: bool, entropy: bool) -> None:
    hidden, weight, bias, token = inputs(torch.float64)
    used = bias if with_bias else None
    wanted = [hidden, weight, *([bias] if with_bias else [])]
    factor = torch.linspace(-1, 2, N, dtype=torch.float64)
    logp, ent = token_logprobs(hidden, weight, token, used, options, entropy)
    logp_0, ent_0 = plain(hidden, weight, token, used, options)
    torch.testing.assert_close(logp, logp_0, rtol=1e-12, atol=1e-12)
    loss, loss_0 = (factor * logp).sum(), (factor * logp_0).sum()
    if entropy:
        assert ent is not None
        torch.testing.assert_close(ent, ent_0, rtol=1e-11, atol=1e-11)
        loss, loss_0 = loss + (factor * factor * ent).sum(), loss_0 + (factor * factor * ent_0).sum()
    else:
        assert ent is None
    for got, want in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(loss_0, wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck(options: LogitOptions) -> None:
    hidden, weight, bias, token = inputs(torch.float64, seed=1)

    def both(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        logp, ent = token_logprobs(h, w, token, b, options, entropy=True)
        assert ent is not None
        return logp, ent

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


def test_entropy_alone_has_its_gradient() -> None:
    hidden, weight, _, token = inputs(torch.float64)
    _, ent = token_logprobs(hidden, weight, token, options=LogitOptions(chunk=3), entropy=True)
    assert ent is not None
    _, ent_0 = plain(hidden, weight, token, None, LogitOptions())
    got, want = torch.autograd.grad(ent.sum(), hidden)[0], torch.autograd.grad(ent_0.sum(), hidden)[0]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


def test_uniform_distribution_has_entropy_log_v() -> None:
    hidden, weight = torch.zeros(2, H), torch.randn(V, H)
    logp, ent = token_logprobs(hidden, weight, torch.tensor([0, V - 1]), entropy=True)
    assert logp.tolist() == pytest.approx([-math.log(V)] * 2, abs=1e-6)
    assert ent is not None and ent.tolist() == pytest.approx([math.log(V)] * 2, abs=1e-6)


def test_two_outcomes_closed_form() -> None:
    """With V = 2 and logit gap x: log p = log σ(x), entropy = H(σ(x)), dH/dx = −x σ(x) σ(−x)."""
    x = torch.tensor([[1.3]], dtype=torch.float64, requires_grad=True)
    logp, ent = token_logprobs(x, torch.tensor([[1.0], [0.0]], dtype=torch.float64), torch.tensor([0]), entropy=True)
    p = 1 / (1 + math.exp(-1.3))
    assert ent is not None
    assert logp.item() == pytest.approx(math.log(p), abs=1e-12)
    assert ent.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-12)
    assert torch.autograd.grad(ent.sum(), x)[0].item() == pytest.approx(-1.3 * p * (1 - p), abs=1e-12)


def test_chunk_and_block_sizes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk, tile in [(1, 1), (2, 40), (7, 10**6), (1000, 300)]:
        monkeypatch.setattr(logprob, "TILE", tile)
        hidden, weight, _, token = inputs(torch.float32)
        logp, ent = token_logprobs(hidden, weight, token, options=LogitOptions(chunk=chunk), entropy=True)
        assert ent is not None
        grads = torch.autograd.grad(logp.sum() + ent.sum(), (hidden, weight))
        results.append((logp.detach(), ent.detach(), *grads))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=2e-6, atol=2e-6)


def test_log_softmax_is_float32_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 17: bfloat16 logits over a large vocabulary, float32 log-softmax; the reference is float64."""
    monkeypatch.setattr(logprob, "TILE", 1 << 18)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(32, 16, generator=generator).bfloat16()
    weight = torch.randn(20000, 16, generator=generator).bfloat16()
    token = torch.randint(20000, (32,), generator=generator)
    logits = hidden @ weight.t()
    want = logits.double().log_softmax(-1).gather(1, token[:, None])[:, 0]
    logp, _ = token_logprobs(hidden, weight, token)
    assert logp.dtype == torch.float32
    assert (logp - want).abs().max().item() < 5e-6
    half = logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
    assert (half - want).abs().max().item() > 1e-3  # what the rule avoids


def test_fp32_head_computes_the_product_in_float32() -> None:
    hidden, weight, bias, token = (t.detach() for t in inputs(torch.bfloat16))
    want = plain(hidden.double(), weight.double(), token, bias.double(), LogitOptions())[0]
    exact, _ = token_logprobs(hidden, weight, token, bias, LogitOptions(fp32_head=True))
    coarse, _ = token_logprobs(hidden, weight, token, bias)
    assert (exact - want).abs().max().item() < 1e-5
    assert (coarse - want).abs().max().item() > 1e-4


def test_head_gradient_is_summed_in_float32() -> None:
    """1,024 equal rows in chunks of 4: a bfloat16 running sum would stop growing long before the end."""
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logp, _ = token_logprobs(hidden, weight, torch.zeros(1024, dtype=torch.int64), options=LogitOptions(chunk=4))
    logp.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert weight.grad.flatten().tolist() == [512.0, -512.0]


def test_large_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    logp, ent = token_logprobs(hidden, torch.tensor([[1.0], [0.0], [-1.0]]), torch.tensor([0, 0]), entropy=True)
    assert logp.tolist() == [0.0, -2e4]
    assert ent is not None and ent.tolist() == [0.0, 0.0]
    (logp.sum() + ent.sum()).backward()
    assert hidden.grad is not None and hidden.grad.flatten().tolist() == [0.0, 2.0]


def test_frozen_head_and_no_tokens() -> None:
    hidden, weight, _, token = inputs(torch.float32)
    logp, _ = token_logprobs(hidden, weight.detach(), token)
    logp.sum().backward()
    assert hidden.grad is not None
    empty, ent = token_logprobs(hidden[:0], weight, token[:0], entropy=True)
    assert empty.shape == (0,) and ent is not None and ent.shape == (0,)
    empty.sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum().item() == 0.0


def test_works_without_grad_and_with_deterministic_algorithms() -> None:
    hidden, weight, _, token = inputs(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            quiet, _ = token_logprobs(hidden, weight, token)
        logp, _ = token_logprobs(hidden, weight, token)
        logp.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not quiet.requires_grad and torch.equal(quiet, logp)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("live", [[0, 5, 6, 12], []])
def test_tokens_without_a_gradient_are_left_out_and_change_nothing(
    live: list[int], entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, bias, token = inputs(torch.float64)
    options, factor = LogitOptions(chunk=3), torch.zeros(N, dtype=torch.float64)
    factor[live] = torch.linspace(1, 2, len(live), dtype=torch.float64)
    seen: list[int] = []
    tiles = logprob._tiles

    def counted(hidden_N: Tensor, *rest: object) -> object:
        seen.append(hidden_N.shape[0])
        return tiles(hidden_N, *rest)

    monkeypatch.setattr(logprob, "_tiles", counted)
    logp, ent = token_logprobs(hidden, weight, token, bias, options, entropy)
    logp_0, ent_0 = plain(hidden, weight, token, bias, options)
    loss, loss_0 = (factor * logp).sum(), (factor * logp_0).sum()
    if ent is not None:
        loss, loss_0 = loss + (factor * ent).sum(), loss_0 + (factor * ent_0).sum()
    got, expected = (torch.autograd.grad(x, [hidden, weight, bias]) for x in (loss, loss_0))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    assert seen == [N, len(live)]
