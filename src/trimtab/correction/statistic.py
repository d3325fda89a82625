"""What a rejection rule bounds: a statistic of the log-ratio, of a token or of a row's tokens taken together.

x is the token's d = numerator - denominator, or -d (``inverse``), brought to ±clamp if there is one. Values come in
the inputs' dtype, in which they are compared with bounds: what rounds to a bound is inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab.correction.log_ratio import LogRatio
from trimtab.correction.rows import Array
from trimtab.spec import OverTokens, Statistic


@dataclass(frozen=True)
class Quantity:
    """A statistic of x. Over tokens, a ratio's logs are aggregated (a product, a geometric mean), others' values."""

    statistic: Statistic
    inverse: bool = False
    clamp: float | None = None

    def on(self, given: LogRatio) -> Quantity:
        """The same without a clamp that bites nowhere, so that rules share what they compute."""
        bites = self.clamp is not None and given.extremes.magnitude > self.clamp
        return self if bites or self.clamp is None else Quantity(self.statistic, self.inverse)


def formula(statistic: Statistic, x: Array) -> Array:
    """ratio e^x; k1 x; k2 x²/2; k3 e^x - 1 - x; abs |x|; mult_error e^|x|. Float64 in and out; +-inf allowed."""
    value: Array
    with np.errstate(over="ignore"):
        match statistic:
            case Statistic.ratio:
                value = np.exp(x)
            case Statistic.k1:
                value = x
            case Statistic.k2:
                value = x * x / 2
            case Statistic.k3:
                value = np.expm1(x) - np.minimum(x, np.finfo(np.float64).max)  # inf - inf would be a NaN
            case Statistic.abs:
                value = np.abs(x)
            case Statistic.mult_error:
                value = np.exp(np.abs(x))
            case Statistic.prob_diff:
                raise AssertionError("a difference of probabilities is no function of their ratio")
    return value


def token_value(given: LogRatio, quantity: Quantity) -> Tensor:
    """The statistic of each token [M], in the inputs' dtype.

    prob_diff is e^numerator - e^denominator (negated if ``inverse``), 0 for a missing token. A log-prob of -inf is a
    probability of 0, so the difference is finite where d is not; where it has no finite value it is -inf (before
    inverting), never a NaN.
    """
    quantity = quantity.on(given)
    return given.once(quantity, lambda: _token_value(given, quantity))


def row_value(given: LogRatio, quantity: Quantity, over: OverTokens) -> Tensor:
    """The tokens' statistic taken together [B], in the inputs' dtype.

    ratio: exp of the sum, mean or largest of the x; others: sum, mean or largest of the tokens' values (``every``: the
    largest, too). A missing token has x = 0 and is one of the row's; an empty row has a sum and a mean of 0.
    """
    quantity, dtype = quantity.on(given), given.log_ratio_M.dtype
    match over:
        case OverTokens.sum | OverTokens.mean:
            total_B = given.once((quantity, "sum"), lambda: _row_sum(given, quantity))
            value_B = total_B if over is OverTokens.sum else given.rows.per_token(total_B)
            return (value_B.exp() if quantity.statistic is Statistic.ratio else value_B).to(dtype)
        case OverTokens.max | OverTokens.every:
            highest_B = given.rows.highest(token_value(given, quantity))
            return highest_B.where(given.rows.filled_B, _neutral(quantity.statistic))


def row_extremes(given: LogRatio, quantity: Quantity, lower: float, upper: float) -> tuple[Tensor, Tensor]:
    """The smallest and the largest statistic of each row's tokens [B]; a missing one is put inside the bounds."""
    value_M, rows = token_value(given, quantity), given.rows
    inside = min(max(_neutral(quantity.statistic), lower), upper)
    if given.missing_M is not None:
        value_M = value_M.where(~given.missing_M, inside)
    lowest_B, highest_B = (x_B.where(rows.filled_B, inside) for x_B in (rows.lowest(value_M), rows.highest(value_M)))
    return lowest_B, highest_B


def infinite_tokens(given: LogRatio, quantity: Quantity) -> Tensor | None:
    """Tokens that are never inside a rule's bounds: an infinite d, or a prob_diff without a finite value."""
    if quantity.statistic is not Statistic.prob_diff:
        return given.infinite_M
    infinite_M = token_value(given, quantity).isinf()
    return infinite_M if infinite_M.any() else None


def infinite_rows(given: LogRatio, quantity: Quantity) -> Tensor | None:
    """Rows that hold such a token; None when none does."""
    if quantity.statistic is not Statistic.prob_diff:
        return given.infinite_B
    infinite_M = infinite_tokens(given, quantity)
    return None if infinite_M is None else given.rows.sum(infinite_M) > 0


def _neutral(statistic: Statistic) -> float:
    """The value at x = 0."""
    return 1.0 if statistic in (Statistic.ratio, Statistic.mult_error) else 0.0


def _x(quantity: Quantity, d: Array) -> Array:
    x = -d if quantity.inverse else d
    return x if quantity.clamp is None else np.clip(x, -quantity.clamp, quantity.clamp)


def _token_value(given: LogRatio, quantity: Quantity) -> Tensor:
    d = given.log_ratio_M.numpy()
    match quantity.statistic:
        case Statistic.prob_diff:
            return _prob_diff(given, quantity.inverse)
        case Statistic.ratio:  # in the inputs' dtype, as a weight is
            return torch.from_numpy(_x(quantity, d)).exp() if quantity != Quantity(Statistic.ratio) else given.ratio_M
        case Statistic.k1:
            return torch.from_numpy(_x(quantity, d))
        case _:
            value = np.empty_like(d)
            with np.errstate(over="ignore"):  # beyond a float32, or a float64, is inf
                for at, _ in given.rows.blocks:
                    value[at] = formula(quantity.statistic, _x(quantity, d[at]).astype(np.float64))
            return torch.from_numpy(value)


def _row_sum(given: LogRatio, quantity: Quantity) -> Tensor:
    """Σ over each row of what is aggregated, float64 [B]; an undefined one counts as -inf before inverting."""
    match quantity.statistic:
        case Statistic.ratio | Statistic.k1 if quantity.clamp is None:
            return -given.sum_B if quantity.inverse else given.sum_B
        case Statistic.prob_diff:
            sum_B = given.rows.sum(token_value(given, quantity))
            return sum_B.where(~sum_B.isnan(), math.inf if quantity.inverse else -math.inf)
        case _:
            d = given.log_ratio_M.numpy()
            summed = Statistic.k1 if quantity.statistic is Statistic.ratio else quantity.statistic

            def columns(at: slice) -> Iterator[Array]:
                yield formula(summed, _x(quantity, d[at].astype(np.float64)))

            return given.rows.sums(columns, heavy=summed in (Statistic.k3, Statistic.mult_error))[0]


def _prob_diff(given: LogRatio, inverse: bool) -> Tensor:
    numerator, rollout = given.numerator_M.numpy(), given.rollout_M.numpy()
    value = np.empty_like(numerator)
    with np.errstate(over="ignore", invalid="ignore"):
        for at, _ in given.rows.blocks:
            value[at] = np.exp(numerator[at].astype(np.float64)) - np.exp(rollout[at].astype(np.float64))
    diff_M = torch.from_numpy(value).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if given.missing_M is not None:
        diff_M = diff_M.where(~given.missing_M, 0.0)
    return -diff_M if inverse else diff_M
