"""A batch with everything its loss needs beside the current log-probs; ``select`` slices all of it alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.batch import Batch, Scores
from trimtab.method import Applied, Coefficients, Inputs, nothing


@dataclass(frozen=True)
class Scored:
    """Per token, detached. proximal_N: float32 nats, None where no forward scored it; reference_N: None without a KL
    term. ``applied`` is what the corrections did so far; ``coefficients`` come from the whole minibatch, None before
    they are known. ``first`` is a training forward already made (see Updater).
    """

    batch: Batch
    valid_N: Tensor
    advantage_B: Tensor
    lag_N: Tensor
    proximal_N: Tensor | None
    reference_N: Tensor | None
    applied: Applied
    coefficients: Coefficients | None = None
    first: Scores | None = None

    def select(self, rows: Sequence[int]) -> Scored:
        """The share of ``rows``; ``self`` when they are all rows in order."""
        if list(rows) == list(range(self.batch.rows)):
            return self
        at = self.batch.positions_of(rows)
        return Scored(
            batch=self.batch.select(rows),
            valid_N=self.valid_N[at],
            advantage_B=self.advantage_B[list(rows)],
            lag_N=self.lag_N[at],
            proximal_N=None if self.proximal_N is None else self.proximal_N[at],
            reference_N=None if self.reference_N is None else self.reference_N[at],
            applied=self.applied.at(at),
            coefficients=None if self.coefficients is None else self.coefficients.at(at),
        )

    def inputs(self, current_N: Tensor, entropy_N: Tensor | None = None) -> Inputs:
        """What the method takes, with these current log-probs."""
        return Inputs(
            current_N=current_N,
            rollout_N=self.batch.rollout_logp_N,
            valid_N=self.valid_N,
            row_N=self.batch.row_N,
            length_B=self.batch.length_B,
            advantage_B=self.advantage_B,
            proximal_N=self.proximal_N,
            reference_N=self.reference_N,
            entropy_N=entropy_N,
            reward_B=self.batch.reward_B,
            group_B=self.batch.group_B,
            lag_N=self.lag_N,
        )


def fresh(
    batch: Batch,
    valid_N: Tensor,
    advantage_B: Tensor,
    lag_N: Tensor,
    proximal_N: Tensor | None,
    reference_N: Tensor | None,
    first: Scores | None,
) -> Scored:
    """A scored batch with weights of 1, everything kept, and no denominators yet."""
    applied = nothing(batch.rollout_logp_N, valid_N)
    return Scored(batch, valid_N, advantage_B, lag_N, proximal_N, reference_N, applied, first=first)


def blank(tokens: int) -> Tensor:
    """Log-probs that nobody computed yet: NaN, float32."""
    return torch.full((tokens,), torch.nan)
