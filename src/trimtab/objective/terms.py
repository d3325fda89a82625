"""What a policy loss is computed from, and what it gives back; means over a row's tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from trimtab.stat import exponent_limit


@dataclass(frozen=True)
class TokenTerms:
    """A batch of B = ``rows`` rows laid flat; log-probs in nats, float32 or float64; only ``current_N`` has a gradient.

    anchor_N: the policy in the denominator of the policy ratio (proximal, rollout, or current detached). advantage_N:
    the row's advantage at each token. weight_N: importance weight, 1 where there is none. counted_N (bool): the tokens
    that a mean or a sum over a row runs over; the others get loss 0, whatever stands there. row_N (int64): row of each
    token.
    """

    current_N: Tensor
    anchor_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    counted_N: Tensor
    row_N: Tensor
    rows: int

    @cached_property
    def all_counted(self) -> bool:
        """Whether every token counts; then nothing has to be masked."""
        return bool(self.counted_N.all())

    def clean(self) -> TokenTerms:
        """The same with 0 at tokens that don't count, before anything is computed: no inf or NaN reaches a gradient."""
        if self.all_counted:
            return self
        return replace(
            self,
            current_N=torch.where(self.counted_N, self.current_N, 0.0),
            anchor_N=torch.where(self.counted_N, self.anchor_N, 0.0),
            advantage_N=torch.where(self.counted_N, self.advantage_N, 0.0),
            weight_N=torch.where(self.counted_N, self.weight_N, 0.0),
        )

    def row_sum(self, x_N: Tensor) -> Tensor:
        """Sum over each row's counted tokens, float64 [B]; a row's sum does not depend on its neighbours."""
        counted_N = x_N if self.all_counted else torch.where(self.counted_N, x_N, 0.0)
        return torch.zeros(self.rows, dtype=torch.float64).index_add(0, self.row_N, counted_N.double())

    @cached_property
    def count_B(self) -> Tensor:
        """Counted tokens of each row, float64."""
        zeros = torch.zeros(self.rows, dtype=torch.float64)
        return zeros.index_add(0, self.row_N, self.counted_N.double())

    def row_mean(self, x_N: Tensor) -> Tensor:
        """Mean over each row's counted tokens, float64 [B]; 0 for a row without any."""
        return self.row_sum(x_N) / self.count_B.clamp(min=1.0)

    def at_tokens(self, x_B: Tensor) -> Tensor:
        """The row's value at each of its tokens [N], in the log-probs' dtype."""
        return x_B.to(self.current_N.dtype).index_select(0, self.row_N)


@dataclass(frozen=True)
class Surrogate:
    """``loss_N`` with gradient, the weight in it; booleans tell where a bound changed a token's gradient.

    clipped_low_N, clipped_high_N: a lower or upper bound on the ratio or divergence; dual_clipped_N: a cap on the loss
    or on the ratio. False for losses without such a bound.
    """

    loss_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor
    dual_clipped_N: Tensor


def unbounded(loss_N: Tensor) -> Surrogate:
    """A loss that has no bound."""
    none_N = torch.zeros_like(loss_N, dtype=torch.bool)
    return Surrogate(loss_N, none_N, none_N, none_N)


def clamped(x_N: Tensor, bound: float | None) -> Tensor:
    """x within +-bound, without a gradient beyond; x itself for no bound."""
    return x_N if bound is None else x_N.clamp(-bound, bound)


def exponent(x_N: Tensor, clamp: float | None, dtype: torch.dtype | None = None) -> Tensor:
    """x as it may be exponentiated: within +-clamp, and never above what the dtype holds the exp of.

    ``dtype``: the one that the exp ends up in, if it is not that of x. There is no gradient beyond a bound.
    """
    high = exponent_limit(x_N.dtype if dtype is None else dtype, clamp)
    return x_N.clamp(max=high) if clamp is None else x_N.clamp(-clamp, high)
