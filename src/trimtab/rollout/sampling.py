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


def truncated(logits_BV: Tensor, top_p: float) -> Tensor:
    """Logits with all but the most probable tokens, of mass ``top_p`` together, at minus infinity.

    A token stays when those more probable than it have less than ``top_p``; the most probable one always does.
    """
    if top_p >= 1.0:
        return logits_BV
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    p_BV = sorted_BV.double().softmax(-1)
    dropped_BV = p_BV.cumsum(-1) - p_BV >= top_p
    dropped_BV[:, 0] = False
    return logits_BV.masked_fill(torch.zeros_like(dropped_BV).scatter(-1, order_BV, dropped_BV), -torch.inf)


def sample_step(
    logits_BV: Tensor, uniform_B: Tensor, temperature: float, mode: LogprobsMode, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature), cut at ``top_p``; temperature 0 takes the largest.

    logits_BV: float32; uniform_B: float64 in [0, 1), the only randomness. Inverse of the distribution function in
    float64, so rows do not touch each other and tokens of probability 0 are never drawn.
    Returns token_B (int64) and logp_B (float32 nats): of the distribution drawn from (processed; of T=1 over the whole
    vocabulary when greedy, as vLLM reports it) or of T=1 over the whole vocabulary (raw).
    """
    scaled = logits_BV if temperature in (0.0, 1.0) else logits_BV / temperature
    logp_BV = torch.log_softmax(truncated(scaled, top_p) if temperature else scaled, dim=-1)
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
