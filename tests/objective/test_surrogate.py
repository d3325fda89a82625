"""Every policy loss against loops written from its paper: values, and gradients by central differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from objective.tokens import ADVANTAGE, ANCHOR, COUNTED, CURRENT, ROW, WEIGHT, clip, given
from torch import Tensor

from trimtab.objective.surrogate import Surrogate, TokenTerms, policy_terms
from trimtab.spec import LossName, LossSpec, RatioLevel

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
