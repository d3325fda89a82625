"""What the flags of a policy loss say, and its levels, in closed form."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from objective.tokens import ADVANTAGE, ANCHOR, COUNTED, CURRENT, LOG_RATIO, clip, given

from trimtab.objective.clip import importance, ppo_clip
from trimtab.objective.ratio import log_ratio
from trimtab.objective.score import reinforce
from trimtab.objective.surrogate import TokenTerms, policy_terms
from trimtab.spec import LossName, LossSpec, RatioLevel

# -- what the flags say ------------------------------------------------------------------------------------------------


def test_ppo_gradient_is_r_times_advantage_inside_and_zero_where_a_bound_bites() -> None:
    x = torch.tensor([0.1, 1.0, -1.0, 1.0, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    out = ppo_clip(x, a, clip_low=0.2, clip_high=0.2, dual_clip=5.0)
    (gradient,) = torch.autograd.grad(out.loss_N.sum(), x)
    e = math.exp
    assert gradient.tolist() == pytest.approx([-e(0.1), 0.0, -e(-1.0), e(1.0), 0.0, 0.0], rel=1e-12)
    assert out.clipped_high_N.tolist() == [False, True, False, False, False, False]
    assert out.clipped_low_N.tolist() == [False, False, False, False, True, False]
    assert out.dual_clipped_N.tolist() == [False, False, False, False, False, True]


def test_two_sided_cap_equals_dual_clip_for_negative_advantages_and_is_idle_for_positive_ones() -> None:
    x, a = (torch.tensor(v) for v in zip(*itertools.product([-1.0, 0.0, 0.4, 0.6, 3.0], [-2.0, 1.0]), strict=True))
    capped = ppo_clip(x.double(), a.double(), clip_low=0.2, clip_high=0.2, ratio_cap=1.5)
    dual = ppo_clip(x.double(), a.double(), clip_low=0.2, clip_high=0.2, dual_clip=1.5)
    assert torch.equal(capped.loss_N, dual.loss_N) and torch.equal(capped.dual_clipped_N, dual.dual_clipped_N)


def test_a_cap_below_the_dual_clip_is_flagged_too() -> None:
    x = torch.tensor([math.log(1.3), math.log(1.6)], dtype=torch.float64)
    a = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    out = ppo_clip(x, a, clip_low=0.2, clip_high=0.2, ratio_cap=1.5, dual_clip=2.0)
    assert out.loss_N.tolist() == pytest.approx([1.3, 1.5]) and out.dual_clipped_N.tolist() == [False, True]


def test_importance_is_ppo_without_bounds() -> None:
    x = torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64)
    a = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    wide = ppo_clip(x, a, clip_low=1.0, clip_high=1e9)
    assert torch.equal(importance(x, a).loss_N, wide.loss_N) and not wide.clipped_low_N.any()


def test_reinforce_of_a_weight_is_the_importance_weighted_score() -> None:
    logp = torch.tensor([-0.3, -2.0], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([1.5, -0.5], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(reinforce(logp, a).loss_N.sum(), logp)
    assert torch.equal(gradient, -a)


def flags(spec: LossSpec) -> tuple[list[int], list[int], list[int]]:
    out = policy_terms(spec, given())
    found = [x.nonzero().flatten().tolist() for x in (out.clipped_low_N, out.clipped_high_N, out.dual_clipped_N)]
    return found[0], found[1], found[2]


def test_flags_name_the_tokens_that_a_bound_changed() -> None:
    assert flags(LossSpec(name=LossName.cispo)) == ([1, 6, 10], [3, 5, 8, 9], [])
    assert flags(LossSpec(name=LossName.gmpo, clip_low=0.4, clip_high=0.3)) == ([6], [3], [])
    p_minus_q = [math.exp(c) - math.exp(a) for c, a in zip(CURRENT, ANCHOR, strict=True)]
    over = [i for i in range(12) if COUNTED[i] and ADVANTAGE[i] > 0 and p_minus_q[i] > 0.15]
    under = [i for i in range(12) if COUNTED[i] and ADVANTAGE[i] <= 0 and p_minus_q[i] < -0.1]
    assert (over, under) == ([3], [6, 10])
    assert flags(LossSpec(name=LossName.dppo_tv, clip_low=0.1, clip_high=0.15)) == (under, over, [])
    capped = [5, 8, 9]
    assert flags(LossSpec(name=LossName.dppo_tv, clip_low=0.1, clip_high=0.15, ratio_cap=1.2))[2] == capped
    for name in (LossName.importance, LossName.reinforce, LossName.sapo, LossName.vespo):
        assert flags(LossSpec(name=name)) == ([], [], [])


def test_divergence_bounds_are_inclusive() -> None:
    one = torch.tensor([1.0, -1.0], dtype=torch.float64)
    anchor_N = torch.tensor([0.5, 0.75], dtype=torch.float64).log()
    current_N = torch.tensor([0.75, 0.5], dtype=torch.float64).log()
    moved = (current_N.exp() - anchor_N.exp()).tolist()
    t = TokenTerms(current_N, anchor_N, one, torch.ones(2).double(), torch.ones(2).bool(), torch.tensor([0, 0]), 1)
    at = LossSpec(name=LossName.dppo_tv, clip_high=moved[0], clip_low=-moved[1])
    inside = LossSpec(name=LossName.dppo_tv, clip_high=moved[0] - 1e-9, clip_low=-moved[1] - 1e-9)
    assert policy_terms(at, t).loss_N.all() and not policy_terms(inside, t).loss_N.any()


# -- levels ------------------------------------------------------------------------------------------------------------


def test_sequence_ratio_spreads_the_gradient_and_sequence_token_keeps_it() -> None:
    live = torch.tensor(CURRENT, dtype=torch.float64, requires_grad=True)
    for level in (RatioLevel.sequence, RatioLevel.sequence_token):
        x = log_ratio(given(live), level, None)
        assert float(x[0].detach()) == pytest.approx((0.1 - 0.4 + 0.5 + 0.0) / 4, rel=1e-12)
        (gradient,) = torch.autograd.grad(x[0], live)
        spread = level is RatioLevel.sequence
        expected = [0.25, 0.25, 0.0, 0.25, 0.25] if spread else [1.0, 0.0, 0.0, 0.0, 0.0]
        assert gradient.tolist() == pytest.approx(expected + [0.0] * 7, abs=1e-15)


def test_both_sequence_levels_have_one_gradient_summed_over_a_row_of_one_advantage() -> None:
    """GSPO-token with the row's advantage everywhere is GSPO (arXiv:2507.18071, section 4.3)."""
    found = []
    for level in (RatioLevel.sequence, RatioLevel.sequence_token):
        live = torch.tensor(CURRENT, dtype=torch.float64, requires_grad=True)
        t = replace(given(live), weight_N=torch.ones(12, dtype=torch.float64))
        loss_N = policy_terms(LossSpec(ratio_level=level), t).loss_N
        found.append(torch.autograd.grad(loss_N.sum(), live)[0])
    assert torch.allclose(*found, rtol=1e-12, atol=1e-15)


def test_luspo_is_gspo_times_length() -> None:
    """Sum over tokens of the row's loss = length x the row's loss."""
    t = replace(given(), weight_N=torch.ones(12, dtype=torch.float64))
    loss_N = policy_terms(LossSpec(ratio_level=RatioLevel.sequence), t).loss_N
    sums = t.row_sum(loss_N).tolist()
    for row, rows_tokens in ((0, [0, 1, 3, 4]), (1, [5, 6, 8])):
        mean = math.fsum(LOG_RATIO[i] for i in rows_tokens) / len(rows_tokens)
        a, r = ADVANTAGE[rows_tokens[0]], math.exp(mean)
        expected = len(rows_tokens) * -min(r * a, clip(r, 0.8, 1.2) * a)
        assert sums[row] == pytest.approx(expected, rel=1e-12)


def test_vespo_fades_on_both_sides_of_one() -> None:
    """phi(1) = 1, and its logarithm's slope at 1 is k - rate."""
    t = replace(given(), anchor_N=given().current_N)
    base = TokenTerms(
        *(x[:1] for x in (t.current_N, t.anchor_N, t.advantage_N)), *([torch.ones(1)] * 2), t.row_N[:1], 1
    )
    base = replace(base, weight_N=torch.ones(1, dtype=torch.float64), counted_N=torch.ones(1, dtype=torch.bool))

    def phi(w: float) -> float:
        out = policy_terms(
            LossSpec(name=LossName.vespo), replace(base, weight_N=torch.tensor([w], dtype=torch.float64))
        )
        return float(out.loss_N) / float(-base.advantage_N * base.current_N)

    assert phi(1.0) == pytest.approx(1.0, rel=1e-12)
    assert (math.log(phi(1 + 1e-6)) - math.log(phi(1 - 1e-6))) / 2e-6 == pytest.approx(2.0 - 3.0, rel=1e-4)
    assert phi(2.0) == pytest.approx(4 * math.exp(3 - 6), rel=1e-12) and phi(0.0) == pytest.approx(1e-16 * math.e**3)
