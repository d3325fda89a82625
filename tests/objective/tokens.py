"""Twelve tokens of four responses, one of them empty, for the tests of policy losses."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.objective.surrogate import TokenTerms

COUNTED = [True, True, False, True, True, True, True, False, True, True, True, True]
ROW = [0, 0, 0, 0, 0, 1, 1, 1, 1, 3, 3, 3]  # row 2 is empty
ADVANTAGE = [0.8, 0.8, 0.8, 0.8, 0.8, -1.3, -1.3, -1.3, -1.3, 0.0, 0.0, 0.0]
LOG_RATIO = [0.1, -0.4, 9.0, 0.5, 0.0, 0.35, -0.6, -9.0, 1.6, 0.3, -0.3, 0.05]
ANCHOR = [-1.0, -0.5, -0.1, -1.2, -2.0, -1.9, -0.3, -0.2, -2.2, -0.7, -0.9, -1.1]
WEIGHT = [1.2, 0.4, 7.0, 2.0, 1.0, 0.9, 1.7, 3.0, 0.6, 1.1, 0.0, 2.0]
CURRENT = [a + x for a, x in zip(ANCHOR, LOG_RATIO, strict=True)]


def given(current_N: Tensor | None = None) -> TokenTerms:
    current_N = torch.tensor(CURRENT, dtype=torch.float64) if current_N is None else current_N
    rest = [torch.tensor(x, dtype=torch.float64) for x in (ANCHOR, ADVANTAGE, WEIGHT)]
    return TokenTerms(current_N, *rest, torch.tensor(COUNTED), torch.tensor(ROW), 4)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)
