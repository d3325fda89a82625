"""One sampling step on the CPU: logits of some rows to tokens and the log-probs they were drawn with. Pure maths."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trimtab.spec import LogprobsMode


def uniforms(seed: int, count: int) -> Tensor:
    """The ``count`` uniform numbers in [0, 1) of the row with this seed; float64, the first ones whatever the count."""
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=seed)).random(count))


def logit_noise(seed: int, position: int, vocabulary: int) -> Tensor:
    """Standard normal noise [V] (float32) for response token ``position`` of the row with this seed.

    Counter-based (Philox keyed by seed and position plus 1), so anybody can rebuild the exact distribution that a
    token was drawn from without replaying those before it. Independent of ``uniforms``.
    """
    key = np.array([seed, position + 1], dtype=np.uint64)
    return torch.from_numpy(
        np.random.Generator(np.random.Philox(key=key)).standard_normal(vocabulary, dtype=np.float32)
    )


def sample_step(logits_BV: Tensor, uniform_B: Tensor, temperature: float, mode: LogprobsMode) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature); temperature 0 takes the largest logit.

    logits_BV: float32; uniform_B: float64 in [0, 1), the only randomness. Inverse of the distribution function in
    float64, so rows do not touch each other and tokens of probability 0 are never drawn.
    Returns token_B (int64) and logp_B (float32 nats): of the distribution drawn from (processed; of T=1 when greedy,
    as vLLM reports it) or of T=1 (raw).
    """
    scaled = logits_BV if temperature in (0.0, 1.0) else logits_BV / temperature
    logp_BV = torch.log_softmax(scaled, dim=-1)
    if temperature == 0.0:
        token_B = logits_BV.argmax(dim=-1)
    else:
        cdf_BV = logp_BV.double().exp().cumsum(dim=-1)
        total_B = cdf_BV[:, -1]
        # The product may round up to the total, beyond which there is no token.
        target_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
        token_B = torch.searchsorted(cdf_BV, target_B[:, None], right=True)[:, 0]
    match mode:
        case LogprobsMode.processed:
            reported_BV = logp_BV
        case LogprobsMode.raw:
            reported_BV = torch.log_softmax(logits_BV, dim=-1)
    return token_B, reported_BV.gather(-1, token_B[:, None])[:, 0]
