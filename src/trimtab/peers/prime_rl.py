"""What prime-rl logs of its losses, one value a row (or a token), by its names.

``src/prime_rl/trainer/rl/loss.py`` at 559b4477 (``default``, ``ipo``, ``ref_kl``, ``ce``) and bf71516c (``legacy``).
All compare current with rollout: x = current - rollout, mismatch KL = exp(x) - x - 1. Bounds are strict: what lies on
one is kept. A row's mean over no tokens is 0; shares are float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.method import Coefficients, Inputs, evaluate, token_gradient
from trimtab.objective.aggregate import Counts
from trimtab.peers.segments import only, row_count, row_extremes, row_mean, row_share
from trimtab.spec import MethodSpec

REF_KL_MASK_LOW = 0.2
"""Largest fall of a token's probability below the rollout's that the ref_kl component keeps."""

REF_KL_TAU = 1e-3
"""The ref_kl component's coefficient of the squared log-ratio."""

LEGACY_SEQUENCE_CAP = math.exp(10.0)
"""Largest sequence ratio of the older loss, whatever ``sequence_clip_high``."""

Rows = dict[str, Tensor]


@dataclass(frozen=True)
class Legacy:
    """The options of the older ratio masks: two-sided bounds of the token, geometric and extreme ratio."""

    token_mask_low: float = 0.125
    token_mask_high: float = 8.0
    geo_mask_low: float = 0.1
    geo_mask_high: float = 10.0
    sequence_mask_low: float = 0.0
    sequence_mask_high: float = 100.0


@dataclass(frozen=True)
class _Batch:
    """Tokens of one loss component, whose mask is ``where_N``."""

    x_N: Tensor
    change_N: Tensor
    where_N: Tensor
    row_N: Tensor
    rows: int

    @property
    def kl_N(self) -> Tensor:
        return self.x_N.exp() - self.x_N - 1

    def mean(self, y_N: Tensor, flag_N: Tensor) -> Tensor:
        return row_mean(y_N, self.where_N & flag_N, self.row_N, self.rows)

    def share(self, flag_N: Tensor, among_N: Tensor | None = None) -> Tensor:
        where_N = self.where_N if among_N is None else self.where_N & among_N
        return row_share(flag_N, where_N, self.row_N, self.rows)

    def split(self, masked_N: Tensor) -> Rows:
        return {
            "masked_mismatch_kl": self.mean(self.kl_N, masked_N),
            "unmasked_mismatch_kl": self.mean(self.kl_N, ~masked_N),
            "is_masked": self.share(masked_N),
        }

    def present(self, found: Rows, every_row: bool) -> Rows:
        """Of rows that the component has a token of, or of every row."""
        if every_row:
            return found
        filled_B = row_count(self.where_N, self.row_N, self.rows) > 0
        return {name: value_B[filled_B] for name, value_B in found.items()}


def _batch(current_N: Tensor, rollout_N: Tensor, where_N: Tensor, row_N: Tensor, length_B: Tensor) -> _Batch:
    a_N, b_N = only(current_N, where_N), only(rollout_N, where_N)
    return _Batch(a_N - b_N, a_N.exp() - b_N.exp(), where_N, row_N, len(length_B))


def _component(valid_N: Tensor, weight_N: Tensor | None) -> Tensor:
    return valid_N if weight_N is None else valid_N & (weight_N != 0)


def coefficients(weight_N: Tensor, scale: float) -> Coefficients:
    """Of a component's tokens: weight / scale, for the policy term and the squared log-ratio alike.

    ``weight_N``: ``rl_weights``, ``ce_weights`` or ``ref_kl_weights``, 0 outside of the component; ``scale``: its
    tokens in the global batch.
    """
    coefficient_N = weight_N / scale
    return Coefficients(coefficient_N, coefficient_N)


@dataclass(frozen=True)
class Component:
    """One of the losses that prime-rl adds up (rl, ce, ref_kl): a method, and the tokens it is of.

    ``totals`` or ``given``: what its tokens are divided by, as ``trimtab.method.evaluate`` takes it.
    """

    method: MethodSpec
    inputs: Inputs
    totals: Counts | None = None
    given: Coefficients | None = None


def total(components: Sequence[Component]) -> tuple[Tensor, Tensor]:
    """Sum of the components' losses, a scalar, and of their gradients by the current log-probs, [N]; detached."""
    losses = [evaluate(c.method, c.inputs, totals=c.totals, given=c.given).loss.total.detach() for c in components]
    gradients = [token_gradient(c.method, c.inputs, totals=c.totals, given=c.given) for c in components]
    return torch.stack(losses).sum(), torch.stack(gradients).sum(0)


def scaled(advantage_B: Tensor, adv_tau: float) -> Tensor:
    """Advantages as the loss takes them."""
    return adv_tau * advantage_B


def default_metrics(
    *,
    current_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    advantage_B: Tensor,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    weight_N: Tensor | None = None,
) -> Rows:
    """``default``: a token is masked if its probability rose by more than high (A > 0) or fell by more than low (else).

    [B] each. ``weight_N`` (``rl_weights``): tokens of weight 0 and rows without another are left out. A = 0 counts in
    ``is_masked``, in neither ``is_masked_low`` nor ``is_masked_high``.
    """
    batch = _batch(current_N, rollout_N, _component(valid_N, weight_N), row_N, length_B)
    advantage_N = advantage_B[row_N]
    up_N, down_N = advantage_N > 0, advantage_N < 0
    rose_N, fell_N = batch.change_N > dppo_mask_high, batch.change_N < -dppo_mask_low
    masked_N = torch.where(up_N, rose_N, fell_N)
    found = batch.split(masked_N) | {
        "is_masked_low": batch.share(down_N & fell_N),
        "is_masked_high": batch.share(up_N & rose_N),
        "masked_advantage_positive": batch.share(up_N, among_N=masked_N),
        "masked_advantage_negative": batch.share(down_N, among_N=masked_N),
    }
    return batch.present(found, every_row=weight_N is None)


def ipo_metrics(
    *,
    current_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    ipo_threshold: float = 0.1,
    weight_N: Tensor | None = None,
) -> Rows:
    """``ipo``: a token is masked if its probability changed by more than the threshold. [B]; ``weight_N`` as above."""
    batch = _batch(current_N, rollout_N, _component(valid_N, weight_N), row_N, length_B)
    return batch.present(batch.split(batch.change_N.abs() > ipo_threshold), every_row=weight_N is None)


def ref_kl_metrics(
    *, current_N: Tensor, rollout_N: Tensor, reference_N: Tensor, row_N: Tensor, length_B: Tensor, weight_N: Tensor
) -> Rows:
    """The ref_kl component, on tokens of ``ref_kl_weights`` other than 0, of the rows that have one; [rows] each."""
    batch = _batch(current_N, rollout_N, weight_N != 0, row_N, length_B)
    apart_N = only(reference_N, batch.where_N) - only(current_N, batch.where_N)
    found = {f"ref_kl/{name}": x_B for name, x_B in batch.split(batch.change_N < -REF_KL_MASK_LOW).items()}
    return batch.present(found | {"ref_kl": batch.mean(apart_N, batch.where_N)}, every_row=False)


def ce_metrics(*, current_N: Tensor, row_N: Tensor, length_B: Tensor, weight_N: Tensor) -> Rows:
    """The ce component: unweighted ``nll`` of the tokens whose ``ce_weights`` is not 0, of the rows that have one."""
    batch = _batch(current_N, current_N, weight_N != 0, row_N, length_B)
    return batch.present({"nll": batch.mean(-only(current_N, batch.where_N), batch.where_N)}, every_row=False)


def legacy_metrics(
    *,
    current_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    options: Legacy,
    teacher_N: Tensor | None = None,
) -> Rows:
    """The older masks: a token's own ratio, its row's geometric mean and its row's smallest and largest ratio.

    ``is_masked*``: one value a valid token; the rest [B]. A row without tokens has geometric mean 1 and no extremes.
    """
    batch = _batch(current_N, rollout_N, valid_N, row_N, length_B)
    ratio_N, every_N = batch.x_N.exp(), torch.ones_like(valid_N)
    geometric_B = batch.mean(batch.x_N, every_N).exp()
    least_B, most_B = row_extremes(ratio_N, valid_N, row_N, batch.rows)
    low_N, high_N = ratio_N < options.token_mask_low, ratio_N > options.token_mask_high
    rows = {
        "sequence_masked_low": least_B < options.sequence_mask_low,
        "sequence_masked_high": most_B > options.sequence_mask_high,
        "geo_masked_low": geometric_B < options.geo_mask_low,
        "geo_masked_high": geometric_B > options.geo_mask_high,
    }
    masked_N = low_N | high_N | torch.stack(list(rows.values())).any(0)[row_N]
    split = batch.split(masked_N)
    found = {
        "mismatch_kl": batch.mean(batch.kl_N, every_N),
        "masked_mismatch_kl": split["masked_mismatch_kl"],
        "unmasked_mismatch_kl": split["unmasked_mismatch_kl"],
        "is_masked": masked_N[valid_N].float(),
        "is_masked_low": low_N[valid_N].float(),
        "is_masked_high": high_N[valid_N].float(),
        **{name: flag_B.float() for name, flag_B in rows.items()},
        "geo_seq_ratio": geometric_B,
    }
    if teacher_N is not None:
        found["teacher_kl"] = batch.mean(only(teacher_N, valid_N) - only(current_N, valid_N), every_N)
    return found
