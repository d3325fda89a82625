"""Denominators: coefficients of every aggregate, whole and cut."""

from __future__ import annotations

import pytest
import torch

from trimtab.errors import DataError
from trimtab.objective.aggregate import Counts, coefficients
from trimtab.objective.loss import weighted_sum
from trimtab.spec import Aggregate

ROW_N = torch.tensor([0, 0, 0, 0, 0, 1])  # lengths 5 and 1, the example of the field
LOSS_N = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 4.0], dtype=torch.float64)
GROUP_B = torch.tensor([7, 3])
ALL_N = torch.ones(6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("aggregate", "group_B", "expected"),
    [
        (Aggregate.token_mean, None, 9 / 6),
        (Aggregate.sequence_mean, None, (1 + 4) / 2),
        (Aggregate.sequence_sum, None, (5 + 4) / (2 * 10)),
        (Aggregate.group_mean, GROUP_B, (5 / 5 + 4 / 1) / 2),
        (Aggregate.group_mean, torch.zeros(2, dtype=torch.int64), (5 + 4) / (3 * 2)),
    ],
)
def test_aggregates_of_two_rows_of_five_and_one_tokens(
    aggregate: Aggregate, group_B: torch.Tensor | None, expected: float
) -> None:
    coefficient_N = coefficients(ALL_N, ROW_N, 2, aggregate=aggregate, constant=10.0, group_B=group_B)
    assert float(weighted_sum(LOSS_N, coefficient_N, ALL_N)) == pytest.approx(expected, rel=1e-12)


def test_group_mean_weighs_tokens_alike_within_a_group_and_groups_by_their_rows() -> None:
    row_N = torch.tensor([0, 0, 0, 1, 2, 2, 4, 4, 4, 4])  # row 3 has no counted token
    group_B = torch.tensor([5, 2, 5, 5, 2])  # group 5: 3 and 2 tokens; group 2: 1 and 4
    counted_N = torch.ones(10, dtype=torch.bool)
    found_N = coefficients(counted_N, row_N, 5, aggregate=Aggregate.group_mean, constant=1.0, group_B=group_B)
    in_5 = group_B[row_N] == 5
    assert found_N[in_5].tolist() == pytest.approx([1 / (2.5 * 4)] * 5, rel=1e-14)
    assert found_N[~in_5].tolist() == pytest.approx([1 / (2.5 * 4)] * 5, rel=1e-14)
    found_N = coefficients(
        counted_N, row_N, 5, aggregate=Aggregate.group_mean, constant=1.0, group_B=group_B, totals=Counts(99, 1)
    )
    assert found_N.tolist() == pytest.approx([1 / 2.5] * 10, rel=1e-14)


def test_group_mean_asks_for_the_groups() -> None:
    with pytest.raises(DataError, match="group_B"):
        coefficients(ALL_N, ROW_N, 2, aggregate=Aggregate.group_mean, constant=1.0)


def test_rejected_tokens_in_and_out_of_the_denominator() -> None:
    loss_N = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    keep_N, row_N = torch.tensor([True, False, False, True, False]), torch.zeros(5, dtype=torch.int64)
    everything = coefficients(torch.ones(5, dtype=torch.bool), row_N, 1, aggregate=Aggregate.token_mean, constant=1.0)
    kept = coefficients(keep_N, row_N, 1, aggregate=Aggregate.token_mean, constant=1.0)
    assert float(weighted_sum(loss_N, everything, keep_N)) == pytest.approx(5 / 5)
    assert float(weighted_sum(loss_N, kept, keep_N)) == pytest.approx(5 / 2)


@pytest.mark.parametrize("aggregate", list(Aggregate))
def test_coefficients_of_shares_with_global_counts_equal_those_of_the_whole(aggregate: Aggregate) -> None:
    valid_N = torch.tensor([True, True, False, True, True, True])
    whole = coefficients(valid_N, ROW_N, 2, aggregate=aggregate, constant=7.0, group_B=GROUP_B)
    totals = Counts(tokens=5, rows=2)
    cuts = ((slice(0, 5), 0), (slice(5, 6), 1))
    parts = [
        coefficients(
            valid_N[at],
            ROW_N[at] - row,
            1,
            aggregate=aggregate,
            constant=7.0,
            totals=totals,
            group_B=GROUP_B[row : row + 1],
        )
        for at, row in cuts
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_empty_rows_and_nothing_kept_give_zero_not_nan() -> None:
    nothing = torch.zeros(6, dtype=torch.bool)
    for aggregate in Aggregate:
        group_B = torch.tensor([0, 1, 1])
        coefficient_N = coefficients(nothing, ROW_N, 3, aggregate=aggregate, constant=1.0, group_B=group_B)
        assert coefficient_N.tolist() == [0.0] * 6
