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
    clamp: float | None = CLAMP,
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
            w, own = _weight(value, mode, lower, upper, clamp)
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


def _weight(
    value: float, mode: str | None, lower: float | None, upper: float | None, clamp: float | None
) -> tuple[float, bool]:
    if mode is None:
        return 1.0, True
    w = exp(value if clamp is None else min(clamp, max(-clamp, value)))
    low, high = 0.0 if lower is None else lower, math.inf if upper is None else upper
    if mode in ("off", "unbounded"):
        return w, True
    if mode == "truncate":
        return min(w, high), True
    if mode == "clip":
        return min(max(w, low), high), True
    if mode == "zero":
        return (w if _inside(value, low, high) else 0.0), True
    assert mode == "mask"
    return w, _inside(value, low, high)


def _factor(weights: list, inside: list, mask: Sequence, level: str) -> float:
    kept = []
    for w_row, own_row, m_row in zip(weights, inside, mask, strict=True):
        mine = [w for w, own, m in zip(w_row, own_row, m_row, strict=True) if own and m]
        kept += mine if level == "token" else mine[:1]
    factor = mean(kept)
    return factor if factor > 1e-8 else 1.0


def rule(
    numerator: Sequence[Sequence[float]],
    rollout: Sequence[Sequence[float]],
    mask: Sequence[Sequence[bool]],
    advantage: Sequence[float],
    *,
    statistic: str,
    over: str | None,
    lower: float,
    upper: float,
    inverse: bool,
    clamp: float | None,
    sign: str,
) -> tuple[list[list[bool]], list[list[float]]]:
    """What one rejection rule keeps, and its statistic at each valid token; ``over`` None is the token level."""
    keep, values = [], []
    for a_row, b_row, m_row, advantage_row in zip(numerator, rollout, mask, advantage, strict=True):
        tokens = [
            _token(a, b, statistic, inverse, clamp) for a, b, m in zip(a_row, b_row, m_row, strict=True) if m
        ]  # (value, missing, infinite)
        seen = {
            "any": True,
            "positive": advantage_row > 0,
            "nonpositive": advantage_row <= 0,
            "negative": advantage_row < 0,
            "nonnegative": advantage_row >= 0,
        }[sign]
        inside = [(missing or lower <= v <= upper) and not infinite for v, missing, infinite in tokens]
        value = [v for v, _, _ in tokens]
        if over is not None:
            if over != "every" and value:
                value = [_over(value, statistic, over)] * len(value)
                inside = [lower <= value[0] <= upper and not any(infinite for _, _, infinite in tokens)] * len(value)
            else:
                inside = [all(inside)] * len(value)
                value = [max(value)] * len(value) if value else []
        decided = iter(inside)
        keep.append([m and (next(decided) or not seen) for m in m_row])
        values.append(value)
    return keep, values


def _token(a: float, b: float, statistic: str, inverse: bool, clamp: float | None) -> tuple[float, bool, bool]:
    missing, d = math.isnan(b), _difference(a, b)
    if statistic == "prob_diff":
        if missing:
            return 0.0, True, False
        value = -math.inf if math.isnan(a) else exp(a) - exp(b)
        return -value if inverse else value, False, math.isinf(value)
    x = -d if inverse else d
    if clamp is not None:
        x = max(-clamp, min(clamp, x))
    values = {
        "ratio": exp(x),
        "k1": x,
        "k2": x * x / 2,
        "k3": math.inf if math.isinf(x) else exp(x) - 1 - x if abs(x) > 1e-3 else x * x / 2 + x**3 / 6 + x**4 / 24,
        "abs": abs(x),
        "mult_error": exp(abs(x)),
    }
    return values[statistic], missing, math.isinf(d)


def _over(value: Sequence[float], statistic: str, over: str) -> float:
    if over == "max":
        return max(value)
    if statistic == "ratio":
        product = math.inf if math.inf in value and 0.0 not in value else math.prod(value)
        return product if over == "sum" else product ** (1 / len(value))
    total = -math.inf if math.inf in value and -math.inf in value else math.fsum(value)
    return total if over == "sum" else total / len(value)


def m2_keep(square: Sequence[float], threshold: float, mass: Sequence[float] | None = None) -> list[bool]:
    """Drop the largest, of equal ones the first, one at a time, while the mean of the rest is not below."""
    rest = list(range(len(square)))
    mass = [1.0] * len(square) if mass is None else mass

    def moment() -> float:
        weight = math.fsum(mass[i] for i in rest)
        return math.fsum(mass[i] * square[i] for i in rest if mass[i]) / weight if weight else 0.0

    while len(rest) > 1 and not moment() < threshold:
        rest.remove(max(rest, key=lambda i: (square[i], -i)))
    return [i in rest for i in range(len(square))]


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
