"""Statistics against mpmath, closed forms, enumeration and simulation."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.report.model import Verdict
from trimtab.report.statistics import corrected, holm, interquartile, paired, t_interval, trimmed, verdict
from trimtab.report.student import incomplete_beta, quantile, two_sided


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 499])
@pytest.mark.parametrize("t", [0.0, 0.01, 0.7, 1.0, 2.5, 12.7, 80.0])
def test_tails_are_those_of_mpmath(t: float, freedom: int) -> None:
    x = mpmath.mpf(freedom) / (freedom + mpmath.mpf(t) ** 2)
    exact = float(mpmath.betainc(mpmath.mpf(freedom) / 2, 0.5, 0, x, regularized=True))
    assert two_sided(t, freedom) == pytest.approx(exact, rel=1e-11, abs=1e-300)
    assert two_sided(-t, freedom) == two_sided(t, freedom)


def test_tails_and_quantiles_in_closed_form() -> None:
    for t in (0.3, 1.0, 5.0):
        assert two_sided(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-13)
        assert two_sided(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-12)
    assert quantile(0.95, 1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-12)
    # A printed table of the distribution.
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 30: 2.042}
    assert {n: round(quantile(0.95, n), 3) for n in table} == table
    assert two_sided(math.inf, 3) == 0.0


@given(st.floats(0.001, 0.999), st.floats(0.1, 50), st.floats(0.1, 50))
@settings(max_examples=50, deadline=None)
def test_incomplete_beta_is_that_of_mpmath(x: float, a: float, b: float) -> None:
    exact = float(mpmath.betainc(a, b, 0, x, regularized=True))
    assert incomplete_beta(x, a, b) == pytest.approx(exact, rel=1e-9, abs=1e-13)


def test_an_interval_by_hand() -> None:
    found = t_interval([1.0, 2.0, 4.0])
    s = math.sqrt(((1 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 2)
    assert found.mean == pytest.approx(7 / 3)
    assert found.low == pytest.approx(7 / 3 - 4.302652729749464 * s / math.sqrt(3))
    assert found.high == pytest.approx(7 / 3 + 4.302652729749464 * s / math.sqrt(3))
    assert (found.n, found.why) == (3, "")


@pytest.mark.parametrize(("values", "why"), [([], "no seed"), ([0.5], "one seed"), ([0.5, 0.5], "equal")])
def test_an_interval_is_refused_with_the_reason(values: list[float], why: str) -> None:
    found = t_interval(values)
    assert (found.low, found.high, found.n) == (None, None, len(values))
    assert why in found.why


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_intervals_cover_the_mean_of_normal_data_as_often_as_they_say(n: int) -> None:
    rng = np.random.default_rng(n)
    draws = rng.normal(3.0, 2.0, (2000, n))
    hits = 0
    for row in draws:
        found = t_interval(row.tolist())
        assert found.low is not None and found.high is not None
        hits += found.low <= 3.0 <= found.high
    assert abs(hits / 2000 - 0.95) < 3.3 * math.sqrt(0.95 * 0.05 / 2000)


def test_a_paired_difference_by_hand_and_against_all_flips_of_sign() -> None:
    values = (0.4 + np.random.default_rng(3).normal(size=10)).tolist()
    found = paired(list(enumerate(values)))
    mean, s = float(np.mean(values)), float(np.std(values, ddof=1))
    t = mean / (s / math.sqrt(10))
    assert found.p == pytest.approx(float(mpmath.betainc(4.5, 0.5, 0, 9 / (9 + t * t), regularized=True)), rel=1e-10)
    flips = [abs(math.fsum(sign * v for sign, v in zip(signs, values, strict=True)))
             for signs in itertools.product((-1, 1), repeat=10)]  # fmt: skip
    exact = sum(flip >= abs(math.fsum(values)) - 1e-12 for flip in flips) / len(flips)
    assert found.p is not None
    assert found.p == pytest.approx(exact, rel=0.12)


def test_differences_without_spread() -> None:
    nothing = paired([(0, 0.0), (1, 0.0), (2, 0.0)])
    assert (nothing.p, nothing.interval.low) == (1.0, None)
    assert corrected([nothing])[0].verdict is Verdict.undecided
    for value in (0.1, 0.1 + 1e-17):
        same = paired([(0, 0.1), (1, value), (2, 0.1)])
        assert same.p is None
        assert "equal" in same.interval.why
        assert corrected([same])[0].verdict is Verdict.untested
    rounded = [(s, 1.1**s + 0.03 - 1.1**s) for s in range(9)]
    assert len({value for _, value in rounded}) > 1
    assert paired(rounded).p is None, "differences that differ by rounding alone are equal"
    assert paired([(0, 1e-17), (1, -1e-16), (2, 0.0)], scale=0.5).p == 1.0, "scores that are equal but for rounding"


def test_one_pair_is_not_tested() -> None:
    assert paired([(0, 0.4)]).p is None
    assert paired([]).p is None
    assert corrected([paired([(0, 0.4)])])[0].verdict is Verdict.untested


def test_holm_by_hand() -> None:
    # 0.01·4, 0.02·3, then 0.03·2 = 0.06 ≥ 0.06, then 0.04·1 raised to 0.06.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.001, 0.5, 0.9]) == pytest.approx([0.003, 1.0, 1.0])
    assert holm([]) == []
    assert holm([0.03]) == [0.03]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_rejects_what_the_step_down_procedure_rejects(p: list[float]) -> None:
    rejected, order = set(), sorted(range(len(p)), key=lambda i: p[i])
    for rank, i in enumerate(order):
        if (len(p) - rank) * p[i] > 0.05:
            break
        rejected.add(i)
    assert {i for i, value in enumerate(holm(p)) if value <= 0.05} == rejected


def test_verdicts_look_at_the_direction_that_is_better() -> None:
    assert verdict(0.1, 0.01) is Verdict.better
    assert verdict(-0.1, 0.01) is Verdict.worse
    assert verdict(-0.1, 0.01, lower=True) is Verdict.better
    assert verdict(0.1, 0.01, lower=True) is Verdict.worse
    assert verdict(0.1, 0.0501) is Verdict.undecided


def test_only_comparisons_that_were_made_are_counted() -> None:
    tested = paired([(0, 0.1), (1, 0.12), (2, 0.11)])
    found = corrected([tested, paired([(0, 1.0)]), tested])
    assert tested.p is not None
    assert [d.p_corrected for d in found] == [pytest.approx(2 * tested.p), None, pytest.approx(2 * tested.p)]


def test_the_interquartile_mean_and_its_bootstrap() -> None:
    values = [float(v) for v in range(1, 13)]
    assert float(trimmed(np.asarray(values))) == np.mean(range(4, 10))
    assert interquartile([values[:9]]) is None
    found = interquartile([values])
    assert found is not None and found.low is not None and found.high is not None
    assert found.mean == 6.5
    assert 3.5 < found.low < 6.5 < found.high < 9.5
    # Strata that hold one value each leave nothing to resample.
    fixed = interquartile([[v] for v in values])
    assert fixed is not None
    assert (fixed.low, fixed.high) == (6.5, 6.5)
    assert interquartile([values]) == found, "the same values give the same interval"


def test_the_bootstrap_covers_the_mean_of_normal_data_roughly() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(100):
        found = interquartile([rng.normal(0, 1, 20).tolist()])
        assert found is not None and found.low is not None and found.high is not None
        hits += found.low <= 0 <= found.high
    assert hits >= 85
