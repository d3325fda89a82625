"""The gap between engine and trainer in figures, from both sides' log-probs of the same tokens.

p = exp(log-prob); Δp = p_trainer − p_rollout; d = log p_trainer − log p_rollout; the tokens were sampled by the engine,
so means over them are expectations under the rollout policy μ, and w = exp(d) = π/μ is the importance weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from trimtab.errors import DataError
from trimtab.lab.bootstrap import DRAWS, Estimate, Resamples
from trimtab.spec import Level

CLOSE = 0.001
APART = (0.01, 0.05, 0.1)
QUANTILES = {"p0.1": 0.001, "p1": 0.01, "p5": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}


@dataclass(frozen=True)
class Pairs:
    """Both sides' log-probs (float64 nats, NaN where missing) of N response tokens, row after row.

    length_B: int64, 0 for an empty response. mask_N: False where the policy did not choose the token. entropy_N:
    entropy of the trainer's distribution at each token, nats; None if it was not asked for.
    """

    rollout_N: Tensor
    trainer_N: Tensor
    length_B: Tensor
    mask_N: Tensor
    entropy_N: Tensor | None = None

    def __post_init__(self) -> None:
        tokens = int(self.length_B.sum())
        for name in ("rollout_N", "trainer_N", "mask_N", "entropy_N"):
            values = getattr(self, name)
            if values is not None and values.shape != (tokens,):
                raise DataError(f"{name} has shape {tuple(values.shape)}, but the responses hold {tokens} tokens")

    @property
    def rows(self) -> int:
        return int(self.length_B.numel())

    @cached_property
    def row_N(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.rows), self.length_B)

    @cached_property
    def position_N(self) -> Tensor:
        """0 for a response's first token."""
        starts_B = self.length_B.cumsum(0) - self.length_B
        return torch.arange(len(self.row_N)) - starts_B[self.row_N]

    @cached_property
    def scored_N(self) -> Tensor:
        """Own tokens with a log-prob from both sides; −inf is one (p = 0), +inf is none."""
        return self.mask_N & _is_logp(self.rollout_N) & _is_logp(self.trainer_N)

    @cached_property
    def difference_N(self) -> Tensor:
        """Δp; NaN where not scored."""
        return torch.where(self.scored_N, self.trainer_N.exp() - self.rollout_N.exp(), math.nan)

    @cached_property
    def log_ratio_N(self) -> Tensor:
        """d; 0 where both are −inf, NaN where not scored."""
        d_N = torch.where(self.rollout_N == self.trainer_N, 0.0, self.trainer_N - self.rollout_N)
        return torch.where(self.scored_N, d_N, math.nan)

    @cached_property
    def finite_N(self) -> Tensor:
        """Scored tokens whose d is finite: what the figures of d are over."""
        return self.scored_N & self.log_ratio_N.isfinite()


def _is_logp(logp_N: Tensor) -> Tensor:
    return ~logp_N.isnan() & (logp_N != math.inf)


@dataclass(frozen=True)
class Counts:
    """How many responses and tokens the figures are of, and what was left out."""

    responses: int
    empty: int  # responses without a token
    tokens: int
    scored: int  # own tokens with a log-prob from both sides: what the figures of Δp are over
    masked: int  # not the policy's own
    missing_rollout: int
    missing_trainer: int
    infinite: int  # scored, p = 0 on one side: in the figures of Δp, not in those of d


@dataclass(frozen=True)
class Gap:
    """``figures`` by name, see ``measure``."""

    counts: Counts
    figures: Mapping[str, Estimate]
    draws: int = field(default=DRAWS)

    def __getitem__(self, name: str) -> Estimate:
        return self.figures[name]


def measure(pairs: Pairs, seed: int = 0, draws: int = DRAWS) -> Gap:
    """All figures of the gap, with 95 % intervals by resampling responses (none for extremes).

    Over scored tokens: ``dp_below_0.001`` share with |Δp| < 0.001; ``dp_from_0.01``, ``_0.05``, ``_0.1`` share at or
    above; ``dp_mean``, ``dp_abs_mean``, ``dp_max`` = max |Δp|.
    Over those with finite d: ``log_ratio_mean``, ``_std`` (population), ``_abs_mean``, ``_min``, ``_max``, quantiles
    ``_p0.1`` … ``_p99.9``.
    At each level, of the log-ratios L of its n units (token: d; sequence: Σ d; geometric: mean d over a response's
    tokens; a missing token is neutral, a response with an infinite d is left out), with weights w = exp L:
    ``<level>_k1`` = E[−L], ``_k3`` = E[w − 1 − L], ``_chi2`` = E[w²] − 1, ``_ess`` = (Σw)² / (n Σw²),
    ``_weight_mean`` = E[w] (1 when the engine samples from its whole support), ``_abs_mean`` = E|L|.
    """
    resamples = Resamples.of(pairs.rows, seed, draws)
    figures = _differences(pairs, resamples) | _log_ratios(pairs, resamples)
    for level in Level:
        figures |= _level(level, *_units(pairs, level), pairs.rows, resamples)
    return Gap(_counts(pairs), figures, draws)


def _counts(pairs: Pairs) -> Counts:
    own = pairs.mask_N
    return Counts(
        responses=pairs.rows,
        empty=int((pairs.length_B == 0).sum()),
        tokens=len(own),
        scored=int(pairs.scored_N.sum()),
        masked=int((~own).sum()),
        missing_rollout=int((own & ~_is_logp(pairs.rollout_N)).sum()),
        missing_trainer=int((own & ~_is_logp(pairs.trainer_N)).sum()),
        infinite=int((pairs.scored_N & ~pairs.finite_N).sum()),
    )


def by_row(value_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Sums over each response, float64."""
    return torch.zeros(rows, dtype=torch.float64).index_add_(0, row_N, value_N.double())


def _differences(pairs: Pairs, resamples: Resamples) -> dict[str, Estimate]:
    dp_N, row_N = pairs.difference_N[pairs.scored_N], pairs.row_N[pairs.scored_N]
    size_N = dp_N.abs()
    parts = {f"dp_below_{CLOSE}": size_N < CLOSE, **{f"dp_from_{bound}": size_N >= bound for bound in APART}}
    parts |= {"dp_mean": dp_N, "dp_abs_mean": size_N}
    sums = {name: by_row(value_N, row_N, pairs.rows) for name, value_N in parts.items()}
    sums["tokens"] = by_row(torch.ones_like(dp_N), row_N, pairs.rows)
    found = resamples.estimates(sums, lambda s: {name: s[name] / s["tokens"] for name in parts})
    return found | {"dp_max": Estimate(float(size_N.max()) if len(size_N) else math.nan)}


def _log_ratios(pairs: Pairs, resamples: Resamples) -> dict[str, Estimate]:
    d_N, row_N = pairs.log_ratio_N[pairs.finite_N], pairs.row_N[pairs.finite_N]
    # Second moments about the whole's mean: about 0 they would lose what a constant offset is large against.
    centre = d_N.mean() if len(d_N) else torch.tensor(math.nan)
    parts = {"n": torch.ones_like(d_N), "d": d_N, "size": d_N.abs(), "off": d_N - centre, "square": (d_N - centre) ** 2}

    def formula(s: Mapping[str, Tensor]) -> dict[str, Tensor]:
        variance = s["square"] / s["n"] - (s["off"] / s["n"]) ** 2
        return {
            "log_ratio_mean": s["d"] / s["n"],
            "log_ratio_std": variance.clamp(min=0).sqrt(),
            "log_ratio_abs_mean": s["size"] / s["n"],
        }

    found = resamples.estimates({name: by_row(x, row_N, pairs.rows) for name, x in parts.items()}, formula)
    found |= {
        "log_ratio_min": Estimate(float(d_N.min()) if len(d_N) else math.nan),
        "log_ratio_max": Estimate(float(d_N.max()) if len(d_N) else math.nan),
    }
    return found | resamples.quantiles(d_N, row_N, {f"log_ratio_{name}": q for name, q in QUANTILES.items()})


def _units(pairs: Pairs, level: Level) -> tuple[Tensor, Tensor]:
    """Log-ratio of each unit and the response it belongs to."""
    d_N, row_N = pairs.log_ratio_N[pairs.finite_N], pairs.row_N[pairs.finite_N]
    if level is Level.token:
        return d_N, row_N
    total_B = by_row(d_N, row_N, pairs.rows)
    count_B = by_row(torch.ones_like(d_N), row_N, pairs.rows)
    lost = pairs.scored_N & ~pairs.finite_N
    lost_B = by_row(lost, pairs.row_N, pairs.rows)
    rows = ((count_B > 0) & (lost_B == 0)).nonzero()[:, 0]
    return (total_B[rows] if level is Level.sequence else total_B[rows] / count_B[rows]), rows


def _level(level: Level, unit_U: Tensor, row_U: Tensor, rows: int, resamples: Resamples) -> dict[str, Estimate]:
    # The ESS does not change when all weights are scaled: by the largest, none overflows.
    top = unit_U.max() if len(unit_U) else torch.tensor(0.0)
    scaled_U = (unit_U - top).exp()
    parts = {
        "n": torch.ones_like(unit_U),
        "k1": -unit_U,
        "k3": torch.expm1(unit_U) - unit_U,
        "chi2": torch.expm1(2 * unit_U),
        "weight_mean": unit_U.exp(),
        "abs_mean": unit_U.abs(),
        "w": scaled_U,
        "ww": scaled_U**2,
    }
    means = ("k1", "k3", "chi2", "weight_mean", "abs_mean")

    def formula(s: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # A resample of underflowing weights alone is 0/0; it has no ESS.
        return {**{name: s[name] / s["n"] for name in means}, "ess": s["w"] ** 2 / (s["n"] * s["ww"])}

    found = resamples.estimates({name: by_row(x, row_U, rows) for name, x in parts.items()}, formula)
    return {f"{level.value}_{name}": estimate for name, estimate in found.items()}
