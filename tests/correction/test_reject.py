"""Rejection rules against float64 loops and closed forms."""

from __future__ import annotations

import itertools
import math

import oracle
import pytest
import torch
from torch import Tensor

from trimtab.correction import RejectRule, correct, correct_given, log_ratio, measure
from trimtab.errors import ConfigError, DataError
from trimtab.spec import Level, OverTokens, Sign, Statistic

NAN, INF = math.nan, math.inf
LENGTHS = [0, 6, 1, 0, 9, 4, 13, 3, 2, 21, 0]
OVERS = [None, *OverTokens]
PAIRS = list(itertools.product(Statistic, OVERS))
BOUNDS = {
    Statistic.ratio: (0.6, 1.9),
    Statistic.k1: (-0.6, 0.5),
    Statistic.k2: (0.001, 0.15),
    Statistic.k3: (0.001, 0.12),
    Statistic.abs: (0.02, 0.6),
    Statistic.mult_error: (1.02, 1.7),
    Statistic.prob_diff: (-0.2, 0.25),
}


def batch(seed: int, odd: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """numerator, rollout, mask, length, advantage: holes, empty and wholly masked rows; ``odd``: NaN and inf too."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    rollout = -2 * torch.rand(n, generator=generator, dtype=torch.float64)
    numerator = rollout + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    numerator[7:16] = rollout[7:16] + 0.05 * (numerator[7:16] - rollout[7:16])
    mask = torch.rand(n, generator=generator) > 0.2
    mask[33:36] = False
    if odd:
        at = 16 + torch.randperm(n - 16, generator=generator)[:9]
        rollout[at[:4]], rollout[at[4]], numerator[at[5]], numerator[at[6]] = NAN, -INF, -INF, NAN
        numerator[at[3]], rollout[at[7]], numerator[at[7]], numerator[at[8]] = NAN, -INF, -INF, INF
        mask[at] = True
    advantage = torch.tensor([1.0, -1.0, 0.0, 2.0, 0.5, -0.5, 0.0, 1.0, -2.0, 0.25, 0.0])
    return [numerator.to(dtype), rollout.to(dtype), mask, torch.tensor(LENGTHS), advantage]


def rows_of(tensors: list[Tensor]) -> list[list]:
    return [[row.tolist() for row in x.split(LENGTHS)] for x in tensors[:3]]


def make(
    statistic: Statistic, over: OverTokens | None, inverse: bool = False, clamp: float | None = None, **other: object
) -> RejectRule:
    lower, upper = BOUNDS[statistic]
    if inverse and statistic is Statistic.prob_diff:
        lower, upper = -upper, -lower
    if over is OverTokens.sum and statistic in (Statistic.k2, Statistic.k3, Statistic.abs, Statistic.mult_error):
        lower, upper = 4 * lower, 4 * upper
    level = Level.token if over is None else Level.sequence
    return RejectRule(statistic, level, over, lower, upper, inverse, clamp, **other)


def allowed() -> list[tuple]:
    every = itertools.product(Statistic, OVERS, [False, True], [None, 0.4])
    return [c for c in every if not (c[0] is Statistic.prob_diff and c[3] is not None)]


def between(values: list[list[float]]) -> tuple[float, float]:
    """Bounds with a part of the values below, between and above them, and on none of them."""
    known = sorted({v for row in values for v in row if math.isfinite(v)})
    low, high = len(known) // 5, len(known) * 3 // 4
    return (known[low] + known[low + 1]) / 2, (known[high] + known[high - 1]) / 2


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize(("statistic", "over", "inverse", "clamp"), allowed())
def test_every_rule_matches_the_loops(statistic, over, inverse, clamp, odd):
    decisions = set()
    for seed, sign in enumerate(Sign):
        tensors = batch(seed, odd)
        *given, advantage = tensors
        loops = dict(statistic=statistic.value, over=over and over.value, inverse=inverse, clamp=clamp)
        spread = {**loops, "over": None} if over is OverTokens.every else loops
        _, spread_values = oracle.rule(
            *rows_of(tensors), advantage.tolist(), **spread, lower=0.0, upper=0.0, sign="any"
        )  # fmt: skip
        lower, upper = between(spread_values)
        if over is OverTokens.every:
            lower, upper = sorted(min(row) for row in spread_values if row)[3] - 1e-9, upper + (upper - lower)
        keep, values = oracle.rule(
            *rows_of(tensors), advantage.tolist(), **loops, lower=lower, upper=upper, sign=sign.value
        )  # fmt: skip
        rule = RejectRule(statistic, Level.token if over is None else Level.sequence, over, lower, upper, inverse,
                          clamp, sign)  # fmt: skip
        done = correct(*given, weight=None, reject=[rule], advantage_B=advantage)
        expected = torch.tensor([k for row in keep for k in row])
        assert torch.equal(done.keep_N, expected)
        decisions |= set(expected[tensors[2]].tolist())
        rejection, rows = done.rejections[0], done.given.rows
        assert rejection.level is rule.level and not rejection.value_L.isnan().any()
        if not (odd and over is OverTokens.every):  # there, missing tokens are moved inside the bounds
            value_M = rejection.value_L if over is None else rows.spread(rejection.value_L)
            flat = torch.tensor([v for row in values for v in row], dtype=torch.float64)
            finite = flat.isfinite()
            torch.testing.assert_close(value_M[finite], flat[finite], rtol=1e-9, atol=1e-15)
    assert decisions == {True, False}  # the bounds are such that both occur


@pytest.mark.parametrize(("statistic", "over"), PAIRS)
def test_cut_batches_masked_positions_and_shared_log_ratios_change_nothing(statistic, over):
    for odd in (False, True):
        numerator, rollout, mask, length, advantage = batch(11, odd, torch.float32)
        rules = [make(statistic, over, inverse, sign=Sign.nonpositive) for inverse in (False, True)]
        whole = correct(numerator, rollout, mask, length, weight=None, reject=rules, advantage_B=advantage)
        pieces = zip(*(x.split(LENGTHS) for x in (numerator, rollout, mask)), length, advantage, strict=True)
        parts = [correct(*row, n.view(1), weight=None, reject=rules, advantage_B=a.view(1)) for *row, n, a in pieces]
        assert torch.equal(torch.cat([part.keep_N for part in parts]), whole.keep_N)
        means = measure(whole).as_dict()
        merged = measure(parts[0])
        for part in parts[1:]:
            merged = merged.merge(measure(part))
        for name in ("mis_rs_mask_fraction_low", "mis_rs_mask_fraction_high", "mis_kept_token_fraction", "mis_ess"):
            assert merged.as_dict()[name] == pytest.approx(means[name], rel=1e-13, abs=1e-15)
        for left, right in itertools.product([INF, -INF, NAN, 1e30], repeat=2):
            other = correct(
                numerator.where(mask, left), rollout.where(mask, right), mask, length,
                weight=None, reject=rules, advantage_B=advantage,
            )  # fmt: skip
            assert torch.equal(other.keep_N, whole.keep_N) and measure(other).as_dict() == means
        shared = log_ratio(numerator, rollout, mask, length)
        for _ in range(2):  # the second time from what the first left behind
            again = correct_given(shared, weight=None, reject=rules, advantage_B=advantage)
            assert torch.equal(again.keep_N, whole.keep_N)
            for one, two in zip(again.rejections, whole.rejections, strict=True):
                assert torch.equal(one.value_L, two.value_L)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("statistic", "over"), PAIRS)
def test_bounds_are_inclusive(statistic, over, dtype):
    """One-token rows whose statistic is the very bound, computed in the inputs' dtype."""
    log = torch.tensor([2.0, 0.5, 1.0], dtype=dtype).log()
    mask, length = torch.ones(3, dtype=torch.bool), torch.tensor([1, 1, 1])
    level = Level.token if over is None else Level.sequence
    loose = RejectRule(statistic, level, over, upper=99.0)
    value = correct(log, torch.zeros_like(log), mask, length, weight=None, reject=[loose]).rejections[0].value_L
    lower, upper = sorted(value.tolist())[0], sorted(value.tolist())[2]
    tight = RejectRule(statistic, level, over, lower, upper)
    assert correct(log, torch.zeros_like(log), mask, length, weight=None, reject=[tight]).keep_N.all()
    inner = RejectRule(statistic, level, over, math.nextafter(lower, INF), math.nextafter(upper, -INF))
    kept = correct(log.double(), torch.zeros(3).double(), mask, length, weight=None, reject=[inner]).keep_N
    if dtype is torch.float64:
        assert kept.tolist() == [v not in (lower, upper) for v in value.tolist()]


@pytest.mark.parametrize("level", list(Level))
def test_the_ratio_rule_says_what_its_long_form_says(level):
    over = {Level.token: None, Level.sequence: OverTokens.sum, Level.geometric: OverTokens.mean}[level]
    full = RejectRule(Statistic.ratio, Level.token if over is None else Level.sequence, over, 0.5, 2.0)
    assert RejectRule.ratio(level, 0.5, 2.0) == full


def test_inverse_bounds_the_other_ratio():
    """0.8..4 of rollout/numerator is 1/4..1/0.8 of numerator/rollout (verl's k1 bounds)."""
    *given, _ = batch(4, False)
    for over in (None, OverTokens.sum, OverTokens.mean, OverTokens.max, OverTokens.every):
        level = Level.token if over is None else Level.sequence
        inverse = correct(*given, weight=None, reject=[RejectRule(Statistic.ratio, level, over, 0.8, 4.0, True)])
        log = RejectRule(Statistic.k1, level, over, math.log(0.8), math.log(4), True)
        assert torch.equal(correct(*given, weight=None, reject=[log]).keep_N, inverse.keep_N)
        if over is not OverTokens.max:
            other = correct(*given, weight=None, reject=[RejectRule(Statistic.ratio, level, over, 1 / 4, 1 / 0.8)])
            assert torch.equal(other.keep_N, inverse.keep_N)
        assert inverse.keep_N.any() and not inverse.keep_N[given[2]].all()


def test_statistics_of_one_log_ratio():
    d = torch.tensor([math.log(2), -math.log(2)], dtype=torch.float64)
    for statistic, up, down in (
        (Statistic.ratio, 2, 0.5),
        (Statistic.k1, math.log(2), -math.log(2)),
        (Statistic.k2, math.log(2) ** 2 / 2, math.log(2) ** 2 / 2),
        (Statistic.k3, 1 - math.log(2), math.log(2) - 0.5),
        (Statistic.abs, math.log(2), math.log(2)),
        (Statistic.mult_error, 2, 2),
        (Statistic.prob_diff, 0.25, -0.125),
    ):
        rollout = torch.tensor([0.25, 0.25], dtype=torch.float64).log()
        for inverse in (False, True):
            rule = RejectRule(statistic, Level.token, upper=9.0, inverse=inverse)
            done = correct(
                rollout + d, rollout, torch.ones(2, dtype=torch.bool), torch.tensor([1, 1]), weight=None, reject=[rule]
            )
            expected = [up, down] if not inverse else [-up, -down] if statistic is Statistic.prob_diff else [down, up]
            assert done.rejections[0].value_L.tolist() == pytest.approx(expected, rel=1e-14)


def test_opposite_log_ratios_do_not_cancel_in_k2_k3_abs_and_every():
    """Alternating +5 and -5: mean log-ratio 0, and a bad sequence."""
    a = torch.tensor([5.0, -5.0] * 4)
    mask, length = torch.ones(8, dtype=torch.bool), torch.tensor([8])

    def kept(*rule: object, **bounds: float) -> bool:
        done = correct(a, torch.zeros(8), mask, length, weight=None, reject=[RejectRule(*rule, **bounds)])
        return bool(done.keep_N.all())

    row = Level.sequence
    assert kept(Statistic.ratio, row, OverTokens.mean, lower=0.999, upper=1.001)
    assert kept(Statistic.k1, row, OverTokens.sum, lower=-0.1, upper=0.1)
    assert not kept(Statistic.k2, row, OverTokens.max, upper=2.0)
    assert not kept(Statistic.k3, row, OverTokens.mean, upper=0.01)
    assert not kept(Statistic.abs, row, OverTokens.mean, upper=1.0)
    assert not kept(Statistic.ratio, row, OverTokens.every, lower=0.1)
    assert not kept(Statistic.ratio, row, OverTokens.every, upper=10.0)


def test_both_tails_can_be_vetoed():
    """One token of ratio e^-12, of e^12, and none: every(lower) is the veto, every(upper) is its mirror."""
    a = torch.tensor([-12.0, 0.0, 12.0, 0.0, 0.1, 0.0])
    mask, length = torch.ones(6, dtype=torch.bool), torch.tensor([2, 2, 2])

    def kept(lower: float, upper: float) -> list[bool]:
        rule = RejectRule(Statistic.ratio, Level.sequence, OverTokens.every, lower, upper)
        return correct(a, torch.zeros(6), mask, length, weight=None, reject=[rule]).keep_N[::2].tolist()

    assert kept(1e-4, INF) == [False, True, True]
    assert kept(-INF, 1e4) == [True, False, True]
    assert kept(1e-4, 1e4) == [False, False, True]
    assert correct(a, torch.zeros(6), mask, length, weight=None, veto=1e-4).keep_N[::2].tolist() == kept(1e-4, INF)
    with pytest.raises(ConfigError, match=r"rs_veto_threshold=10000.*over_tokens:every,upper:1e4"):
        correct(a, torch.zeros(6), mask, length, weight=None, veto=1e4)


@pytest.mark.parametrize("odd", [False, True])
def test_the_veto_is_every_token_above_its_threshold(odd):
    for seed in range(5):
        *given, _ = batch(seed, odd)
        rule = RejectRule(Statistic.k1, Level.sequence, OverTokens.every, lower=math.log(0.4))
        assert torch.equal(
            correct(*given, weight=None, reject=[rule]).keep_N, correct(*given, weight=None, veto=0.4).keep_N
        )


@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize("statistic", [s for s in Statistic if s is not Statistic.prob_diff])
def test_infinite_log_ratios_are_rejected_whatever_the_bounds_and_clamp(statistic, over):
    a = torch.tensor([-1.0, -INF, -1.0, INF, NAN, -1.0, -INF])
    b = torch.tensor([-1.0, -1.0, -INF, -1.0, -1.0, -1.0, -INF])
    mask, length = torch.ones(7, dtype=torch.bool), torch.tensor([2, 1, 1, 1, 1, 1])
    level = Level.token if over is None else Level.sequence
    for inverse, clamp in itertools.product([False, True], [None, 3.0]):
        rule = RejectRule(statistic, level, over, -1e30, INF, inverse, clamp)
        done = correct(a, b, mask, length, weight=None, reject=[rule])
        assert done.keep_N.tolist() == [over is None, False, False, False, False, True, False]
        assert not done.rejections[0].value_L.isnan().any()
        assert all(map(math.isfinite, measure(done).as_dict().values()))


def test_a_probability_of_zero_is_a_number():
    """prob_diff needs no logarithm: -inf is 0, so an infinite log-ratio may have an ordinary difference."""
    half = math.log(0.5)
    a = torch.tensor([-INF, half, -INF, NAN, INF, half], dtype=torch.float64)
    b = torch.tensor([half, -INF, -INF, half, half, NAN], dtype=torch.float64)
    mask, length = torch.ones(6, dtype=torch.bool), torch.ones(6, dtype=torch.int64)
    for inverse in (False, True):
        rule = RejectRule(Statistic.prob_diff, Level.token, None, -0.6, 0.6, inverse)
        done = correct(a, b, mask, length, weight=None, reject=[rule])
        assert done.keep_N.tolist() == [True, True, True, False, False, True]
        sign = -1 if inverse else 1
        assert done.rejections[0].value_L[:3].tolist() == pytest.approx([-0.5 * sign, 0.5 * sign, 0.0])
    low = RejectRule(Statistic.prob_diff, Level.token, None, -0.2, INF)
    assert correct(a, b, mask, length, weight=None, reject=[low]).keep_N.tolist()[:3] == [False, True, True]


def test_a_missing_token_is_inside_whatever_the_bounds():
    a, b = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([NAN, -1.5, NAN])
    mask, length = torch.ones(3, dtype=torch.bool), torch.tensor([2, 1])
    for statistic, over in itertools.product(Statistic, (None, OverTokens.every)):
        level = Level.token if over is None else Level.sequence
        done = correct(a, b, mask, length, weight=None, reject=[RejectRule(statistic, level, over, 50.0, 60.0)])
        assert done.keep_N.tolist() == [over is None, False, True]
        assert measure(done).as_dict()["mis_rs_mask_fraction_high"] == 0


def test_a_rule_with_a_sign_looks_at_those_rows_only():
    a, zero = torch.tensor([2.0, 2.0, 2.0, -INF]), torch.zeros(4)
    mask, length = torch.ones(4, dtype=torch.bool), torch.tensor([1, 1, 1, 1])
    advantage = torch.tensor([1.0, 0.0, -1.0, -1.0])
    for sign, kept in (
        (Sign.any, [False, False, False, False]),
        (Sign.positive, [False, True, True, True]),
        (Sign.nonpositive, [True, False, False, False]),
        (Sign.negative, [True, True, False, False]),
        (Sign.nonnegative, [False, False, True, True]),
    ):
        for over in OVERS:
            rule = make(Statistic.ratio, over, sign=sign)
            done = correct(a, zero, mask, length, weight=None, reject=[rule], advantage_B=advantage)
            assert done.keep_N.tolist() == kept
            high = measure(done).as_dict()["mis_rs_mask_fraction_high"]
            assert high == sum(not k for k in kept[:3]) / 4
    with pytest.raises(DataError, match="no advantage_B was given for 4 rows"):
        correct(a, zero, mask, length, weight=None, reject=[make(Statistic.ratio, None, sign=Sign.negative)])
    with pytest.raises(DataError, match=r"advantage_B of shape \(3,\) was given for 4 rows"):
        rules = [make(Statistic.ratio, None, sign=Sign.negative)]
        correct(a, zero, mask, length, weight=None, reject=rules, advantage_B=advantage[:3])


def test_rules_chain():
    """Together they keep what each keeps."""
    *given, advantage = batch(7, True)
    rules = [make(s, over, sign=sign) for (s, over), sign in zip(
        itertools.product(Statistic, (None, OverTokens.mean)), itertools.cycle(Sign))]  # fmt: skip
    alone = [correct(*given, weight=None, reject=[rule], advantage_B=advantage).keep_N for rule in rules]
    chained = correct(*given, weight=None, reject=rules, advantage_B=advantage)
    assert torch.equal(chained.keep_N, torch.stack(alone).all(0))
    assert len(chained.rejections) == len(rules)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ((Statistic.ratio, Level.geometric, OverTokens.mean, 0.5, 2.0), "level is token or sequence"),
        ((Statistic.ratio, Level.token, OverTokens.mean, 0.5, 2.0), "level:token has none"),
        ((Statistic.k3, Level.sequence, None, 0.0, 2.0), "level:sequence needs over_tokens"),
        ((Statistic.k3, Level.token, None, 3.0, 2.0), "lower must not exceed upper"),
        ((Statistic.k3, Level.token, None, NAN, 2.0), "lower must not exceed upper"),
        ((Statistic.k3, Level.token), "it bounds nothing"),
        ((Statistic.k3, Level.token, None, 0.0, 1.0, False, 0.0), "clamp:0 must be a positive"),
        ((Statistic.prob_diff, Level.token, None, -0.2, 0.2, False, 20.0), "prob_diff does not use"),
    ],
)
def test_impossible_rules_are_refused(rule, message):
    with pytest.raises(ConfigError, match=message) as error:
        RejectRule(*rule)
    assert "mis.reject=[{statistic:k3,level:sequence,over_tokens:mean,upper:0.01}]" in str(error.value)
