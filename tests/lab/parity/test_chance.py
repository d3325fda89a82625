"""The tests of sampled tokens: exact against enumeration, quiet on what fits, loud on what does not."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from trimtab.lab.parity.chance import (
    agreement,
    count_p,
    fitted_temperature,
    places,
    surprisal_p,
    uniform_p,
)
from trimtab.lab.parity.reference import Truth
from trimtab.lab.parity.sampler import ALARM, distribution, support

V = 24


def logits_of(rows: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def drawn(logits: torch.Tensor, temperature: float = 1.0, seed: int = 0) -> torch.Tensor:
    p = torch.softmax(logits.double() / temperature, 1)
    return torch.multinomial(p, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


def truth_of(logits: torch.Tensor, token: torch.Tensor) -> Truth:
    n = len(token)
    return Truth((), logits, token, torch.zeros(n, dtype=torch.int64), torch.arange(n), 1.0, ())


def test_a_chernoff_bound_is_never_below_the_exact_tail() -> None:
    """Against every outcome of four tokens over three symbols."""
    logp = torch.log_softmax(
        torch.tensor([[0.0, 1.0, 2.0], [0.5, 0.1, -1.0], [2.0, 2.0, 0.0], [0.0, 0.0, 3.0]]).double(), 1
    )
    chance = logp[:, 0].exp()
    sums: list[tuple[float, float, int]] = []
    for word in itertools.product(range(3), repeat=4):
        p = math.exp(sum(float(logp[i, v]) for i, v in enumerate(word)))
        sums.append((p, -sum(float(logp[i, v]) for i, v in enumerate(word)), sum(v == 0 for v in word)))
    for word in itertools.product(range(3), repeat=4):
        token = torch.tensor(word)
        surprise = -sum(float(logp[i, v]) for i, v in enumerate(word))
        hits = sum(v == 0 for v in word)
        tail = min(
            sum(p for p, s, _ in sums if s >= surprise - 1e-12), sum(p for p, s, _ in sums if s <= surprise + 1e-12)
        )
        assert surprisal_p(logp, token)[0] >= tail
        rare = min(sum(p for p, _, h in sums if h >= hits), sum(p for p, _, h in sums if h <= hits))
        assert count_p(chance, token == 0) >= rare


def test_surprise_minus_entropy_is_what_a_loop_gives() -> None:
    logp = torch.log_softmax(logits_of(5, 1).double(), 1)
    token = torch.tensor([0, 3, 5, 7, 23])
    whole = 0.0
    for n in range(5):
        p = np.exp(logp[n].numpy())
        whole += -float(logp[n, token[n]]) + float((p * np.log(p)).sum())
    assert surprisal_p(logp, token)[1] == pytest.approx(whole / 5, rel=1e-12)


def test_places_of_tokens_are_uniform_if_and_only_if_they_fit() -> None:
    logits = logits_of(4000, 2)
    logp = torch.log_softmax(logits.double(), 1)
    fits = places(logp, drawn(logits))
    assert uniform_p(fits) > 0.001
    assert float(fits.mean()) == pytest.approx(0.5, abs=0.02)
    assert uniform_p(places(logp, drawn(logits, 0.6))) < 1e-9


def test_kolmogorov_p_value_against_a_known_one() -> None:
    """D = 0.1 with n = 100 has p = 0.2527 (Stephens' approximation of the exact 0.2543)."""
    u = (torch.arange(100) + 0.5) / 100 * 0.9 + 0.095  # moved until the largest distance is 0.1
    apart = max(float((torch.arange(1, 101) / 100 - u).abs().max()), float((u - torch.arange(100) / 100).abs().max()))
    scaled = (10 + 0.12 + 0.011) * apart
    exact = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 50))
    assert uniform_p(u) == pytest.approx(exact, rel=1e-6)
    assert uniform_p(torch.linspace(0.01, 0.99, 50)) == pytest.approx(1.0, abs=1e-6)


def test_the_fitted_temperature_covers_the_true_one() -> None:
    logits = logits_of(3000, 3)
    for heat in (0.5, 0.8, 1.0, 1.4):
        found, error = fitted_temperature(logits, drawn(logits, heat, seed=int(10 * heat)))
        assert abs(found - heat) < 4 * error
        assert 0 < error < 0.1


def test_independent_responses_part_as_often_as_chance_has_it_and_copies_never() -> None:
    logits = logits_of(6, 4) / 2
    logp = torch.log_softmax(logits.double(), 1)
    words = [drawn(logits, seed=seed).tolist() for seed in range(60)]
    pairs = list(zip(words[::2], words[1::2], strict=True))
    chance, hit = agreement([logp] * 30, pairs)
    steps = sum(next((i + 1 for i in range(6) if a[i] != b[i]), 6) for a, b in pairs)
    assert len(chance) == steps
    assert float(chance[0]) == pytest.approx(sum(math.exp(2 * float(x)) for x in logp[0]), rel=1e-12)
    assert count_p(chance, hit) > 1e-2
    assert count_p(*agreement([logp] * 30, [(word, word) for word in words[::2]])) < 1e-9


def test_no_alarm_in_a_hundred_healthy_samples_and_one_in_each_wrong_one() -> None:
    quiet = []
    for seed in range(100):
        logits = logits_of(120, seed)
        quiet.append(distribution(truth_of(logits, drawn(logits, seed=seed))).p)
    assert min(quiet) > ALARM * 100
    logits = logits_of(600, 7)
    truth = truth_of(logits, drawn(logits, 0.7))
    found = distribution(truth).cause
    assert found is not None and found.name == "temperature" and "0.7" in found.text


def test_a_truncated_support_is_named() -> None:
    logits = logits_of(800, 9)
    p = torch.softmax(logits, 1)
    top = p.topk(5, 1)
    token = top.indices.gather(1, torch.multinomial(top.values, 1, generator=torch.Generator().manual_seed(1)))[:, 0]
    found = support(truth_of(logits, token)).cause
    assert found is not None and "truncated" in found.text
    assert support(truth_of(logits, drawn(logits))).cause is None
