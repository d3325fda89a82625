"""M2PO: leave out the tokens of largest squared log-ratio until the second moment of the rest is small."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab.correction.log_ratio import LogRatio
from trimtab.correction.rows import Array
from trimtab.errors import ConfigError

ROUNDING = 1e-9
"""More than a mean can be off by, relative; closer calls are left to the sum itself."""


@dataclass(frozen=True)
class SecondMoment:
    """``keep_M``: the tokens that stay, None if all do; ``dropped`` of the ``tokens`` do not."""

    keep_M: Tensor | None
    dropped: int
    tokens: int


def apply_m2(given: LogRatio, threshold: float) -> SecondMoment:
    """``second_moment_keep`` of d² over all valid tokens of the call; a missing one counts as 0, an infinite as inf."""
    if not 0 < threshold < math.inf:
        raise ConfigError(
            f"mis.m2_threshold={threshold:g}: the second moment to stay below must be a positive number; "
            "for example mis.m2_threshold=0.04, or null for none"
        )
    tokens = given.rows.tokens
    square_M = given.once("square", lambda: given.log_ratio_M.double().square())
    if not tokens or float(square_M.mean()) < threshold * (1 - ROUNDING):  # the usual batch, no sort
        return SecondMoment(None, 0, tokens)
    keep_M = second_moment_keep(square_M, threshold)
    return SecondMoment(keep_M, tokens - int(keep_M.count_nonzero()), tokens)


def second_moment_keep(square_M: Tensor, threshold: float, mass_M: Tensor | None = None) -> Tensor:
    """Drop the fewest of the largest d² so that the mean of the rest is below ``threshold``: bool [M].

    Strictly below; one element stays whatever it is. Of equal ones the first are dropped first. ``square_M``: float64,
    not negative, may be inf. ``mass_M``: weights of the mean, not negative, for a population instead of a sample.
    (M2PO, arXiv 2510.01161)
    """
    square: Array = square_M.double().numpy()
    mass: Array | None = None if mass_M is None else mass_M.double().numpy()
    moment = square if mass is None else np.where(mass > 0, square, 0.0) * mass
    with np.errstate(over="ignore"):
        bin_M = square.astype(np.float32).view(np.int32) >> 16  # grows with d²; only one bin needs sorting
    total, count = np.bincount(bin_M, moment).cumsum(), np.bincount(bin_M, mass).cumsum()
    stay = _below(total, count, threshold)
    keep = bin_M < stay
    if stay < len(total):
        at = np.flatnonzero(bin_M == stay)
        at = at[np.argsort(-square[at], kind="stable")[::-1]]
        before = (total[stay - 1], count[stay - 1]) if stay else (0.0, 0.0)
        counts = np.arange(1, len(at) + 1) if mass is None else mass[at].cumsum()
        more = _below(before[0] + moment[at].cumsum(), before[1] + counts, threshold)
        keep[at[: more if keep.any() else max(1, more)]] = True
    return torch.from_numpy(keep)


def _below(total: Array, count: Array, threshold: float) -> int:
    """How many of these growing means come before the first that is not below; the mean of nothing is."""
    reached = np.flatnonzero((total >= threshold * count) & (count > 0))
    return int(reached[0]) if len(reached) else len(total)
