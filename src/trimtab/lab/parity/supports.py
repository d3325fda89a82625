"""Readings in which some tokens are cut off, masked or penalised before the log-softmax."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from trimtab.lab.parity.readings import Guess, Predict, far, fitted
from trimtab.lab.parity.reference import Truth

# -- truncated support ------------------------------------------------------------------------------------------------


def nucleus(p: float) -> Predict:
    """Log-prob over the smallest set of likeliest tokens whose mass reaches p; -inf outside."""

    def predict(t: Truth) -> Tensor:
        ordered = t.logp_NV.exp().sort(1, descending=True).values
        mass = ordered.cumsum(1)
        last = (mass < p).sum(1).clamp(max=mass.shape[1] - 1)
        kept = mass.gather(1, last[:, None])[:, 0]
        least = ordered.gather(1, last[:, None])[:, 0]
        inside = t.logp_N >= least.log() - 1e-9
        return torch.where(inside, t.logp_N - kept.log(), -math.inf)

    return predict


def best(k: int) -> Predict:
    """Log-prob over the k likeliest tokens."""

    def predict(t: Truth) -> Tensor:
        top = t.logp_NV.topk(min(k, t.logp_NV.shape[1]), 1).values
        return torch.where(t.logp_N >= top[:, -1] - 1e-9, t.logp_N - torch.logsumexp(top, 1), -math.inf)

    return predict


def relative(share: float) -> Predict:
    """Log-prob over tokens that are at least ``share`` as likely as the likeliest."""

    def predict(t: Truth) -> Tensor:
        least = t.logp_NV.max(1).values + math.log(share)
        kept = torch.where(t.logp_NV >= least[:, None], t.logp_NV, -math.inf)
        return torch.where(t.logp_N >= least - 1e-9, t.logp_N - torch.logsumexp(kept, 1), -math.inf)

    return predict


def of_support(truth: Truth, told_N: Tensor) -> Iterator[Guess]:
    """Top-p, top-k, min-p: the support that is renormalised, with the number that fits best."""
    more = told_N - truth.logp_N
    off = more[more.isfinite() & (more > 1e-5)]
    if len(off) < 2:
        return
    say = "the engine samples from a truncated support and renormalises; the trainer scores the whole vocabulary"
    smallest = math.exp(-float(off.max()))  # the kept mass is p or more, hardly more where tokens are many
    tried = {*(math.floor(smallest * 10**d) / 10**d for d in (1, 2, 3)), smallest - 1e-9, 0.8, 0.9, 0.95, 0.99}
    p = min((x for x in tried if 0 < x < 1), key=lambda x: far(nucleus(x)(truth), told_N))
    yield Guess("top_p", f"top-p {p:.3g}: {say}", "rollout.top_p=1 (mismatch=none)", nucleus(p), True)
    ks = [k for k in (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40, 50, 64, 100, 128, 200) if k < truth.logp_NV.shape[1]]
    k = min(ks, key=lambda k: far(best(k)(truth), told_N))
    yield Guess("top_k", f"top-k {k}: {say}", "rollout.top_k=0", best(k), True)
    shares = (0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5)
    share = min(shares, key=lambda x: far(relative(x)(truth), told_N))
    yield Guess("min_p", f"min-p {share:g}: {say}", "min_p=0 in the engine's sampling", relative(share), True)


# -- tokens that may not be, penalties -----------------------------------------------------------------------------


def without(tokens: tuple[int, ...], places: int | None = None) -> Predict:
    """Log-prob when ``tokens`` are masked, at the first ``places`` of each response or everywhere."""

    def predict(t: Truth) -> Tensor:
        banned = t.logp_NV[:, list(tokens)].exp().sum(1).clamp(max=1 - 1e-12)
        here = torch.ones(len(banned), dtype=torch.bool) if places is None else t.place_N < places
        return torch.where(here, t.logp_N - torch.log1p(-banned), t.logp_N)

    return predict


def of_ends(truth: Truth, told_N: Tensor) -> Iterator[Guess]:
    """Masked end tokens (min_tokens), or any other masked token."""
    stops = tuple(token for token in truth.stop_ids if token < truth.logp_NV.shape[1])
    more = told_N - truth.logp_N
    off = more.isfinite() & (more > 1e-5)
    mend = "min_tokens=0, no bias on tokens and none banned in the engine's sampling"
    if bool(off.any()):
        yield from _masked(truth, more, off, stops, mend)
    yield from _favoured(truth, told_N, mend)


def _masked(truth: Truth, more: Tensor, off: Tensor, stops: tuple[int, ...], mend: str) -> Iterator[Guess]:
    last = int(truth.place_N[off].max()) + 1
    for these in (stops, *((token,) for token in stops)):
        if these:
            yield Guess(
                "end_masked",
                f"the end token is masked for the first {last} tokens (min_tokens), and what is left renormalised",
                mend,
                without(these, last),
                True,
            )
            yield Guess("end_masked", "the end token is masked, and what is left renormalised", mend, without(these))
    lost_N = -torch.expm1(-more[off])
    token = int((truth.logp_NV[off].exp() - lost_N[:, None]).abs().sum(0).argmin())
    yield Guess(
        "token_masked", f"token {token} is masked, and what is left renormalised", mend, without((token,)), True
    )


def biased(tokens: tuple[int, ...], bias: float) -> Predict:
    """Log-prob when ``bias`` is added to the logits of ``tokens``."""

    def predict(t: Truth) -> Tensor:
        share = t.logp_NV[:, list(tokens)].exp().sum(1)
        own = torch.isin(t.token_N, torch.tensor(tokens, dtype=torch.int64))
        more = math.expm1(bias / (t.temperature or 1.0))
        return t.logp_N + own * bias / (t.temperature or 1.0) - torch.log1p(share * more)

    return predict


def _favoured(truth: Truth, told_N: Tensor, mend: str) -> Iterator[Guess]:
    """A bias on the logits of the end tokens, or of the token whose probability the difference follows most closely."""
    gap_N = (told_N - truth.logp_N).nan_to_num(0.0).clamp(-5, 5)
    p_NV = truth.logp_NV.exp()
    along_V = (gap_N @ p_NV - _own_gap(truth, gap_N)).square() / p_NV.square().sum(0).clamp(min=1e-12)
    stops = tuple(token for token in truth.stop_ids if token < p_NV.shape[1])
    for tokens in dict.fromkeys((stops, (int(along_V.argmax()),))):
        if not tokens:
            continue
        bias = _fitted_bias(truth, told_N, tokens)
        what = "the end token" if tokens == stops else f"token {tokens[0]}"
        text = f"the logit of {what} is raised by {bias:+.3g}"
        yield Guess("logit_bias", text, mend, biased(tokens, bias), True)


def _fitted_bias(truth: Truth, told_N: Tensor, tokens: tuple[int, ...]) -> float:
    def loss(bias: float) -> float:
        return far(biased(tokens, bias)(truth), told_N)

    return min((fitted(loss, 0.01, 20.0), -fitted(lambda bias: loss(-bias), 0.01, 20.0)), key=loss)


def _own_gap(truth: Truth, gap_N: Tensor) -> Tensor:
    """[V]: the part of ``gap_N @ p_NV`` that is of each token's own positions, where a bias adds instead."""
    own = gap_N * truth.logp_N.exp()
    return torch.zeros(truth.logp_NV.shape[1], dtype=torch.float64).index_add_(0, truth.token_N, own)


def _seen(t: Truth, prompts: bool) -> Iterator[list[int]]:
    for sample in t.samples:
        for i in range(len(sample.ids)):
            yield [*(sample.prompt.ids if prompts else ()), *sample.ids[:i]]


def repetition(theta: float) -> Predict:
    """Logits of tokens seen in prompt or response: divided by theta if positive, else multiplied."""

    def predict(t: Truth) -> Tensor:
        logits = t.logits_NV.double().clone()
        for n, seen in enumerate(_seen(t, True)):
            at = torch.tensor(sorted(set(seen)), dtype=torch.int64)
            logits[n, at] = torch.where(logits[n, at] > 0, logits[n, at] / theta, logits[n, at] * theta)
        return t.own(torch.log_softmax(logits / (t.temperature or 1.0), -1))

    return predict


def frequency(alpha: float, presence: bool) -> Predict:
    """Logits of tokens of the response so far, lowered by alpha: once, or for each time."""

    def predict(t: Truth) -> Tensor:
        logits = t.logits_NV.double().clone()
        for n, seen in enumerate(_seen(t, False)):
            ids = sorted(set(seen)) if presence else seen
            logits[n].index_add_(0, torch.tensor(ids, dtype=torch.int64), -alpha * torch.ones(len(ids)).double())
        return t.own(torch.log_softmax(logits / (t.temperature or 1.0), -1))

    return predict


def of_penalties(truth: Truth, told_N: Tensor) -> Iterator[Guess]:
    small = truth.few(max(1, int((torch.tensor(truth.length_B).cumsum(0) <= 64).sum())))
    told = told_N[: len(small.token_N)]
    if far(truth.logp_N[: len(told)], told) < 1e-6:
        small, told = truth, told_N
    theta = fitted(lambda x: far(repetition(x)(small), told), 0.5, 2.0, 24)
    yield Guess(
        "repetition_penalty",
        f"a repetition penalty of {theta:.3g} is in the log-probs",
        "repetition_penalty=1 in the engine's sampling",
        repetition(theta),
        True,
    )
    for presence, name in ((True, "presence"), (False, "frequency")):
        alpha = fitted(lambda x: far(frequency(x, presence)(small), told), 0.01, 5.0, 24)  # noqa: B023
        yield Guess(
            f"{name}_penalty",
            f"a {name} penalty of {alpha:.3g} is in the log-probs",
            f"{name}_penalty=0 in the engine's sampling",
            frequency(alpha, presence),
            True,
        )
