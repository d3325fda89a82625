"""Which tokens the policy term is taken over: those of highest entropy."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy_keep(entropy_N: Tensor, valid_N: Tensor, share: float) -> Tensor:
    """Valid tokens whose entropy is at least the (1 - share) quantile of the valid tokens' entropies, bool [N].

    The quantile interpolates linearly, in float32. What stands at other tokens is not looked at. Denominators keep
    counting every valid token. Source: arXiv:2506.01939.
    """
    valid = entropy_N.detach()[valid_N].float()
    if len(valid) == 0:
        return torch.zeros_like(valid_N)
    return valid_N & (entropy_N.detach() >= torch.quantile(valid, 1.0 - share))
