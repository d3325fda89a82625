"""The gap along something: position in the response, length so far, entropy of the position; and its worst tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from trimtab.lab.bootstrap import Estimate, Resamples
from trimtab.lab.gap import Pairs, by_row

ENTROPY_EDGES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 3.0, math.inf)
POSITION_BINS = 40


@dataclass(frozen=True)
class Bin:
    """Tokens with low <= x < high: mean |d|, mean d, mean |Δp|, share with |Δp| >= 0.01."""

    low: float
    high: float
    tokens: int
    abs_mean: Estimate
    mean: Estimate
    dp_abs_mean: Estimate
    dp_from_001: Estimate


@dataclass(frozen=True)
class Prefix:
    """The first ``length`` tokens of the responses that have as many: their summed log-ratio S.

    ``rms`` = √E[S²] (nats); ``abs_mean`` = E|S|; ``ess`` of the weights exp S as a fraction.
    """

    length: int
    responses: int
    rms: Estimate
    abs_mean: Estimate
    ess: Estimate


@dataclass(frozen=True)
class Token:
    """One token: flat number, response, position in it, Δp and d."""

    at: int
    row: int
    position: int
    rollout: float  # probability
    trainer: float
    log_ratio: float
    entropy: float

    @property
    def difference(self) -> float:
        return self.trainer - self.rollout


def by_position(pairs: Pairs, resamples: Resamples, bins: int = POSITION_BINS) -> list[Bin]:
    """Along the response, in at most ``bins`` stretches of equal width."""
    longest = int(pairs.length_B.max()) if pairs.rows else 0
    if not longest:
        return []
    width = math.ceil(longest / bins)
    edges = [*range(0, longest, width), math.ceil(longest / width) * width]
    return binned(pairs, pairs.position_N.double(), edges, resamples)


def by_entropy(pairs: Pairs, resamples: Resamples) -> list[Bin]:
    """By the entropy (nats) of the trainer's distribution at the token; empty when it was not measured."""
    if pairs.entropy_N is None:
        return []
    return binned(pairs, pairs.entropy_N.clamp(min=0.0), ENTROPY_EDGES, resamples)


def binned(pairs: Pairs, x_N: Tensor, edges: Sequence[float], resamples: Resamples) -> list[Bin]:
    """Tokens with a finite d by where ``x_N`` lies between ``edges``; stretches without a token are left out."""
    found = []
    for low, high in pairwise(edges):
        at = (pairs.finite_N & (x_N >= low) & (x_N < high)).nonzero()[:, 0]
        if not len(at):
            continue
        d_N, size_N, row_N = pairs.log_ratio_N[at], pairs.difference_N[at].abs(), pairs.row_N[at]
        parts = {"abs": d_N.abs(), "d": d_N, "dp": size_N, "apart": size_N >= 0.01}
        sums = {name: by_row(x, row_N, pairs.rows) for name, x in parts.items()}
        sums["n"] = by_row(torch.ones_like(d_N), row_N, pairs.rows)
        means = resamples.estimates(sums, lambda s: {name: s[name] / s["n"] for name in ("abs", "d", "dp", "apart")})
        found.append(Bin(low, high, len(at), means["abs"], means["d"], means["dp"], means["apart"]))
    return found


def lengths(longest: int) -> list[int]:
    """1, 2, 4, … and the longest."""
    return sorted({*(2**i for i in range(longest.bit_length()) if 2**i <= longest), longest}) if longest else []


def growth(pairs: Pairs, resamples: Resamples) -> list[Prefix]:
    """How the log-ratio of a response grows with its length. A token without a finite d adds nothing."""
    found = []
    for length in lengths(int(pairs.length_B.max()) if pairs.rows else 0):
        at = (pairs.finite_N & (pairs.position_N < length)).nonzero()[:, 0]
        long_B = (pairs.length_B >= length).double()
        sum_B = by_row(pairs.log_ratio_N[at], pairs.row_N[at], pairs.rows)
        top = sum_B[long_B > 0].max()
        weight_B = (sum_B - top).exp()
        parts = {"n": long_B, "square": sum_B**2, "size": sum_B.abs(), "w": weight_B, "ww": weight_B**2}
        told = resamples.estimates(
            {name: torch.where(long_B > 0, x, 0.0) for name, x in parts.items()},
            lambda s: {
                "rms": (s["square"] / s["n"]).sqrt(),
                "abs": s["size"] / s["n"],
                "ess": s["w"] ** 2 / (s["n"] * s["ww"]),
            },
        )
        found.append(Prefix(length, int(long_B.sum()), told["rms"], told["abs"], told["ess"]))
    return found


def worst(pairs: Pairs, count: int) -> list[Token]:
    """The tokens with the largest |Δp|, largest first; of equals the earlier one."""
    size_N = torch.where(pairs.scored_N, pairs.difference_N.abs(), -1.0)
    order = size_N.sort(descending=True, stable=True).indices[: min(count, int(pairs.scored_N.sum()))]
    return [token_at(pairs, int(at)) for at in order]


def token_at(pairs: Pairs, at: int) -> Token:
    """The token with flat number ``at``."""
    return Token(
        at=at,
        row=int(pairs.row_N[at]),
        position=int(pairs.position_N[at]),
        rollout=math.exp(float(pairs.rollout_N[at])),
        trainer=math.exp(float(pairs.trainer_N[at])),
        log_ratio=float(pairs.log_ratio_N[at]),
        entropy=math.nan if pairs.entropy_N is None else float(pairs.entropy_N[at]),
    )
