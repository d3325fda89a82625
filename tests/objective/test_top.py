"""Tokens of highest entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trimtab.objective.top import entropy_keep


@pytest.mark.parametrize("share", [0.05, 0.2, 0.3, 0.5, 0.95, 1.0])
def test_keeps_what_is_at_or_above_the_quantile_of_the_valid_tokens(share: float) -> None:
    torch.manual_seed(1)
    entropy_N = torch.rand(101) * 3
    valid_N = torch.rand(101) < 0.7
    bound = np.quantile(entropy_N[valid_N].numpy().astype(np.float64), 1 - share)
    expected = [bool(v) and float(h) >= bound - 1e-7 for h, v in zip(entropy_N, valid_N, strict=True)]
    keep_N = entropy_keep(entropy_N, valid_N, share)
    assert keep_N.tolist() == expected
    assert int(keep_N.sum()) == pytest.approx(share * int(valid_N.sum()), abs=1)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_other_tokens_are_not_looked_at(poison: float) -> None:
    valid_N = torch.tensor([True, True, False, True])
    entropy_N = torch.tensor([0.1, 2.0, poison, 1.0])
    assert entropy_keep(entropy_N, valid_N, 0.4).tolist() == [False, True, False, False]
    assert entropy_keep(entropy_N, torch.zeros(4, dtype=torch.bool), 0.4).tolist() == [False] * 4
