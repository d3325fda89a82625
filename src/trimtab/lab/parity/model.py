"""What a ladder finds, as data: rungs with verdicts, sizes and causes; and what to change, in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Section(Enum):
    """The ladder's parts, in the order in which they are climbed and mended."""

    semantics = "semantics"
    path = "inference path"
    weights = "weights"
    numerics = "numerics"


class Verdict(Enum):
    """What a controlled comparison says; ``differs`` alone is a fault."""

    equal = "equal within noise"
    rounding = "rounding"
    differs = "differs"
    off = "not in use"
    untestable = "not testable here"


@dataclass(frozen=True)
class Bound:
    """What noise is: the largest mean |d|, root mean square and single |d| that the arithmetic explains, in nats.

    ``coarse``: set by a dtype below float32 (a difference within it is rounding, not equality).
    """

    mean: float
    rms: float
    each: float
    coarse: bool = False


@dataclass(frozen=True)
class Size:
    """Difference d of log-probs over ``tokens``, nats: mean, mean |d|, root mean square, largest |d|.

    ``error``: standard error of the mean |d|, rows being the independent units. ``missing``: no number on one side.
    """

    mean: float
    mean_abs: float
    rms: float
    largest: float
    error: float
    tokens: int
    missing: int = 0

    def within(self, bound: Bound) -> bool:
        """Whether noise of ``bound`` explains it; a missing number or an infinity never is noise."""
        if self.missing or not math.isfinite(self.largest):
            return False
        return self.mean_abs <= bound.mean and self.rms <= bound.rms and self.largest <= bound.each


def size_of(gap_N: Tensor, row_N: Tensor | None = None) -> Size:
    """The figures of differences [N] (float64, NaN: missing), of rows [N] where tokens hang together."""
    kept = ~gap_N.isnan()
    gap, missing = gap_N[kept].double(), int((~kept).sum())
    if not len(gap):
        return Size(math.nan, math.nan, math.nan, math.inf if missing else 0.0, math.nan, 0, missing)
    if not bool(gap.isfinite().all()):
        return Size(math.nan, math.inf, math.inf, math.inf, math.nan, len(gap), missing)
    error = clustered_error(gap.abs(), torch.arange(len(gap)) if row_N is None else row_N[kept])
    return Size(
        mean=float(gap.mean()),
        mean_abs=float(gap.abs().mean()),
        rms=float(gap.square().mean().sqrt()),
        largest=float(gap.abs().max()),
        error=error,
        tokens=len(gap),
        missing=missing,
    )


def clustered_error(values_N: Tensor, row_N: Tensor) -> float:
    """Standard error of the mean of values [N] whose rows are the independent units; NaN for one row."""
    _, where = row_N.unique(return_inverse=True)
    rows = int(where.max()) + 1 if len(where) else 0
    if rows < 2:
        return math.nan
    sums = torch.zeros(rows, dtype=torch.float64).index_add_(0, where, values_N.double() - values_N.double().mean())
    return math.sqrt(float(sums.square().sum()) * rows / (rows - 1)) / len(values_N)


@dataclass(frozen=True)
class Cause:
    """What makes a difference. ``name`` is a word for machines; ``mend``: overrides, or what to look at."""

    name: str
    text: str
    mend: str
    side: str  # engine, trainer, hand-over, prompts, settings


@dataclass(frozen=True)
class Rung:
    """One controlled comparison: ``value`` ± ``error`` in ``unit`` over ``count``, noise being at most ``bound``."""

    section: Section
    name: str
    compared: str
    verdict: Verdict
    value: float | None = None
    error: float | None = None
    bound: float | None = None
    unit: str = "nats, mean |d|"
    count: int = 0
    cause: Cause | None = None
    note: str = ""
    follows: bool = False  # only shows again what an earlier rung found

    @property
    def fault(self) -> bool:
        return self.verdict is Verdict.differs


def measured(
    section: Section,
    name: str,
    compared: str,
    verdict: Verdict,
    size: Size,
    bound: Bound | None = None,
    cause: Cause | None = None,
    follows: bool = False,
    note: str = "",
) -> Rung:
    """A rung whose figure is a mean |d|."""
    return Rung(
        section,
        name,
        compared,
        verdict,
        value=size.mean_abs,
        error=size.error,
        bound=None if bound is None else bound.mean,
        count=size.tokens,
        cause=cause,
        follows=follows,
        note=note,
    )


def changes(rungs: Sequence[Rung]) -> list[Rung]:
    """The rungs whose causes are to be mended, in order: section by section, each cause once."""
    order = list(Section)
    found, known = list[Rung](), set[tuple[str, str]]()
    for rung in sorted(rungs, key=lambda rung: order.index(rung.section)):
        if not rung.fault or rung.follows or rung.cause is None:
            continue
        key = (rung.cause.name, rung.cause.side)
        if key not in known:
            known.add(key)
            found.append(rung)
    return found


def healthy(rungs: Sequence[Rung]) -> bool:
    """Whether no rung differs."""
    return not any(rung.fault for rung in rungs)
