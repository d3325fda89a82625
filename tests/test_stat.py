"""Statistics that merge: against the values they summarise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.stat import Extremes, Histogram, Mean, Spread


def test_the_mean_of_nothing():
    assert Mean(0.0, 0).value == 0 and Mean(0.0, 0, empty=1.0).merge(Mean(0.0, 0)).value == 1
    assert Mean(3.0, 2).merge(Mean(3.0, 1)).value == 2


def test_extremes():
    assert Extremes().smallest == Extremes().largest == 0
    assert Extremes().merge(Extremes(2.0, 3.0)) == Extremes(2.0, 3.0)
    assert Extremes(-1.0, 1.0).merge(Extremes(2.0, 3.0)) == Extremes(-1.0, 3.0)


def test_effective_sample_size():
    assert Spread(4.0, 4.0, 4).value == 1 and Spread(0.0, 0.0, 4).value == 0
    assert Spread(1.0, 1.0, 1).merge(Spread(0.0, 0.0, 3)).value == 0.25


@given(st.lists(st.floats(1e-30, 1e30), min_size=1), st.floats(0.01, 1))
def test_quantiles_are_right_to_a_relative_resolution(values, share):
    rank = max(1, -(-share * len(values) // 1))
    exact = sorted(values)[int(rank) - 1]
    half = len(values) // 2
    merged = Histogram.of(torch.tensor(values[:half])).merge(Histogram.of(torch.tensor(values[half:])))
    assert merged.quantiles(share, share) == pytest.approx([exact, exact], rel=2**-8)
    assert torch.equal(merged.bins, Histogram.of(torch.tensor(values)).bins)


def test_no_values_have_quantile_zero():
    assert Histogram.of(torch.zeros(0)).quantiles(0.5, 0.99) == [0, 0]
