"""Do the sampled tokens follow a distribution? Tests that hold for every sample size, as tokens are a martingale.

Each token is drawn given what precedes it, so sums of (f(token) − E f) are martingales whatever the lengths, and
P(Σ f ≥ s) ≤ exp(−θ s + Σ_n log E exp(θ f)) for every θ > 0 (Chernoff). The grid of θ is paid for by its size. Nothing
here is an approximation for large samples but Kolmogorov's distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

THETAS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
STEPS = (0.1, 0.3, 0.6, 1.0, 1.5, 2.5, 4.0, 7.0, 12.0)


def surprisal_p(logp_NV: Tensor, token_N: Tensor) -> tuple[float, float]:
    """(p-value, mean surprise minus entropy in nats) of the tokens' −log p; negative: too few surprises.

    log E exp(θ x) with x = −log p is log Σ_v p_v^(1−θ).
    """
    if not len(token_N):
        return 1.0, 0.0
    seen = -logp_NV.gather(1, token_N[:, None])[:, 0]
    entropy = -torch.special.xlogy(logp_NV.exp(), logp_NV.exp()).sum(1)
    total, best = float(seen.sum()), 0.0
    for theta in THETAS:
        for sign in (1.0, -1.0):
            power = float(torch.logsumexp((1 - sign * theta) * logp_NV.clamp(min=-700.0), 1).sum())
            best = min(best, -sign * theta * total + power)
    return min(1.0, 2 * len(THETAS) * math.exp(best)), float((seen - entropy).mean())


def count_p(chance_N: Tensor, hit_N: Tensor) -> float:
    """p-value (either side) of the number of hits, each token's chance being known."""
    q, hits, best = chance_N.double().clamp(0, 1), float(hit_N.sum()), 0.0
    for step in STEPS:
        for theta in (step, -step):
            best = min(best, -theta * hits + float(torch.log1p(q * math.expm1(theta)).sum()))
    return min(1.0, 2 * len(STEPS) * math.exp(best))


def places(logp_NV: Tensor, token_N: Tensor, seed: int = 0) -> Tensor:
    """Randomised probability integral transform [N], tokens ordered from likely to unlikely: uniform if they fit.

    u = Σ_{v more likely} p_v + U p_token, U uniform; ties in the order of ids.
    """
    own = logp_NV.gather(1, token_N[:, None])
    ids = torch.arange(logp_NV.shape[1])
    before = (logp_NV > own) | ((logp_NV == own) & (ids < token_N[:, None]))
    low = (logp_NV.exp() * before).sum(1)
    random = torch.rand(len(token_N), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (low + random * own[:, 0].exp()).clamp(0, 1)


def uniform_p(u_N: Tensor) -> float:
    """Kolmogorov-Smirnov p-value that independent numbers in [0, 1] are uniform."""
    n = len(u_N)
    if n == 0:
        return 1.0
    ordered = u_N.double().sort().values
    up = torch.arange(1, n + 1, dtype=torch.float64) / n
    apart = float(torch.maximum(up - ordered, ordered - (up - 1 / n)).max())
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * apart  # Stephens: good from n = 4 on
    if scaled < 0.2:
        return 1.0
    return min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))))


def fitted_temperature(logits_NV: Tensor, token_N: Tensor) -> tuple[float, float]:
    """The temperature under which the tokens are likeliest, and its standard error (Newton on β = 1/T).

    d/dβ log p = l_token − E_β l; second derivative −Var_β l.
    """
    beta, spread = 1.0, 1.0
    own = logits_NV.gather(1, token_N[:, None])[:, 0].double()
    for _ in range(12):
        p_NV = torch.softmax(beta * logits_NV.double(), 1)
        mean = (p_NV * logits_NV).sum(1)
        spread = float(((p_NV * logits_NV.double().square()).sum(1) - mean.square()).sum().clamp(min=1e-12))
        step = float((own - mean).sum()) / spread
        beta = min(max(beta + min(max(step, -0.5 * beta), beta), 0.02), 50.0)
        if abs(step) < 1e-4 * beta:
            break
    return 1 / beta, 1 / math.sqrt(spread) / beta**2


def agreement(logp_NV: Sequence[Tensor], pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tensor, Tensor]:
    """(chance, hit) of each step at which two responses that were alike so far could part: do they draw one token?

    logp_NV: for each pair, log-probs [T, V] along the first response. Given a common beginning, two independent draws
    agree with probability Σ_v p_v²; whether responses are independent is then ``count_p`` of the steps.
    """
    chance, hit = list[float](), list[bool]()
    for logp, (one, two) in zip(logp_NV, pairs, strict=True):
        for i, (a, b) in enumerate(zip(one, two, strict=False)):
            chance.append(float(logp[i].exp().square().sum()))
            hit.append(a == b)
            if a != b:
                break
    return torch.tensor(chance, dtype=torch.float64), torch.tensor(hit, dtype=torch.bool)
