"""M2PO against a loop that drops one token at a time."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.correction import correct, correct_given, log_ratio, measure, second_moment_keep
from trimtab.errors import ConfigError

INF, NAN = math.inf, math.nan


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.0009765625, 2.0, 64.0, INF]), max_size=14),
    st.sampled_from([0.125, 0.25, 0.5, 1.0, 3.0]),
)
def test_ties_and_bounds_that_are_met_exactly(square, threshold):
    keep = second_moment_keep(torch.tensor(square, dtype=torch.float64), threshold)
    assert keep.tolist() == oracle.m2_keep(square, threshold)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0, 2.0, INF]), st.sampled_from([0.0, 0.5, 1.0, 4.0])), max_size=9),
    st.sampled_from([0.125, 0.25, 0.5, 1.0, 3.0]),
)
def test_masses(tokens, threshold):
    square, mass = [s for s, _ in tokens], [m for _, m in tokens]
    keep = second_moment_keep(
        torch.tensor(square, dtype=torch.float64), threshold, torch.tensor(mass, dtype=torch.float64)
    )
    assert keep.tolist() == oracle.m2_keep(square, threshold, mass)


@pytest.mark.parametrize("scale", [0.01, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("threshold", [1e-6, 0.01, 0.04, 1.0, 1e4])
def test_random_batches(scale, threshold):
    generator = torch.Generator().manual_seed(int(100 * scale))
    square = (scale * torch.randn(300, generator=generator, dtype=torch.float64)).square()
    mass = torch.rand(300, generator=generator, dtype=torch.float64)
    expected = oracle.m2_keep(square.tolist(), threshold)
    assert second_moment_keep(square, threshold).tolist() == expected
    assert second_moment_keep(square, threshold, torch.full((300,), 7.0)).tolist() == expected
    assert second_moment_keep(square, threshold, mass).tolist() == oracle.m2_keep(
        square.tolist(), threshold, mass.tolist()
    )


def test_missing_tokens_count_as_zero_and_infinite_ones_go_first():
    a = torch.tensor([-1.0, -1.0, -INF, -1.0, -1.0, 9.0], dtype=torch.float64)
    b = torch.tensor([-1.5, NAN, -1.0, -1.25, -1.0, NAN], dtype=torch.float64)
    mask, length = torch.tensor([True] * 5 + [False]), torch.tensor([3, 0, 3])
    for threshold, kept in ((0.2, [0, 1, 3, 4]), (0.05, [1, 3, 4]), (0.02, [1, 4])):
        done = correct(a, b, mask, length, weight=None, m2=threshold)
        assert done.keep_N.nonzero().flatten().tolist() == kept
        assert measure(done).as_dict()["mis_m2_fraction"] == (5 - len(kept)) / 5
    assert "mis_m2_fraction" not in measure(correct(a, b, mask, length, weight=None)).as_dict()


def test_one_token_stays_and_equal_ones_drop_in_order():
    a, zero = torch.full((4,), 2.0), torch.zeros(4)
    done = correct(a, zero, torch.ones(4, dtype=torch.bool), torch.tensor([4]), weight=None, m2=0.1)
    assert done.keep_N.tolist() == [False, False, False, True]
    none = correct(a, zero, torch.zeros(4, dtype=torch.bool), torch.tensor([4]), weight=None, m2=0.1)
    assert not none.keep_N.any() and none.m2.dropped == none.m2.tokens == 0


def test_masked_positions_are_inert_and_a_shared_log_ratio_gives_the_same():
    generator = torch.Generator().manual_seed(0)
    b = -torch.rand(90, generator=generator)
    a = b + 0.4 * torch.randn(90, generator=generator)
    mask, length = torch.rand(90, generator=generator) > 0.3, torch.tensor([30, 0, 60])
    reference = correct(a, b, mask, length, weight=None, m2=0.04)
    square = (a - b)[mask].double().square()
    assert reference.keep_N[mask].tolist() == oracle.m2_keep(square.tolist(), 0.04)
    for left in (INF, NAN, 1e30):
        other = correct(a.where(mask, left), b.where(mask, -left), mask, length, weight=None, m2=0.04)
        assert torch.equal(other.keep_N, reference.keep_N)
    shared = log_ratio(a, b, mask, length)
    for threshold in (1.0, 0.04, 0.001, 0.04):
        done = correct_given(shared, weight=None, m2=threshold)
        assert torch.equal(done.keep_N, correct(a, b, mask, length, weight=None, m2=threshold).keep_N)


@pytest.mark.parametrize("threshold", [0.0, -1.0, NAN, INF])
def test_thresholds_that_bound_nothing_are_refused(threshold):
    with pytest.raises(ConfigError, match="m2_threshold"):
        correct(torch.zeros(1), torch.zeros(1), torch.tensor([True]), torch.tensor([1]), weight=None, m2=threshold)
