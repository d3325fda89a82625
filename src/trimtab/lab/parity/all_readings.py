"""Every reading of the reference's logits, plain ones first."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from trimtab.lab.parity.readings import Guess, of_numbers, of_place, of_rounding, of_temperature, of_value
from trimtab.lab.parity.reference import Truth
from trimtab.lab.parity.supports import of_ends, of_penalties, of_support


def readings(truth: Truth, told_N: Tensor) -> Iterator[Guess]:
    """Every reading worth a try, plain ones first."""
    yield from of_temperature(truth)
    yield from of_place(truth, told_N)
    yield from of_value()
    yield from of_rounding()
    yield from of_support(truth, told_N)
    yield from of_ends(truth, told_N)
    yield from of_penalties(truth, told_N)
    yield from of_numbers(truth, told_N)
