"""What else a reported log-prob may be: each reading predicts the figures from the reference's logits alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trimtab.lab.parity.reference import Truth

Predict = Callable[[Truth], Tensor]
LOOK = "the engine's sampler, and what it reports log-probs of"
BETWEEN_ROWS = ("other_prompt",)
FITTED_ON = 256
"""Tokens that a free number is fitted on."""


@dataclass(frozen=True)
class Guess:
    """A reading that predicts [N] log-probs of any ``Truth`` (NaN: nothing is predicted there).

    ``free``: numbers in it were fitted to the data. ``slow``: it asks the reference, row by row, so that a few rows
    may rule it out first.
    """

    name: str
    text: str
    mend: str
    predict: Predict
    free: bool = False
    slow: bool = False


def slowly(guesses: Iterable[Guess]) -> Iterator[Guess]:
    """The guesses, marked as slow; those that compare rows with each other stay as they are."""
    return (replace(guess, slow=guess.name not in BETWEEN_ROWS) for guess in guesses)


# -- temperature ------------------------------------------------------------------------------------------------------


def scaled(temperature: float) -> Predict:
    return lambda truth: truth.own(truth.at(temperature))


def of_temperature(truth: Truth) -> Iterator[Guess]:
    heat = truth.temperature or 1.0
    if heat == 1.0:
        return
    yield Guess(
        "raw_logprobs",
        f"log-probs of T=1 (raw), though tokens are sampled at T={heat:g}",
        "rollout.logprobs_mode=processed",
        scaled(1.0),
    )
    yield Guess(
        "temperature_twice",
        f"the temperature is applied twice (T={heat:g} acts as {heat * heat:.3g})",
        "apply the temperature once: " + LOOK,
        scaled(heat * heat),
    )
    yield Guess(
        "temperature_inverse",
        f"logits are multiplied by T={heat:g} instead of divided",
        "divide the logits by the temperature: " + LOOK,
        scaled(1 / heat),
    )


def fitted(loss: Callable[[float], float], low: float, high: float, rounds: int = 30) -> float:
    """The number in [low, high] (log scale) with the least loss: a grid, then golden sections around its best."""
    a, b = math.log(low), math.log(high)
    grid = [a + (b - a) * i / 24 for i in range(25)]
    best = min(range(25), key=lambda i: loss(math.exp(grid[i])))
    a, b = grid[max(best - 1, 0)], grid[min(best + 1, 24)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(rounds):
        c, d = b - golden * (b - a), a + golden * (b - a)
        if loss(math.exp(c)) < loss(math.exp(d)):
            b = d
        else:
            a = c
    return math.exp((a + b) / 2)


def far(predicted_N: Tensor, told_N: Tensor) -> float:
    """Mean |difference| where both are finite, large ones cut at 1 nat so that some strange tokens don't rule."""
    gap = (predicted_N - told_N).abs()
    gap = gap[gap.isfinite()]
    return float(gap.clamp(max=1.0).mean()) if len(gap) else math.inf


def _off_most(truth: Truth, told_N: Tensor) -> list[int]:
    """Rows to fit a number on, FITTED_ON tokens: the first ones, or where few rows are off those alone."""
    gap_N = (told_N - truth.logp_N).abs().nan_to_num(0.0)
    largest = [float(gap.max()) if len(gap) else 0.0 for gap in truth.rows(gap_N)]
    off = [row for row, gap in enumerate(largest) if gap >= 1e-3 * max(largest)]
    chosen = list[int]()
    tokens = 0
    for row in off:
        if chosen and tokens + truth.length_B[row] > FITTED_ON:
            break
        chosen.append(row)
        tokens += truth.length_B[row]
    return chosen


def of_numbers(truth: Truth, told_N: Tensor) -> Iterator[Guess]:
    """Readings with a number fitted to the data."""
    rows = _off_most(truth, told_N)
    small, told = truth.pick(rows), told_N[truth.tokens_of(rows)]
    heat = truth.temperature or 1.0
    found = fitted(lambda t: far(scaled(t)(small), told), 0.05, 20.0)
    yield Guess(
        "temperature",
        f"log-probs of temperature {found:.3g}, not of T={heat:g}",
        "one temperature for sampling and scoring: rollout.temperature (mismatch=none)",
        scaled(found),
        True,
    )
    cap = fitted(lambda c: far(capped(c)(small), told), 1.0, 200.0)
    yield Guess(
        "softcap",
        f"logits are capped: {cap:.3g} tanh(logit / {cap:.3g}), which the model's configuration does not ask for",
        "final_logit_softcapping: as the model's configuration says, on both sides",
        capped(cap),
        True,
    )
    kept = told.isfinite() & small.logp_N.isfinite()
    x, y = small.logp_N[kept], told[kept]
    if len(x) >= 3 and float(x.square().sum()) > 0:
        factor = float((x * y).sum() / x.square().sum())
        base = next(
            (
                f" ({text})"
                for value, text in (
                    (1 / math.log(2), "logarithm to base 2"),
                    (1 / math.log(10), "logarithm to base 10"),
                    (-1.0, "the sign is turned"),
                )
                if abs(factor - value) < 1e-3
            ),
            "",
        )
        yield Guess(
            "scaled",
            f"every log-prob is multiplied by {factor:.4g}{base}",
            "report natural log-probs: " + LOOK,
            lambda t: factor * t.logp_N,
            True,
        )
        offset = float((y - x).median())
        yield Guess(
            "offset",
            f"a constant {offset:+.4g} is added to every log-prob",
            "the log-softmax's normaliser: " + LOOK,
            lambda t: t.logp_N + offset,
            True,
        )
        yield from _clipped(y)


def capped(cap: float) -> Predict:
    """Log-probs of logits that are capped softly."""

    def predict(t: Truth) -> Tensor:
        logits = cap * torch.tanh(t.logits_NV.double() / cap)
        return t.own(torch.log_softmax(logits / (t.temperature or 1.0), -1))

    return predict


def _clipped(y: Tensor) -> Iterator[Guess]:
    floor = float(y.min())
    if int((y == floor).sum()) > 1:
        yield Guess(
            "clipped",
            f"log-probs are cut off at {floor:.4g}",
            "do not clip log-probs: " + LOOK,
            lambda t: t.logp_N.clamp(min=floor),
            True,
        )
    top = float(y.max())
    if int((y == top).sum()) > 1 and top < 0:
        yield Guess(
            "clipped",
            f"log-probs are never above {top:.4g}",
            "do not clip log-probs: " + LOOK,
            lambda t: t.logp_N.clamp(max=top),
            True,
        )


# -- where, and which token -------------------------------------------------------------------------------------------


def moved(values_N: Tensor, truth: Truth, by: int, fill: float = math.nan) -> Tensor:
    """Entry i of each row takes the value that stood at i + by."""
    made = []
    for row in truth.rows(values_N):
        out = torch.full_like(row, fill)
        if 0 < by < len(row):
            out[:-by] = row[by:]
        elif 0 < -by < len(row):
            out[-by:] = row[:by]
        made.append(out)
    return torch.cat(made) if made else values_N


def per_row(change: Callable[[Tensor], Tensor]) -> Predict:
    def predict(truth: Truth) -> Tensor:
        return torch.cat([change(row) for row in truth.rows(truth.logp_N)]) if truth.samples else truth.logp_N

    return predict


def _shift(by: int) -> Predict:
    return lambda truth: moved(truth.logp_N, truth, by)


def _neighbour(by: int) -> Predict:
    """The log-probs of the response ``by`` rows on, as far as it goes."""

    def predict(truth: Truth) -> Tensor:
        rows, made = truth.rows(truth.logp_N), []
        for i, row in enumerate(rows):
            other = rows[(i + by) % len(rows)]
            out = torch.full_like(row, math.nan)
            n = min(len(row), len(other))
            out[:n] = other[:n]
            made.append(out)
        return torch.cat(made)

    return predict


def _owner(told_N: Tensor) -> Predict:
    """The log-probs of whichever response of the batch comes closest to what is told of a row."""

    def predict(truth: Truth) -> Tensor:
        if len(told_N) != len(truth.logp_N):
            return truth.logp_N
        rows, made = truth.rows(truth.logp_N), []
        for told, row in zip(truth.rows(told_N), rows, strict=True):
            fits = [other[: len(row)] for other in rows if len(other) >= len(row) > 0]
            made.append(min(fits, key=lambda other: float((told - other).abs().sum()), default=row))
        return torch.cat(made)

    return predict


def of_place(truth: Truth, told_N: Tensor) -> Iterator[Guess]:
    mend = "align log-probs and tokens (mismatch=none): entry i must be of response token i"
    for by in (1, -1, 2, -2):
        whose = "next" if by > 0 else "previous"
        yield Guess(
            "shift",
            f"log-probs are shifted: each is that of the {whose} token"
            f"{'' if abs(by) == 1 else f' but {abs(by) - 1}'} ({by:+d})",
            mend,
            _shift(by),
        )
    yield Guess("reversed", "log-probs stand in reverse order", mend, per_row(lambda row: row.flip(0)))
    yield Guess("cumulative", "log-probs are summed up along the response", mend, per_row(lambda row: row.cumsum(0)))
    yield Guess(
        "row_mean",
        "each token has its response's mean log-prob",
        mend,
        per_row(lambda row: row.mean().expand(len(row)) if len(row) else row),
    )
    yield Guess(
        "length_normalised",
        "log-probs are divided by the response's length",
        mend,
        per_row(lambda row: row / max(len(row), 1)),
    )
    if len(truth.samples) > 1:
        text, mend = "log-probs belong to another response of the batch", "keep requests and answers in one order"
        for by in (1, -1):
            yield Guess("other_response", text, mend, _neighbour(by))
        yield Guess("other_response", text, mend, _owner(told_N), True)


def of_value() -> Iterator[Guess]:
    mend = "report the log-prob of the sampled token: " + LOOK
    yield Guess("probability", "probabilities are reported, not their logarithms", mend, lambda t: t.logp_N.exp())
    yield Guess(
        "logit",
        "logits are reported, not log-probs",
        "rollout.logprobs_mode=processed",
        lambda t: t.own(t.logits_NV.double()),
    )
    yield Guess(
        "logit",
        "logits over the temperature are reported, not log-probs",
        "rollout.logprobs_mode=processed",
        lambda t: t.own(t.logits_NV.double()) / (t.temperature or 1.0),
    )
    yield Guess(
        "entropy",
        "minus the entropy is reported",
        mend,
        lambda t: torch.special.xlogy(t.logp_NV.exp(), t.logp_NV.exp()).sum(1),
    )
    yield Guess(
        "most_likely",
        "the log-prob of the most likely token is reported, not of the sampled one",
        mend,
        lambda t: t.logp_NV.max(1).values,
    )
    yield Guess(
        "zeros",
        "0 (probability 1) stands in place of a log-prob",
        "a log-prob that is missing must stay NaN, never 0",
        lambda t: torch.zeros_like(t.logp_N),
    )


# -- low precision ----------------------------------------------------------------------------------------------------

KINDS = ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"))


def _rounded_logits(dtype: torch.dtype) -> Predict:
    def predict(t: Truth) -> Tensor:
        logits = (t.logits_NV.to(dtype).float() / (t.temperature or 1.0)).double()
        return t.own(torch.log_softmax(logits, -1))

    return predict


def _low_softmax(dtype: torch.dtype) -> Predict:
    return lambda t: t.own(torch.log_softmax((t.logits_NV / (t.temperature or 1.0)).to(dtype), -1).double())


def _rounded_values(dtype: torch.dtype) -> Predict:
    return lambda t: t.logp_N.to(dtype).double()


def of_rounding() -> Iterator[Guess]:
    for dtype, name in KINDS:
        yield Guess(
            "log_softmax_dtype",
            f"the log-softmax is computed in {name}",
            "compute the log-softmax in float32",
            _low_softmax(dtype),
        )
        yield Guess(
            "logits_dtype",
            f"logits are rounded to {name} before the log-softmax",
            "an fp32 head: rollout.fp32_head=true (engine), policy.fp32_head=true (trainer)",
            _rounded_logits(dtype),
        )
        yield Guess(
            "rounded_values",
            f"log-probs are rounded to {name} after they were computed",
            "keep log-probs in float32 on their way",
            _rounded_values(dtype),
        )
    for digits in (1, 2, 3):
        yield Guess(
            "rounded_values",
            f"log-probs are rounded to {digits} decimals",
            "keep log-probs in float32 on their way",
            _decimals(digits),
        )


def _decimals(digits: int) -> Predict:
    return lambda t: t.logp_N.mul(10**digits).round() / 10**digits
