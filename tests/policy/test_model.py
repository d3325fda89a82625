"""The policy over small random models of several architectures: alignment, padding, weights, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MptConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from trimtab.batch import Batch, Finish, Problem, Prompt, Sample, pack
from trimtab.errors import DataError, ModelError
from trimtab.policy import tiny
from trimtab.policy.model import CausalPolicy, predicting_positions, without_dropout
from trimtab.policy.tokenizer import HfTokenizer
from trimtab.spec import PolicySpec

V = 40
SMALL = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
}
LLAMA = LlamaConfig(**SMALL, tie_word_embeddings=True)
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LLAMA,
    "llama_untied": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SMALL),
    "gemma2_softcap": Gemma2Config(**SMALL, final_logit_softcapping=3.0),
    "cohere_scale": CohereConfig(**SMALL, logit_scale=0.25),
    "granite_divisor": GraniteConfig(**SMALL, logits_scaling=4.0),
    "gpt2_absolute_positions": GPT2Config(
        vocab_size=V, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, initializer_range=0.3
    ),
    "opt_dropout": OPTConfig(
        vocab_size=V, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=32
    ),
    "mpt_alibi": MptConfig(vocab_size=V, d_model=32, n_heads=2, n_layers=2),
}


def policy(config: PreTrainedConfig = LLAMA, keep_reference: bool = False, **options: object) -> CausalPolicy:
    torch.manual_seed(0)
    without_dropout(config)
    model = AutoModelForCausalLM.from_config(config)
    return CausalPolicy(model, HfTokenizer(tiny.new_tokenizer(), V, (2,)), PolicySpec(**options), keep_reference)


def row(prompt: list[int], response: list[int]) -> Sample:
    asked = Prompt(Problem("p", "", ""), tuple(prompt))
    return Sample(asked, tuple(response), (0.0,) * len(response), (0,) * len(response), Finish.stop)


def batch(*samples: Sample) -> Batch:
    return pack(samples, [0] * len(samples), [0.0] * len(samples))


# Prompts of different length; an end token (2) inside the response and none (cut by length); pad id 0 as a real token.
ROWS = [row([5, 6, 7], [8, 9, 2]), row([11], [12, 0, 13, 14, 0]), row([3, 2, 4, 4, 21, 30], [2]), row([9, 9], [])]


def oracle(model: torch.nn.Module, rows: list[Sample], temperature: float = 1.0) -> list[float]:
    """Row by row, token by token, from the model's own logits of that row alone."""
    out = []
    for sample in rows:
        for j, token in enumerate(sample.ids):
            before = [*sample.prompt.ids, *sample.ids[:j]]
            logits = model(input_ids=torch.tensor([before]), use_cache=False).logits[0, -1].double() / temperature
            out.append(float(logits.log_softmax(-1)[token]))
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_aligned_and_unpadded_for_every_architecture(name: str) -> None:
    """Cases 11, 16, 40: prompts of unequal length in one batch give what each prefix alone gives."""
    subject = policy(CONFIGS[name])
    with torch.no_grad():
        want = oracle(subject.model, ROWS, temperature=0.7)
    got = subject.score(batch(*ROWS), temperature=0.7)
    assert got.entropy_N is None and got.logp_N.dtype == torch.float32
    assert got.logp_N.tolist() == pytest.approx(want, abs=2e-5)


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    subject = policy()
    alone = torch.cat([subject.score(batch(r)).logp_N for r in ROWS])
    torch.testing.assert_close(subject.score(batch(*ROWS)).logp_N, alone, rtol=0, atol=1e-5)


def test_positions_are_those_before_each_response_token() -> None:
    made = batch(*ROWS)
    assert predicting_positions(made, 7).tolist() == [2, 3, 4, 7, 8, 9, 10, 11, 14 + 5]


def test_end_token_has_its_own_log_prob_and_gradient() -> None:
    subject = policy()
    logp = subject.score(batch(row([5, 6], [7, 2])), grad=True).logp_N
    logp[1].backward()
    assert logp[1].item() < -0.1
    assert subject.model.lm_head.weight.grad[2].abs().sum() > 0


def test_padding_and_the_prompts_last_positions_get_gradient_exactly_zero() -> None:
    subject = policy()
    seen: list[Tensor] = []

    def keep(module: object, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    handle = subject.model.get_input_embeddings().register_forward_hook(keep)
    subject.score(batch(*ROWS), grad=True).logp_N.sum().backward()
    handle.remove()
    gradient = seen[0].grad
    assert gradient is not None
    lengths = [len(r.prompt.ids) + len(r.ids) for r in ROWS]
    for b, length in enumerate(lengths):
        used = length - 1 if ROWS[b].ids else 0  # the last token predicts nothing
        assert gradient[b, used:].abs().max().item() == 0.0
        assert bool((gradient[b, :used].abs().sum(-1) > 0).all())


def test_entropy_and_its_gradient_against_torch() -> None:
    subject = policy()
    scores = subject.score(batch(ROWS[0]), temperature=1.3, grad=True, entropy=True)
    assert scores.entropy_N is not None
    scores.entropy_N.sum().backward()
    got = [p.grad.clone() for p in subject.parameters()]
    subject.model.zero_grad()
    logs = (subject.model(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 2:] / 1.3).log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    entropy.sum().backward()
    torch.testing.assert_close(scores.entropy_N, entropy, rtol=1e-5, atol=1e-5)
    for have, want in zip(got, [p.grad for p in subject.parameters()], strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


def test_batches_without_tokens_have_a_gradient_path() -> None:
    subject = policy()
    for made in (batch(row([4], [])), batch()):
        scores = subject.score(made, grad=True, entropy=True)
        assert scores.logp_N.shape == (0,) and scores.entropy_N is not None and scores.entropy_N.shape == (0,)
        (scores.logp_N.sum() + scores.entropy_N.sum()).backward()
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in subject.parameters())


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="row 1 has no prompt token"):
        policy().score(batch(ROWS[0], row([], [3])))


def test_gradient_checkpointing_recomputes_and_changes_nothing() -> None:
    grads = {}
    calls = {}
    for on in (False, True):
        subject = policy(OPTConfig(**{**CONFIGS["opt_dropout"].to_dict(), "dropout": 0.5}), gradient_checkpointing=on)
        counted: list[int] = []
        subject.model.model.decoder.layers[0].fc1.register_forward_hook(lambda *_, into=counted: into.append(1))
        subject.score(batch(*ROWS), grad=True).logp_N.sum().backward()
        grads[on] = [p.grad for p in subject.parameters()]
        calls[on] = len(counted)
    assert calls == {False: 1, True: 2}
    torch.testing.assert_close(grads[True], grads[False], rtol=0, atol=0)


def test_weights_list_tied_ones_once_by_checkpoint_name(tmp_path: Path) -> None:
    tied, untied = policy(), policy(CONFIGS["llama_untied"])
    names = [name for name, _ in tied.weights()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert "lm_head.weight" in dict(untied.weights())
    assert len(names) == len(set(names))
    tied.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == set(names)
    assert all(torch.equal(stored[name], tensor) for name, tensor in tied.weights())


def test_state_round_trip_and_strictness() -> None:
    first, second = policy(), policy()
    with torch.no_grad():
        for p in first.parameters():
            p.add_(0.01)
    assert not torch.equal(first.score(batch(*ROWS)).logp_N, second.score(batch(*ROWS)).logp_N)
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    assert torch.equal(first.score(batch(*ROWS)).logp_N, second.score(batch(*ROWS)).logp_N)
    assert second.model.lm_head.weight is second.model.model.embed_tokens.weight
    state = first.state()
    with pytest.raises(ModelError, match=r"missing \['model.norm.weight'\]"):
        second.load_state({k: v for k, v in state.items() if k != "model.norm.weight"})
    with pytest.raises(ModelError, match=r"surplus \['odd'\]"):
        second.load_state({**state, "odd": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"model.norm.weight is \(3,\) torch.float32, not \(32,\) torch.float32"):
        second.load_state({**state, "model.norm.weight": torch.zeros(3)})


def test_reference_stays_the_initial_model() -> None:
    subject = policy(keep_reference=True)
    initial = subject.score(batch(*ROWS)).logp_N
    subject.load_state({name: tensor + 0.05 for name, tensor in subject.state().items()})
    assert not torch.equal(subject.score(batch(*ROWS)).logp_N, initial)
    reference = subject.score_reference(batch(*ROWS)).logp_N
    assert torch.equal(reference, initial) and not reference.requires_grad
    with pytest.raises(ModelError, match=r"loss\.kl_coef="):
        policy().score_reference(batch(*ROWS))


def test_no_dropout_even_where_the_model_has_it() -> None:
    subject = policy(OPTConfig(**{**CONFIGS["opt_dropout"].to_dict(), "dropout": 0.5, "attention_dropout": 0.5}))
    first, second = (subject.score(batch(*ROWS), grad=True).logp_N for _ in range(2))
    assert torch.equal(first, second)


def test_unknown_treatment_of_logits_is_refused() -> None:
    config = GraniteConfig(**SMALL, logits_scaling=4.0)
    model = AutoModelForCausalLM.from_config(config)
    forward = model.forward

    def odd(*args: object, **kwargs: object) -> object:
        out = forward(*args, **kwargs)
        out.logits = out.logits.cos()
        return out

    model.forward = odd
    with pytest.raises(ModelError, match="'granite' do something to their logits"):
        CausalPolicy(model, HfTokenizer(tiny.new_tokenizer(), V, (2,)), PolicySpec())
