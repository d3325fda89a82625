"""Semantics of sampling: do the tokens follow the distribution that is reported, in support, ends and independence?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.batch import Finish, Sample
from trimtab.lab.parity.chance import (
    agreement,
    count_p,
    fitted_temperature,
    places,
    surprisal_p,
    uniform_p,
)
from trimtab.lab.parity.model import Cause, Rung, Section, Verdict
from trimtab.lab.parity.reference import Truth
from trimtab.lab.parity.state import Lab

ALARM = 1e-6
"""p-value below which a test speaks of a fault: with some 20 tests a ladder, one false alarm in 50 000."""
MASSES, RANKS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99), (1, 2, 3, 5, 10, 20, 50)
ENGINE = "engine"


@dataclass(frozen=True)
class Test:
    """A p-value, and the words for it."""

    p: float
    cause: Cause | None


def distribution(truth: Truth) -> Test:
    """Tokens against the reference's distribution at the temperature asked for."""
    heat = truth.temperature
    spread = surprisal_p(truth.logp_NV, truth.token_N)
    p = min(1.0, 2 * min(spread[0], uniform_p(places(truth.logp_NV, truth.token_N))))
    if p >= ALARM:
        return Test(p, None)
    found, error = fitted_temperature(truth.logits_NV, truth.token_N)
    if abs(found - heat) > 4 * error:
        again = torch.log_softmax(truth.logits_NV.double() / found, -1)
        fits = uniform_p(places(again, truth.token_N)) > 1e-3
        gain = float((truth.own(again) - truth.logp_N).sum())  # log-likelihood; a truncation's is -log of its p-value
        cut = support(truth)
        if cut.cause is not None and cut.p < math.exp(-max(gain, 0.0)):
            return Test(p, cut.cause)
        text = f"tokens are sampled at temperature {found:.3g} ± {error:.2g}, not at T={heat:g}"
        text += "" if fits else " (and even that does not fit them well)"
        return Test(
            p, Cause("temperature", text, "the engine must sample at rollout.temperature (mismatch=none)", ENGINE)
        )
    text = (
        f"sampled tokens do not follow the distribution: surprise is {spread[1]:+.3g} nats a token beyond the "
        f"entropy (p={p:.1g})"
    )
    return Test(p, Cause("sampling", text, "the engine's sampler: what it samples is not what it reports", ENGINE))


def support(truth: Truth) -> Test:
    """Whether tokens from outside a nucleus, or beyond the k likeliest, never come although they should."""
    ordered = truth.logp_NV.exp().sort(1, descending=True).values
    mass = ordered.cumsum(1)
    own = truth.logp_N.exp()
    before = (ordered > own[:, None] * (1 + 1e-9)).sum(1)  # how many are likelier
    above = torch.where(before > 0, mass.gather(1, (before - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    found: list[tuple[float, str, str, str]] = []
    for p in MASSES:
        last = (mass < p).sum(1).clamp(max=mass.shape[1] - 1)
        outside = 1 - mass.gather(1, last[:, None])[:, 0]
        found += _never(outside, above >= p, "top_p", f"top-p {p:g}", "rollout.top_p=1 (mismatch=none)")
    for k in RANKS:
        if k < mass.shape[1]:
            found += _never(1 - mass[:, k - 1], before >= k, "top_k", f"top-k {k}", "rollout.top_k=0")
    for share in (0.02, 0.05, 0.1, 0.2):
        least = ordered[:, :1] * share
        outside = torch.where(truth.logp_NV.exp() < least, truth.logp_NV.exp(), 0.0).sum(1)
        found += _never(outside, own < least[:, 0], "min_p", f"min-p {share:g}", "min_p=0 in the engine's sampling")
    if not found:
        return Test(1.0, None)
    p_value, name, text, mend = min(found)
    return Test(p_value, Cause(name, text, mend, ENGINE) if p_value < ALARM else None)


def _never(chance_N: Tensor, hit_N: Tensor, name: str, what: str, mend: str) -> list[tuple[float, str, str, str]]:
    if bool(hit_N.any()):
        return []
    expected = float(chance_N.sum())
    p = float(torch.exp(torch.log1p(-chance_N.clamp(0, 1 - 1e-12)).sum()))
    text = f"no token was sampled from outside {what}, though {expected:.0f} should have been: the support is truncated"
    return [(p, name, text, mend)]


def ends(truth: Truth) -> Test:
    """Whether responses end as often as the distribution says."""
    stops = [token for token in truth.stop_ids if token < truth.logp_NV.shape[1]]
    chance = truth.logp_NV[:, stops].exp().sum(1)
    hit = torch.isin(truth.token_N, torch.tensor(stops, dtype=torch.int64))
    p = count_p(chance, hit)
    if p >= ALARM:
        return Test(p, None)
    text = (
        f"{int(hit.sum())} end tokens were sampled, {float(chance.sum()):.1f} were to be expected (p={p:.1g}): the "
        "end token is masked (min_tokens, ignore_eos) or favoured"
    )
    return Test(p, Cause("end_masked", text, "min_tokens=0 and no bias on end tokens in the engine's sampling", ENGINE))


def start(truth: Truth) -> Test:
    """Whether responses of one prompt are independent: those that were alike so far part as often as chance has it."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, sample in enumerate(truth.samples):
        groups.setdefault(sample.prompt.ids, []).append(row)
    couples = [pair for rows in groups.values() for pair in zip(rows[::2], rows[1::2], strict=False)]
    along = truth.logp_NV.split(truth.length_B)
    pairs = [(truth.samples[a].ids, truth.samples[b].ids) for a, b in couples]
    chance, hit = agreement([along[a] for a, _ in couples], pairs)
    p = count_p(chance, hit)
    if p >= ALARM or float(hit.sum()) < float(chance.sum()):
        return Test(p, None)
    alike = sum(a == b for a, b in pairs)
    text = (
        f"responses of one prompt are alike far too often (p={p:.1g}; {alike} of {len(pairs)} pairs are the same): "
        "they share their random numbers"
    )
    return Test(p, Cause("shared_seed", text, "each response needs a seed of its own", ENGINE))


def seeds(again: Sequence[Sample], other: Sequence[Sample], base: Sequence[Sample], truth: Truth) -> Test:
    """Whether the same seed gives the same responses, and another one others; ``truth`` begins with ``base``."""
    different = sum(a.ids != b.ids for a, b in zip(again, base, strict=False))
    if different:
        text = f"{different} of {len(again)} responses differ when they are sampled again with the same seed"
        return Test(0.0, Cause("irreproducible", text, "seed every request (Sampling.seed)", ENGINE))
    along = truth.logp_NV.split(truth.length_B)
    count = min(len(base), len(other))
    pairs = [(base[i].ids, other[i].ids) for i in range(count)]
    chance, hit = agreement(along[:count], pairs)
    p = count_p(chance, hit)
    if p >= ALARM or float(hit.sum()) < float(chance.sum()):
        return Test(p, None)
    alike = sum(a == b for a, b in pairs)
    text = f"another seed gives the same responses ({alike} of {count}, p={p:.1g})"
    return Test(p, Cause("seed_ignored", text, "the engine must use the seed of each call (Sampling.seed)", ENGINE))


def structure(samples: Sequence[Sample], stop_ids: Sequence[int], max_tokens: int, version: int) -> list[Cause]:
    """What is wrong with the form of the answers, each fault once."""
    stops, found = set(stop_ids), dict[str, Cause]()

    def wrong(name: str, text: str, mend: str) -> None:
        found.setdefault(name, Cause(name, text, mend, ENGINE))

    for sample in samples:
        name, ids = sample.prompt.problem.id, sample.ids
        if not ids:
            wrong("empty", f"the response to {name} has no token, not even an end token", "keep the end token")
            continue
        if len(sample.logps) != len(ids):
            wrong("length", f"{name}: {len(sample.logps)} log-probs for {len(ids)} tokens", "one log-prob a token")
        if len(ids) > max_tokens:
            wrong("too_long", f"{name}: {len(ids)} tokens, though at most {max_tokens} were asked for", "max_tokens")
        inside = [i for i, token in enumerate(ids[:-1]) if token in stops]
        if inside:
            wrong(
                "end_ignored",
                f"{name} goes on after an end token (token {inside[0] + 1} of {len(ids)})",
                "stop_ids must reach the engine's sampling",
            )
        stopped = ids[-1] in stops
        if sample.finish is Finish.stop and not stopped:
            wrong(
                "end_dropped",
                f"{name} is said to have stopped but its last token ends nothing: the end token and its "
                "log-prob are dropped",
                "keep the end token with its log-prob",
            )
        if sample.finish is Finish.length and stopped:
            wrong("finish", f"{name} ends with an end token but is said to be cut off", "the finish reason")
        if sample.finish is Finish.length and not stopped and len(ids) < max_tokens:
            wrong(
                "cut_short", f"{name} was cut at {len(ids)} of {max_tokens} tokens without an end token", "max_tokens"
            )
        if any(v != version for v in sample.versions) or len(sample.versions) != len(ids):
            wrong(
                "version",
                f"{name}: tokens are labelled with versions {sorted(set(sample.versions))}, the engine has "
                f"version {version}",
                "label each token with the version that sampled it",
            )
    return list(found.values())


def rung(lab: Lab, name: str, compared: str, test: Test, count: int, follows: bool = False) -> Rung:
    """The rung of a test."""
    verdict = Verdict.equal if test.cause is None else Verdict.differs
    return lab.add(
        Rung(
            Section.semantics,
            name,
            compared,
            verdict,
            value=test.p,
            bound=ALARM,
            unit="p-value",
            count=count,
            cause=test.cause,
            follows=follows and test.cause is not None,
        )
    )
