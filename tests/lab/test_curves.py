"""The gap along position, length and entropy, and its worst tokens, against loops over plain lists."""

from __future__ import annotations

import math

import pytest
import torch
from lab.test_gap import Row, pairs_of, ragged

from trimtab.lab.bootstrap import Resamples
from trimtab.lab.curves import Bin, by_entropy, by_position, growth, lengths, worst

NONE = Resamples(torch.zeros(0, 0))


def expected(chosen: list[tuple[float, float]]) -> tuple[int, float, float, float, float]:
    d = [t - e for e, t in chosen]
    dp = [abs(math.exp(t) - math.exp(e)) for e, t in chosen]
    n = len(chosen)
    return n, math.fsum(map(abs, d)) / n, math.fsum(d) / n, math.fsum(dp) / n, sum(x >= 0.01 for x in dp) / n


def got(b: Bin) -> tuple[int, float, float, float, float]:
    return b.tokens, b.abs_mean.value, b.mean.value, b.dp_abs_mean.value, b.dp_from_001.value


@pytest.mark.parametrize("bins", [2, 3, 40])
def test_by_position(bins: int) -> None:
    rows = ragged(11, rows=12)
    longest = max(map(len, rows))
    width = math.ceil(longest / bins)
    found = by_position(pairs_of(rows), NONE, bins)
    assert len(found) <= bins
    seen = 0
    for b in found:
        assert b.high - b.low == width
        chosen = [row[i] for row in rows for i in range(int(b.low), int(b.high)) if i < len(row)]
        assert got(b) == pytest.approx(expected(chosen), rel=1e-12)
        seen += len(chosen)
    assert seen == sum(map(len, rows))


def test_by_entropy_and_without_one() -> None:
    rows = [[(-1.0, -1.1), (-2.0, -2.5)], [(-0.1, -0.1), (-0.2, -0.25)]]
    found = by_entropy(pairs_of(rows, entropy=[-1e-9, 0.1, 2.0, 5.0]), NONE)
    assert [(b.low, b.high) for b in found] == [(0.0, 0.01), (0.1, 0.5), (2.0, 3.0), (3.0, math.inf)]
    assert [b.abs_mean.value for b in found] == pytest.approx([0.1, 0.5, 0.0, 0.05])
    assert by_entropy(pairs_of(rows), NONE) == []


def test_tokens_without_a_finite_log_ratio_take_no_part() -> None:
    rows: list[Row] = [[(-1.0, -math.inf), (math.nan, -1.0), (-1.0, -1.25)]]
    found = by_position(pairs_of(rows), NONE)
    assert [(b.low, b.tokens, b.abs_mean.value) for b in found] == [(2, 1, 0.25)]


def test_growth_is_of_the_responses_that_are_long_enough() -> None:
    rows = ragged(5, rows=20)
    longest = max(map(len, rows))
    found = growth(pairs_of(rows), NONE)
    assert [p.length for p in found] == lengths(longest)
    for p in found:
        sums = [math.fsum(t - e for e, t in row[: p.length]) for row in rows if len(row) >= p.length]
        w = [math.exp(s) for s in sums]
        assert p.responses == len(sums)
        assert p.rms.value == pytest.approx(math.sqrt(math.fsum(s * s for s in sums) / len(sums)), rel=1e-12)
        assert p.abs_mean.value == pytest.approx(math.fsum(map(abs, sums)) / len(sums), rel=1e-12)
        assert p.ess.value == pytest.approx(math.fsum(w) ** 2 / (len(w) * math.fsum(x * x for x in w)), rel=1e-12)


def test_growth_of_independent_errors_is_the_square_root_of_the_length() -> None:
    noise = torch.randn(400, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.05
    rows = [[(-1.0, -1.0 + float(x)) for x in row] for row in noise]
    by_length = {p.length: p.rms.value for p in growth(pairs_of(rows), NONE)}
    assert by_length[64] == pytest.approx(0.05 * 8, rel=0.1)
    assert by_length[16] == pytest.approx(0.05 * 4, rel=0.1)


@pytest.mark.parametrize(("longest", "marks"), [(0, []), (1, [1]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_lengths(longest: int, marks: list[int]) -> None:
    assert lengths(longest) == marks


def test_worst_tokens_come_first_and_a_missing_one_never() -> None:
    rows: list[Row] = [
        [(math.log(0.5), math.log(0.6)), (math.nan, -1.0)],
        [],
        [(math.log(0.9), math.log(0.1)), (math.log(0.2), math.log(0.2)), (-math.inf, math.log(0.3))],
    ]
    found = worst(pairs_of(rows, entropy=[0.1, 0.2, 0.3, 0.4, 0.5]), 3)
    assert [(t.row, t.position, t.at) for t in found] == [(2, 0, 2), (2, 2, 4), (0, 0, 0)]
    assert [t.difference for t in found] == pytest.approx([-0.8, 0.3, 0.1])
    assert found[0].log_ratio == pytest.approx(math.log(1 / 9)) and found[1].log_ratio == math.inf
    assert [t.entropy for t in found] == [0.3, 0.5, 0.1]
    assert len(worst(pairs_of(rows), 99)) == 4


def test_nothing_to_show() -> None:
    empty = pairs_of([[], []])
    assert by_position(empty, NONE) == growth(empty, NONE) == worst(empty, 5) == []
