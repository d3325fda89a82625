"""Every policy loss against loops written from its paper: values, and gradients by central differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from trimtab.objective.clip import importance, ppo_clip
from trimtab.objective.ratio import log_ratio
from trimtab.objective.score import reinforce
from trimtab.objective.surrogate import Surrogate, TokenTerms, policy_terms
from trimtab.spec import LossName, LossSpec, RatioLevel

COUNTED = [True, True, False, True, True, True, True, False, True, True, True, True]
ROW = [0, 0, 0, 0, 0, 1, 1, 1, 1, 3, 3, 3]  # row 2 is empty
ADVANTAGE = [0.8, 0.8, 0.8, 0.8, 0.8, -1.3, -1.3, -1.3, -1.3, 0.0, 0.0, 0.0]
LOG_RATIO = [0.1, -0.4, 9.0, 0.5, 0.0, 0.35, -0.6, -9.0, 1.6, 0.3, -0.3, 0.05]
ANCHOR = [-1.0, -0.5, -0.1, -1.2, -2.0, -1.9, -0.3, -0.2, -2.2, -0.7, -0.9, -1.1]
WEIGHT = [1.2, 0.4, 7.0, 2.0, 1.0, 0.9, 1.7, 3.0, 0.6, 1.1, 0.0, 2.0]
CURRENT = [a + x for a, x in zip(ANCHOR, LOG_RATIO, strict=True)]


def given(current_N: Tensor | None = None) -> TokenTerms:
    current_N = torch.tensor(CURRENT, dtype=torch.float64) if current_N is None else current_N
    rest = [torch.tensor(x, dtype=torch.float64) for x in (ANCHOR, ADVANTAGE, WEIGHT)]
    return TokenTerms(current_N, *rest, torch.tensor(COUNTED), torch.tensor(ROW), 4)


# -- the oracle: one token at a time, ``frozen`` holds the log-probs behind a stop-gradient ----------------------------


@dataclass(frozen=True)
class At:
    """One token, and the counted tokens of its row."""

    i: int
    current: list[float]
    frozen: list[float]
    level: RatioLevel

    @property
    def row(self) -> list[int]:
        return [j for j, (r, c) in enumerate(zip(ROW, COUNTED, strict=True)) if r == ROW[self.i] and c]

    def x(self, log_probs: list[float]) -> float:
        own = log_probs[self.i] - ANCHOR[self.i]
        match self.level:
            case RatioLevel.token:
                return own
            case RatioLevel.sequence:
                return self.mean([log_probs[j] - ANCHOR[j] for j in self.row])
            case RatioLevel.sequence_token:
                row = self.mean([self.frozen[j] - ANCHOR[j] for j in self.row])
                return row + log_probs[self.i] - self.frozen[self.i]

    @staticmethod
    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    @property
    def r(self) -> float:
        return math.exp(self.x(self.current))

    @property
    def r_frozen(self) -> float:
        return math.exp(self.x(self.frozen))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def loop_ppo(spec: LossSpec, at: At) -> float:
    a, r = ADVANTAGE[at.i], at.r
    free = min(r, spec.ratio_cap) if spec.ratio_cap is not None else r
    loss = -min(free * a, clip(r, 1 - spec.clip_low, 1 + spec.clip_high) * a)
    if spec.dual_clip is not None and a < 0:
        loss = min(loss, -spec.dual_clip * a)
    return loss * WEIGHT[at.i]


def loop_importance(spec: LossSpec, at: At) -> float:
    return -at.r * ADVANTAGE[at.i] * WEIGHT[at.i]


def loop_reinforce(spec: LossSpec, at: At) -> float:
    return -ADVANTAGE[at.i] * at.current[at.i] * WEIGHT[at.i]


def loop_cispo(spec: LossSpec, at: At) -> float:
    return -clip(at.r_frozen, 1 - spec.clip_low, 1 + spec.clip_high) * ADVANTAGE[at.i] * at.current[at.i] * WEIGHT[at.i]


def loop_sapo(spec: LossSpec, at: At) -> float:
    tau = spec.sapo_tau_positive if ADVANTAGE[at.i] > 0 else spec.sapo_tau_negative
    return -4 / tau / (1 + math.exp(-tau * (at.r - 1))) * ADVANTAGE[at.i] * WEIGHT[at.i]


def loop_dppo(spec: LossSpec, at: At) -> float:
    i, a = at.i, ADVANTAGE[at.i]
    p, q = math.exp(at.frozen[i]), math.exp(ANCHOR[i])
    moved_its_way = p > q if a > 0 else p < q
    bound = spec.clip_high if a > 0 else spec.clip_low
    if spec.name is LossName.dppo_tv:
        divergence = abs(p - q)
    else:
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if moved_its_way and divergence > bound:
        return 0.0
    r = p / q if spec.ratio_cap is None else min(p / q, spec.ratio_cap)
    return -r * a * at.current[i] * WEIGHT[i]


def loop_gmpo(spec: LossSpec, at: At) -> float:
    a = ADVANTAGE[at.i]
    bounded = []
    for j in at.row:
        x = at.current[j] - ANCHOR[j]
        bounded.append(min(x, spec.clip_high) if a > 0 else max(x, -spec.clip_low) if a < 0 else x)
    geometric = math.exp(at.mean([math.log(WEIGHT[j] + 1e-10) for j in at.row]))
    return -a * math.exp(at.mean(bounded)) * geometric


def loop_vespo(spec: LossSpec, at: At) -> float:
    a = ADVANTAGE[at.i]
    k, rate = spec.vespo_positive if a >= 0 else spec.vespo_negative
    w = 1.0
    for j in at.row:
        w *= math.exp(at.frozen[j] - ANCHOR[j]) * max(WEIGHT[j], 1e-8)
    w = clip(w, 1e-8, math.exp(20))
    return -(w**k) * math.exp(rate * (1 - w)) * a * at.current[at.i]


LOOPS: dict[LossName, Callable[[LossSpec, At], float]] = {
    LossName.ppo_clip: loop_ppo,
    LossName.importance: loop_importance,
    LossName.reinforce: loop_reinforce,
    LossName.cispo: loop_cispo,
    LossName.sapo: loop_sapo,
    LossName.gmpo: loop_gmpo,
    LossName.dppo_tv: loop_dppo,
    LossName.dppo_kl: loop_dppo,
    LossName.vespo: loop_vespo,
}
HAVE_LEVELS = (LossName.ppo_clip, LossName.importance, LossName.cispo, LossName.sapo)
CASES = [
    *(LossSpec(name=n, ratio_level=level, clip_high=0.28) for n in HAVE_LEVELS for level in RatioLevel),
    LossSpec(dual_clip=1.5, ratio_level=RatioLevel.token),
    LossSpec(ratio_cap=1.45),
    LossSpec(ratio_cap=1.45, dual_clip=1.2),
    LossSpec(name=LossName.cispo, clip_low=1.0, clip_high=0.5),
    LossSpec(name=LossName.sapo, sapo_tau_positive=2.0, sapo_tau_negative=0.5),
    LossSpec(name=LossName.reinforce),
    LossSpec(name=LossName.gmpo, clip_low=0.4, clip_high=0.3),
    LossSpec(name=LossName.dppo_tv, clip_low=0.1, clip_high=0.15),
    LossSpec(name=LossName.dppo_tv, clip_low=0.1, clip_high=0.15, ratio_cap=1.2),
    LossSpec(name=LossName.dppo_kl, clip_low=0.03, clip_high=0.02),
    LossSpec(name=LossName.dppo_kl, clip_low=0.03, clip_high=0.02, ratio_cap=1.05),
    LossSpec(name=LossName.vespo),
    LossSpec(name=LossName.vespo, vespo_positive=[1.0, 0.5], vespo_negative=[0.5, 1.5]),
]
NAMES = [f"{i}-{spec.name.value}-{spec.ratio_level.value}" for i, spec in enumerate(CASES)]


def loop(spec: LossSpec, current: list[float], frozen: list[float]) -> list[float]:
    tokens = range(len(ROW))
    return [LOOPS[spec.name](spec, At(i, current, frozen, spec.ratio_level)) if COUNTED[i] else 0.0 for i in tokens]


def test_every_loss_has_an_oracle_and_a_case() -> None:
    assert set(LOOPS) == {spec.name for spec in CASES} == set(LossName)


@pytest.mark.parametrize("spec", CASES, ids=NAMES)
def test_value_equals_a_loop(spec: LossSpec) -> None:
    out = policy_terms(spec, given())
    assert out.loss_N.tolist() == pytest.approx(loop(spec, CURRENT, CURRENT), rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("spec", CASES, ids=NAMES)
def test_gradient_equals_central_differences_of_the_loop(spec: LossSpec) -> None:
    live = torch.tensor(CURRENT, dtype=torch.float64, requires_grad=True)
    mixed = [1.0 + 0.1 * i for i in range(len(ROW))]  # so that a token's gradient can't hide in another's
    (gradient,) = torch.autograd.grad((policy_terms(spec, given(live)).loss_N * torch.tensor(mixed)).sum(), live)
    step, expected = 1e-6, []
    for i in range(len(CURRENT)):
        moved = [[c + (sign * step if j == i else 0.0) for j, c in enumerate(CURRENT)] for sign in (1, -1)]
        up, down = (math.fsum(m * v for m, v in zip(mixed, loop(spec, at, CURRENT), strict=True)) for at in moved)
        expected.append((up - down) / (2 * step))
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", CASES, ids=NAMES)
def test_what_stands_at_tokens_that_do_not_count_reaches_nothing(spec: LossSpec, poison: float) -> None:
    def run(terms: TokenTerms) -> tuple[Surrogate, Tensor]:
        live = terms.current_N.clone().requires_grad_()
        out = policy_terms(spec, replace(terms, current_N=live))
        return out, torch.autograd.grad(out.loss_N.sum(), live)[0]

    clean = given()
    gone = ~clean.counted_N
    columns = ("current_N", "anchor_N", "advantage_N", "weight_N")
    wanted, wanted_gradient = run(clean)
    for chosen in (*((c,) for c in columns), columns):
        spoilt = clean
        for column in chosen:
            x = {"current_N": clean.current_N, "anchor_N": clean.anchor_N, "advantage_N": clean.advantage_N}
            spoilt = replace(spoilt, **{column: torch.where(gone, poison, x.get(column, clean.weight_N))})
        out, gradient = run(spoilt)
        assert torch.equal(out.loss_N, wanted.loss_N) and torch.equal(gradient, wanted_gradient)
        assert not out.loss_N[gone].any() and not gradient[gone].any()
        flags = (out.clipped_low_N, out.clipped_high_N, out.dual_clipped_N)
        expected = (wanted.clipped_low_N, wanted.clipped_high_N, wanted.dual_clipped_N)
        assert all(torch.equal(a, b) for a, b in zip(flags, expected, strict=True))


@pytest.mark.parametrize("spec", CASES, ids=NAMES)
def test_losses_do_not_depend_on_how_the_batch_is_cut_at_rows(spec: LossSpec) -> None:
    whole = given()
    parts = []
    for at, rows in ((slice(0, 5), 1), (slice(5, 12), 3)):
        columns = (whole.current_N, whole.anchor_N, whole.advantage_N, whole.weight_N, whole.counted_N)
        row_N = whole.row_N[at] - int(whole.row_N[at][0])
        parts.append(policy_terms(spec, TokenTerms(*(c[at] for c in columns), row_N, rows)).loss_N)
    assert torch.equal(torch.cat(parts), policy_terms(spec, whole).loss_N)


@pytest.mark.parametrize("name", list(LossName))
def test_at_equal_policies_every_loss_has_the_gradient_of_the_score(name: LossName) -> None:
    """r = 1, weights 1, and row sums of means: the gradient of each row's mean is A / tokens at each token."""
    t = given()
    t = replace(t, anchor_N=t.current_N, weight_N=torch.ones(12, dtype=torch.float64))
    for level in RatioLevel:
        live = t.current_N.clone().requires_grad_()
        spec = LossSpec(name=name, ratio_level=level)
        out = policy_terms(spec, replace(t, current_N=live))
        (gradient,) = torch.autograd.grad(out.loss_N.sum(), live)
        expected = torch.where(t.counted_N, -t.advantage_N, 0.0)
        assert torch.allclose(gradient, expected, rtol=1e-7, atol=1e-12), (name, level)


def test_float32_losses_equal_float64_ones() -> None:
    t = given()
    half = replace(
        t,
        current_N=t.current_N.float(),
        anchor_N=t.anchor_N.float(),
        advantage_N=t.advantage_N.float(),
        weight_N=t.weight_N.float(),
    )
    for spec in CASES:
        out = policy_terms(spec, half)
        assert out.loss_N.dtype == torch.float32
        assert torch.allclose(out.loss_N.double(), policy_terms(spec, t).loss_N, rtol=2e-5, atol=1e-6), spec


def test_an_infinite_log_ratio_saturates_and_a_wider_clamp_is_an_option() -> None:
    t = replace(given(), anchor_N=torch.full((12,), -math.inf, dtype=torch.float64))
    for level in RatioLevel:
        live = t.current_N.clone().requires_grad_()
        out = policy_terms(LossSpec(name=LossName.importance, ratio_level=level), replace(t, current_N=live))
        (gradient,) = torch.autograd.grad(out.loss_N.sum(), live)
        expected = torch.where(t.counted_N, -math.exp(20) * t.advantage_N * t.weight_N, 0.0)
        assert torch.allclose(out.loss_N, expected, rtol=1e-12) and not gradient.any()
    far = replace(given(), anchor_N=given().current_N - 30)
    out = policy_terms(LossSpec(name=LossName.importance), far, clamp=None)
    assert float(out.loss_N[0]) == pytest.approx(-math.exp(30) * 0.8 * 1.2, rel=1e-12)


def test_rows_without_a_counted_token_are_harmless_and_so_is_nothing_at_all() -> None:
    none = replace(given(), counted_N=torch.zeros(12, dtype=torch.bool))
    for spec in CASES:
        live = none.current_N.clone().requires_grad_()
        out = policy_terms(spec, replace(none, current_N=live))
        (gradient,) = torch.autograd.grad(out.loss_N.sum(), live)
        assert not out.loss_N.any() and not gradient.any()


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
