"""Student's t distribution through the incomplete beta function, to some 1e-12, so that scipy need not be installed."""

from __future__ import annotations

import math

TINY, CLOSE, MOST = 1e-300, 1e-15, 10_000


def two_sided(t: float, freedom: float) -> float:
    """P(|T| ≥ |t|) for T of ``freedom`` degrees: I_x(ν/2, 1/2) with x = ν / (ν + t²)."""
    if math.isinf(t):
        return 0.0
    return incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def quantile(level: float, freedom: float) -> float:
    """The t with P(|T| ≤ t) = ``level``, 0 < level < 1; by bisection, as ``two_sided`` falls in t."""
    low, high = 0.0, 1.0
    while two_sided(high, freedom) > 1 - level:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if two_sided(middle, freedom) > 1 - level:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (Abramowitz and Stegun 26.5.8)."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(1 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) / (a * _fraction(x, a, b))


def _fraction(x: float, a: float, b: float) -> float:
    """1 + d₁/(1 + d₂/(1 + …)), evaluated from the front (Lentz)."""
    value, upper, lower = 1.0, 1.0, 0.0
    for i in range(1, MOST):
        m = i // 2
        if i % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / (_apart(1 + d * lower))
        upper = _apart(1 + d / upper)
        value *= upper * lower
        if abs(upper * lower - 1) < CLOSE:
            break
    return value


def _apart(value: float) -> float:
    return value if abs(value) > TINY else TINY
