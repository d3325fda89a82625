"""Slow float64 loops written from the formulas, one token at a time; what the fast code is held against."""

from __future__ import annotations

import math
from typing import Sequence

CLAMP = 20.0


def correction(
    numerator: Sequence[Sequence[float]],
    rollout: Sequence[Sequence[float]],
    mask: Sequence[Sequence[bool]],
    *,
    level: str = "token",
    mode: str | None = None,
    lower: float | None = None,
    upper: float | None = None,
    normalize: bool = False,
    rules: Sequence[tuple[str, float, float]] = (),
    veto: float | None = None,
) -> tuple[list[list[float]], list[list[bool]], float]:
    """Weights, keep flags and the normalising factor of ragged rows; ``mode`` None is: no weights."""
    weights, keep, inside, counted = [], [], [], []
    for a_row, b_row, m_row in zip(numerator, rollout, mask, strict=True):
        d = [_difference(a, b) if m else None for a, b, m in zip(a_row, b_row, m_row, strict=True)]
        missing = [m and math.isnan(b) for b, m in zip(b_row, m_row, strict=True)]
        valid = [x for x in d if x is not None]
        w_row, own_row, keep_row = [], [], []
        for x, gone in zip(d, missing, strict=True):
            if x is None:
                w_row.append(1.0), own_row.append(True), keep_row.append(False)
                continue
            token_level = level == "token"
            value = x if token_level else _row_value(valid, level)
            w, own = _weight(value, mode, lower, upper)
            if gone and token_level:
                w, own = 1.0, True
            kept = own and all(
                (gone and rule_level == "token")
                or _inside(x if rule_level == "token" else _row_value(valid, rule_level), low, high)
                for rule_level, low, high in rules
            )
            if veto is not None:
                kept = kept and not any(math.isinf(y) or y < math.log(veto) for y in valid)
            w_row.append(w), own_row.append(own), keep_row.append(kept)
        weights.append(w_row), keep.append(keep_row), inside.append(own_row), counted.append(m_row)
    factor = _factor(weights, inside, counted, level) if normalize else 1.0
    pairs = [zip(*rows, strict=True) for rows in zip(weights, mask, strict=True)]
    return [[w / factor if m else 1.0 for w, m in pair] for pair in pairs], keep, factor


def _difference(a: float, b: float) -> float:
    if math.isnan(b):
        return 0.0  # missing
    if math.isnan(a) or (math.isinf(a) and a == b):
        return -math.inf  # undefined
    return a - b


def _row_value(valid: Sequence[float], level: str) -> float:
    if math.inf in valid and -math.inf in valid:
        return -math.inf
    total = math.fsum(valid)
    return total if level == "sequence" else total / max(1, len(valid))


def _inside(value: float, lower: float, upper: float) -> bool:
    return math.isfinite(value) and lower <= exp(value) <= upper


def _weight(value: float, mode: str | None, lower: float | None, upper: float | None) -> tuple[float, bool]:
    if mode is None:
        return 1.0, True
    w = math.exp(min(CLAMP, max(-CLAMP, value)))
    low, high = 0.0 if lower is None else lower, math.inf if upper is None else upper
    if mode == "off":
        return w, True
    if mode == "truncate":
        return min(w, high), True
    if mode == "clip":
        return min(max(w, low), high), True
    assert mode == "mask"
    return w, _inside(value, low, high)


def _factor(weights: list, inside: list, mask: Sequence, level: str) -> float:
    kept = []
    for w_row, own_row, m_row in zip(weights, inside, mask, strict=True):
        mine = [w for w, own, m in zip(w_row, own_row, m_row, strict=True) if own and m]
        kept += mine if level == "token" else mine[:1]
    return math.fsum(kept) / len(kept) if kept else 1.0


def exp(x: float) -> float:
    """exp that is inf where float64 has no number for it."""
    return math.exp(x) if x < 709 else math.inf


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def mismatch_metrics(
    numerator: Sequence[Sequence[float]], rollout: Sequence[Sequence[float]], mask: Sequence[Sequence[bool]]
) -> dict[str, float]:
    """The metrics that need no rule: per row over tokens with a finite log-ratio, then over rows that have any."""
    rows, sequences = [], []
    for a_row, b_row, m_row in zip(numerator, rollout, mask, strict=True):
        tokens = [(a, b) for a, b, m in zip(a_row, b_row, m_row, strict=True) if m and math.isfinite(a - b)]
        if tokens:
            rows.append(tokens)
        valid = [_difference(a, b) for a, b, m in zip(a_row, b_row, m_row, strict=True) if m]
        if valid:
            whole = all(map(math.isfinite, valid))  # a row with an infinite log-ratio is no sample
            sequences.append(math.exp(max(-CLAMP, min(CLAMP, math.fsum(valid)))) if whole else 0.0)
    d = [[a - b for a, b in row] for row in rows]
    flat = [x for row in d for x in row]
    training, rolled = [mean([a for a, _ in row]) for row in rows], [mean([b for _, b in row]) for row in rows]

    def clamp(x: float) -> float:
        return max(-CLAMP, min(CLAMP, x))

    return {
        "mis_training_log_ppl": mean([-x for x in training]),
        "mis_training_ppl": mean([math.exp(-x) for x in training]),
        "mis_rollout_log_ppl": mean([-x for x in rolled]),
        "mis_rollout_ppl": mean([math.exp(-x) for x in rolled]),
        "mis_kl": mean([mean([-x for x in row]) for row in d]),
        "mis_k3_kl": mean([mean([math.expm1(x) - x for x in row]) for row in d]),
        "mis_log_ppl_diff": mean([r - t for r, t in zip(rolled, training, strict=True)]),
        "mis_log_ppl_abs_diff": mean([abs(r - t) for r, t in zip(rolled, training, strict=True)]),
        "mis_ppl_ratio": mean([math.exp(r - t) for r, t in zip(rolled, training, strict=True)]),
        "mis_chi2_token": mean([mean([math.expm1(2 * clamp(x)) for x in row]) for row in d]),
        "mis_chi2_seq": mean([math.expm1(2 * clamp(math.fsum(row))) for row in d]),
        "train_rollout_logprob_abs_diff": mean([mean([abs(x) for x in row]) for row in d]),
        "tis": mean([mean([math.exp(x) for x in row]) for row in d]),
        "tis_abs": mean([mean([abs(math.exp(x) - 1) for x in row]) for row in d]),
        "mis_log_ratio_mean": mean(flat),
        "mis_log_ratio_min": min(flat, default=0.0),
        "mis_log_ratio_max": max(flat, default=0.0),
        "mis_abs_log_ratio_max": max(map(abs, flat), default=0.0),
        "mis_ess_seq": effective_share(sequences),
    }


def effective_share(weights: Sequence[float]) -> float:
    """(Σw)² / (n Σw²)."""
    squares = math.fsum(w * w for w in weights)
    return math.fsum(weights) ** 2 / (len(weights) * squares) if squares else 0.0
