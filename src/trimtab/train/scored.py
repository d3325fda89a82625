"""A batch with everything its loss needs beside the current log-probs; ``select`` slices all of it alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trimtab.batch import Batch, Scores
from trimtab.correction import Correction


@dataclass(frozen=True)
class Scored:
    """Per token, detached. proximal_N: float32 nats, None in bypass; reference_N: None without a KL term.

    weight_N and keep_N are those applied to the loss; policy_coefficient_N and term_coefficient_N come from the whole
    minibatch and are zeros before ``with_coefficients``. ``first`` is a training forward already made (see Updater).
    """

    batch: Batch
    valid_N: Tensor
    advantage_N: Tensor
    proximal_N: Tensor | None
    reference_N: Tensor | None
    weight_N: Tensor
    keep_N: Tensor
    policy_coefficient_N: Tensor
    term_coefficient_N: Tensor
    first: Scores | None = None

    def select(self, rows: Sequence[int]) -> Scored:
        """The share of ``rows``; ``self`` when they are all rows in order."""
        if list(rows) == list(range(self.batch.rows)):
            return self
        at = self.batch.positions_of(rows)
        return Scored(
            batch=self.batch.select(rows),
            valid_N=self.valid_N[at],
            advantage_N=self.advantage_N[at],
            proximal_N=None if self.proximal_N is None else self.proximal_N[at],
            reference_N=None if self.reference_N is None else self.reference_N[at],
            weight_N=self.weight_N[at],
            keep_N=self.keep_N[at],
            policy_coefficient_N=self.policy_coefficient_N[at],
            term_coefficient_N=self.term_coefficient_N[at],
        )

    def with_correction(self, correction: Correction) -> Scored:
        """With a correction's weights and keeps applied."""
        return replace(self, weight_N=correction.weight_N.float(), keep_N=correction.keep_N)

    def with_coefficients(self, policy_N: Tensor, term_N: Tensor) -> Scored:
        """With the denominators of the minibatch."""
        return replace(self, policy_coefficient_N=policy_N, term_coefficient_N=term_N)


def fresh(
    batch: Batch,
    valid_N: Tensor,
    advantage_N: Tensor,
    proximal_N: Tensor | None,
    reference_N: Tensor | None,
    first: Scores | None,
) -> Scored:
    """A scored batch with weights of 1, everything kept, and no denominators yet."""
    zeros = torch.zeros(batch.tokens)
    return Scored(
        batch=batch,
        valid_N=valid_N,
        advantage_N=advantage_N,
        proximal_N=proximal_N,
        reference_N=reference_N,
        weight_N=torch.ones(batch.tokens),
        keep_N=torch.ones(batch.tokens, dtype=torch.bool),
        policy_coefficient_N=zeros,
        term_coefficient_N=zeros,
        first=first,
    )
