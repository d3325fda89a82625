"""The zero mode, the clamp and what normalising does at its edges."""

from __future__ import annotations

import itertools
import math

import oracle
import pytest
import torch
from torch import Tensor

from trimtab.correction import WeightRule, correct, measure
from trimtab.errors import ConfigError
from trimtab.spec import Level, TisMode

NAN, INF = math.nan, math.inf
LENGTHS = [4, 0, 7, 1, 12, 3]


def batch(seed: int, scale: float, odd: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    rollout = -torch.rand(n, generator=generator, dtype=torch.float64)
    numerator = rollout + scale * torch.randn(n, generator=generator, dtype=torch.float64)
    mask = torch.rand(n, generator=generator) > 0.2
    if odd:
        rollout[1], numerator[13], rollout[14], numerator[15] = NAN, -INF, -INF, NAN
        mask[[1, 13, 14, 15]] = True
    return numerator, rollout, mask, torch.tensor(LENGTHS)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("clamp", [None, 0.5, 5.0, 90.0, 1000.0])
@pytest.mark.parametrize(("level", "mode"), list(itertools.product(Level, TisMode)))
def test_the_clamp_is_the_rules(level, mode, clamp, odd):
    for seed, scale in enumerate((0.2, 3.0, 60.0)):
        tensors = batch(seed, scale, odd)
        done = correct(*tensors, weight=WeightRule(level, mode, 0.3, 3.0, clamp=clamp))
        a, b, mask = ([row.tolist() for row in x.split(LENGTHS)] for x in tensors[:3])
        w, keep, _ = oracle.correction(
            a, b, mask, level=level.value, mode=mode.value, lower=0.3, upper=3.0, clamp=clamp
        )
        flat = torch.tensor([x for row in w for x in row], dtype=torch.float64)
        finite = flat < 1e300  # the loops call e^709 and more infinite
        torch.testing.assert_close(done.weight_N[finite], flat[finite], rtol=1e-11, atol=1e-300)
        assert (done.weight_N[~finite] > 1e300).all() and done.weight_N.isfinite().all()
        assert done.keep_N.tolist() == [k for row in keep for k in row]
        assert all(map(math.isfinite, measure(done).as_dict().values()))
        single = correct(
            *(x.float() for x in tensors[:2]), *tensors[2:], weight=WeightRule(level, mode, 0.3, 3.0, clamp=clamp)
        )
        assert single.weight_N.isfinite().all() and all(map(math.isfinite, measure(single).as_dict().values()))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 78.722839), (torch.float64, 699.782712893384)])
def test_without_a_clamp_a_weight_saturates_at_what_the_dtype_holds(dtype: torch.dtype, limit: float):
    """10 nats below overflow, from above alone, at every level and in every mode that has no upper bound."""
    most = math.exp(limit)
    a, zero = torch.tensor([2000.0, 0.0, INF, NAN, -2000.0], dtype=dtype), torch.zeros(5, dtype=dtype)
    mask, length = torch.ones(5, dtype=torch.bool), torch.tensor([2, 2, 1])
    for normalize in (False, True) if dtype is torch.float32 else (False,):  # sums end at WEIGHT_LIMIT in float64
        rule = WeightRule(Level.token, TisMode.unbounded, None, None, normalize, clamp=None)
        done = correct(a, zero, mask, length, weight=rule)
        factor = 2 / 5 * most + 1 / 5 if normalize else 1.0
        expected = [w / factor for w in (most, 1.0, most, 0.0, 0.0)]
        assert done.weight_N.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-30)
        metrics = measure(done).as_dict()
        assert all(map(math.isfinite, metrics.values())) and metrics["mis_clamped_log_ratio_count"] == 2
        assert metrics["mis_ess"] == pytest.approx(0.4)  # two of five weights outweigh the others
    for level, rows in ((Level.sequence, [most, 0.0, 0.0]), (Level.geometric, [most, 0.0, 0.0])):
        for mode in (TisMode.unbounded, TisMode.mask, TisMode.clip):
            rule = WeightRule(level, mode, None, None, clamp=None)
            done = correct(a, zero, mask, length, weight=rule)
            assert done.weight_N[[0, 2, 4]].tolist() == pytest.approx(rows, rel=1e-5, abs=1e-30)


def test_a_clamp_beyond_the_dtype_is_the_dtypes():
    d, one = torch.tensor([1e4]), torch.ones(1, dtype=torch.bool)
    rule = WeightRule(Level.token, TisMode.unbounded, None, None, clamp=1e3)
    assert correct(d, torch.zeros(1), one, torch.tensor([1]), weight=rule).weight_N.log().tolist() == pytest.approx(
        [78.7228], rel=1e-6
    )


def test_zero_mode_zeroes_the_weight_and_keeps_the_token():
    d = torch.tensor([math.log(4), math.log(0.25), 0.0, math.log(2)], dtype=torch.float64)
    zero, mask, length = torch.zeros_like(d), torch.ones(4, dtype=torch.bool), torch.tensor([3, 1])

    def weights(level: Level, normalize: bool = False) -> list[float]:
        done = correct(d, zero, mask, length, weight=WeightRule(level, TisMode.zero, 0.5, 2.0, normalize))
        assert done.keep_N.all()
        return done.weight_N.tolist()

    assert weights(Level.token) == pytest.approx([0, 0, 1, 2])
    assert weights(Level.token, True) == pytest.approx([0, 0, 1 / 0.75, 2 / 0.75])  # zeros count in the mean
    assert weights(Level.sequence) == pytest.approx([1, 1, 1, 2])
    d[0] = math.log(40)
    assert weights(Level.sequence) == pytest.approx([0, 0, 0, 2])
    assert weights(Level.sequence, True) == pytest.approx([0, 0, 0, 2])
    rule = WeightRule(Level.token, TisMode.zero, 0.5, 2.0)
    metrics = measure(correct(d, zero, mask, length, weight=rule)).as_dict()
    assert metrics["mis_tis_zero_fraction_high"] == metrics["mis_tis_zero_fraction_low"] == pytest.approx(1 / 6)
    assert metrics["mis_kept_token_fraction"] == 1


@pytest.mark.parametrize("level", list(Level))
def test_zero_mode_and_odd_tokens(level):
    """An infinite log-ratio has weight 0 even without bounds; a missing one has weight 1 even outside of them."""
    a, b = torch.tensor([-INF, INF, -INF, NAN, 0.0]), torch.tensor([0.0, 0.0, -INF, 0.0, NAN])
    mask, length = torch.ones(5, dtype=torch.bool), torch.ones(5, dtype=torch.int64)
    for lower, upper in ((None, None), (0.5, 2.0)):
        done = correct(a, b, mask, length, weight=WeightRule(level, TisMode.zero, lower, upper))
        assert done.weight_N.tolist() == [0, 0, 0, 0, 1] and done.keep_N.all()
    outside = correct(a, b, mask, length, weight=WeightRule(Level.token, TisMode.zero, 3.0, 4.0))
    assert outside.weight_N.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("level", list(Level))
def test_a_mean_weight_of_nothing_divides_nothing(level):
    """All zeroed, or all at the clamp's floor: 1/mean would be inf or 5e8."""
    a, zero = torch.full((3,), -50.0), torch.zeros(3)
    mask, length = torch.ones(3, dtype=torch.bool), torch.tensor([2, 1])
    for mode, expected in ((TisMode.zero, 0.0), (TisMode.truncate, math.exp(-20))):
        rule = WeightRule(level, mode, 0.5, 2.0, True)
        for factor in (None, 0.0):
            done = correct(a, zero, mask, length, weight=rule, factor=factor)
            assert done.factor == 1 and done.weight_N.tolist() == pytest.approx([expected] * 3, rel=1e-6)


def test_impossible_clamps_are_refused():
    for clamp in (0.0, -1.0, NAN):
        with pytest.raises(ConfigError, match="log_ratio_clamp"):
            WeightRule(Level.token, TisMode.clip, 0.5, 2.0, clamp=clamp)
