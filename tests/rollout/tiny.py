"""Helpers of the engine tests: tiny random models, and an oracle for their log-probs."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from trimtab.batch import Problem, Prompt, Sample

VOCABULARY = 32
END = 1


def make_model(seed: int, tied: bool, head_dim: int = 32) -> LlamaForCausalLM:
    """A random Llama (hidden 64, 2 layers, vocabulary 32) with sharp, varied distributions."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=64 // head_dim,
            num_key_value_heads=64 // head_dim,
            head_dim=head_dim,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=END,
            pad_token_id=END,  # as many real models have it: masks must not come from token values
            initializer_range=0.2,
        )
        return LlamaForCausalLM(config).eval()


def save(model: LlamaForCausalLM, folder: Path) -> Path:
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder


def weights_of(model: LlamaForCausalLM) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) with tied ones once, as a policy hands them over."""
    return [(name, parameter) for name, parameter in model.named_parameters()]


def full_logps(model: LlamaForCausalLM, ids: tuple[int, ...], temperature: float = 1.0) -> list[float]:
    """Oracle: log-probs of tokens 1.. by one forward over the row alone, softmax in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double() / temperature
    logps = torch.log_softmax(logits, -1)
    return [float(logps[i, token]) for i, token in enumerate(ids[1:])]


def prompt_of(*ids: int, name: str = "p") -> Prompt:
    return Prompt(Problem(f"{name}{ids[0]}", "text", "answer"), ids)


def gap(samples: list[Sample], model: LlamaForCausalLM, temperature: float = 1.0) -> float:
    """Largest difference to the oracle over all tokens."""
    gaps = []
    for sample in samples:
        exact = full_logps(model, (*sample.prompt.ids, *sample.ids), temperature)[len(sample.prompt.ids) - 1 :]
        gaps += [abs(a - b) for a, b in zip(sample.logps, exact, strict=True)]
    return max(gaps)
