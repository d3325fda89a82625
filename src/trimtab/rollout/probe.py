"""Does the engine hold the trainer's weights? Both score the same rows; a gap beyond rounding stops the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.errors import EngineError

_CLEARLY = 0.2  # by how much a shifted correlation must beat the unshifted one to be named


@dataclass(frozen=True)
class ProbeResult:
    """Gap d = trainer minus engine over ``tokens`` tokens that both scored; ``missing`` had no number on one side.

    ``correlation`` is Pearson's, of engine position i with trainer position i - 1, i, i + 1; NaN where undefined.
    ``shift`` is the offset that fits clearly better than 0, else 0.
    """

    mean_abs: float
    max_abs: float
    tokens: int
    missing: int
    shift: int
    correlation: tuple[float, float, float]


def probe(engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]]) -> ProbeResult:
    """Compare log-probs (nats) of the same tokens from both sides, row by row.

    NaN marks a missing value and is left out; infinities count. Raises EngineError when rows differ in length.
    """
    if [len(row) for row in engine] != [len(row) for row in trainer]:
        raise EngineError(
            f"probe: the engine scored rows of {[len(row) for row in engine]} tokens, "
            f"the trainer of {[len(row) for row in trainer]}"
        )
    pairs = [(e, t) for er, tr in zip(engine, trainer, strict=True) for e, t in zip(er, tr, strict=True)]
    valid = [(e, t) for e, t in pairs if not (math.isnan(e) or math.isnan(t))]
    gaps = [0.0 if e == t else abs(t - e) for e, t in valid]
    before, level, after = (_correlation(engine, trainer, offset) for offset in (-1, 0, 1))
    best, shift = max((before, -1), (after, 1), key=lambda pair: -2.0 if math.isnan(pair[0]) else pair[0])
    fits = best > (-1.0 if math.isnan(level) else level) + _CLEARLY
    return ProbeResult(
        mean_abs=math.fsum(gaps) / len(gaps) if gaps else math.nan,
        max_abs=max(gaps, default=math.nan),
        tokens=len(valid),
        missing=len(pairs) - len(valid),
        shift=shift if fits else 0,
        correlation=(before, level, after),
    )


def verdict(result: ProbeResult, bound: float) -> None:
    """Raise EngineError when the mean gap is above ``bound`` (or nothing could be compared), naming likely causes."""
    if result.tokens == 0:
        raise EngineError(
            f"probe: no token was scored by both sides ({result.missing} missing); the engine returns no log-probs. "
            "rollout.probe_every=0 switches the probe off"
        )
    if result.mean_abs <= bound:
        return
    if result.shift:
        cause = (
            f"the engine's log-probs fit the trainer's best when moved by {result.shift:+d} position "
            f"(correlation {max(result.correlation[0], result.correlation[2]):.2f} against {result.correlation[1]:.2f} "
            "in place): one side is shifted by one token"
        )
    else:
        cause = (
            "likely causes: the hand-over left some weights behind (tied embeddings, packed copies), a prefix cache "
            "outlived it, the two sides load different models, or the engine's dtype is too coarse for the step (a "
            "bfloat16 engine rounds small updates away: rollout.dtype=float32, or a lower optim.lr)"
        )
    raise EngineError(
        f"probe: the engine no longer samples from the trainer's policy: mean |log-ratio| {result.mean_abs:.3g}, max "
        f"{result.max_abs:.3g} over {result.tokens} tokens, allowed is a mean of {bound:.3g}; {cause}. If the gap is "
        f"meant, raise the bound: rollout.probe_bound={2 * result.mean_abs:.2g}"
    )


def _correlation(engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]], offset: int) -> float:
    """Pearson correlation of engine[i] with trainer[i + offset] over all rows, finite pairs only; NaN if undefined."""
    pairs = []
    for left, right in zip(engine, trainer, strict=True):
        for i, value in enumerate(left):
            if 0 <= i + offset < len(right) and math.isfinite(value) and math.isfinite(right[i + offset]):
                pairs.append((value, right[i + offset]))
    if len(pairs) < 3:
        return math.nan
    mean_x = math.fsum(x for x, _ in pairs) / len(pairs)
    mean_y = math.fsum(y for _, y in pairs) / len(pairs)
    cov = math.fsum((x - mean_x) * (y - mean_y) for x, y in pairs)
    var = math.fsum((x - mean_x) ** 2 for x, _ in pairs) * math.fsum((y - mean_y) ** 2 for _, y in pairs)
    return cov / math.sqrt(var) if var > 0 else math.nan
