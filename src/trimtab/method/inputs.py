"""What a method's loss is computed from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """One batch, or a share of one cut at rows. N flat tokens, B rows; float32 or float64; log-probs in nats.

    Only ``current_N`` may carry a gradient. ``valid_N`` (bool): tokens that the policy chose; what stands elsewhere is
    never looked at. ``row_N`` (int64): row of each token, sorted; ``length_B`` (int64): tokens of each row.
    ``rollout_N`` may hold NaN where the engine gave no log-prob. ``proximal_N`` is None where no forward scored it
    (bypass, on_policy, a log-linear proximal); the others are None when no term needs them. ``group_B``: prompt of
    each row. ``lag_N`` (int64): updates between the policy that sampled a token and the proximal one.
    """

    current_N: Tensor
    rollout_N: Tensor
    valid_N: Tensor
    row_N: Tensor
    length_B: Tensor
    advantage_B: Tensor
    proximal_N: Tensor | None = None
    reference_N: Tensor | None = None
    entropy_N: Tensor | None = None
    reward_B: Tensor | None = None
    group_B: Tensor | None = None
    lag_N: Tensor | None = None
