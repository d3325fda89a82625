"""What a rule that looks at the whole batch decides when the batch is infinitely large.

One sequence is one batch here, so what the batch would add is taken at its limit: a batch mean is the exact expectation
under the rollout policy, a quantile is that of the exact distribution.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trimtab.correction.normalise import divisor
from trimtab.method import Inputs, stages
from trimtab.method.evaluate import apply_stage
from trimtab.spec import Level, MethodSpec, RejectSpec, Statistic

Mixture = tuple[tuple[float, MethodSpec], ...]
"""Methods of which each sequence meets one, with these probabilities."""


def batch_factors(method: MethodSpec, inputs: Inputs, draw_B: Tensor) -> tuple[float | None, ...]:
    """What each stage's batch-normalised weights are divided by: expected sum over expected count of their ``mass``.

    A mass adds up over the rows of a batch, so the rows' own masses, weighted by ``draw_B``, give the expectation.
    """
    return tuple(
        _factor(method, number, inputs, draw_B) if stage.weight is not None and stage.weight.batch_normalize else None
        for number, stage in enumerate(stages(method))
    )


def _factor(method: MethodSpec, number: int, inputs: Inputs, draw_B: Tensor) -> float:
    stage, total, count = stages(method)[number], 0.0, 0.0
    starts = (inputs.length_B.cumsum(0) - inputs.length_B).tolist()
    for row, (start, length) in enumerate(zip(starts, inputs.length_B.tolist(), strict=True)):
        mass = apply_stage(stage, _row(inputs, row, start, start + length), factor=1.0).mass
        total += float(draw_B[row]) * mass.total
        count += float(draw_B[row]) * mass.count
    return divisor(total / count) if count > 0 else 1.0


def _row(inputs: Inputs, row: int, start: int, end: int) -> Inputs:
    """The batch that one row is."""
    at = slice(start, end)
    return replace(
        inputs,
        current_N=inputs.current_N[at].detach(),
        rollout_N=inputs.rollout_N[at],
        valid_N=inputs.valid_N[at],
        row_N=torch.zeros_like(inputs.row_N[at]),
        length_B=inputs.length_B[row : row + 1],
        advantage_B=inputs.advantage_B[row : row + 1],
        proximal_N=None if inputs.proximal_N is None else inputs.proximal_N[at],
        group_B=None,
        lag_N=None if inputs.lag_N is None else inputs.lag_N[at],
    )


def without_m2(method: MethodSpec, inputs: Inputs, draw_B: Tensor) -> Mixture:
    """M2PO as the rule |d| <= cut that it is in an infinite batch.

    It leaves out the largest d² until the mean of the rest is below the threshold; the value at which that happens is
    left out in part, so the method is a mixture of the rule with this value and of the rule without it.
    """
    threshold = method.mis.m2_threshold
    if threshold is None:
        return ((1.0, method),)
    size_N = apply_stage(stages(method)[0], inputs).given.log_ratio_M.abs()
    share, at, below = m2_cut(size_N, draw_B[inputs.row_N], threshold)
    mixed = ((share, _bounded(method, at)), (1.0 - share, _bounded(method, below)))
    return tuple(part for part in mixed if part[0] > 0)


def m2_cut(size_N: Tensor, mass_N: Tensor, threshold: float) -> tuple[float, float, float]:
    """(share kept of the tokens at the cut, the cut, a bound just below it): mean of kept size² = threshold."""
    sizes, place_N = torch.unique(size_N, return_inverse=True)
    mass = torch.zeros_like(sizes).index_add(0, place_N, mass_N)
    squares = mass * sizes**2
    excess = (squares - threshold * mass).cumsum(0)  # < 0 while the mean up to here is below the threshold
    over = torch.nonzero((excess >= 0) & (sizes**2 > threshold))
    if not len(over):
        return 1.0, float(sizes[-1]), float(sizes[-1])
    i = int(over[0])
    before = float(excess[i - 1]) if i else 0.0
    share = min(max(-before / float(squares[i] - threshold * mass[i]), 0.0), 1.0)
    below = float(sizes[i - 1] + sizes[i]) / 2 if i else float(sizes[i]) / 2
    return share, float(sizes[i]), below


def _bounded(method: MethodSpec, upper: float) -> MethodSpec:
    rule = RejectSpec(statistic=Statistic.abs, level=Level.token, upper=upper)
    return replace(method, mis=replace(method.mis, m2_threshold=None, reject=[*method.mis.reject, rule]))
