"""Soft punishment of responses that come close to the length limit."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(length_B: Tensor, max_tokens: int, buffer: int, penalty: float) -> Tensor:
    """What is added to each response's reward, float64 [B]: 0 at first, then falling to -penalty at ``max_tokens``.

    With L = max_tokens - buffer: 0 for length <= L, penalty (L - length) / buffer up to max_tokens, -penalty beyond.
    A buffer of 0 punishes only what is longer than max_tokens. length_B: tokens of each response, int64. Source:
    arXiv:2503.14476 (DAPO, equation 13).
    """
    over_B = (length_B - (max_tokens - buffer)).double()
    share_B = over_B / buffer if buffer > 0 else torch.where(over_B > 0, 1.0, 0.0).double()
    return -penalty * share_B.clamp(0.0, 1.0)
