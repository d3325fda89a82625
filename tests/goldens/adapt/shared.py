"""What all adapters share: a case's lists as flat tensors, and what trimtab says, named as the case names it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor

from trimtab.method import Coefficients, Inputs, Result, evaluate, token_gradient
from trimtab.objective.aggregate import Counts
from trimtab.spec import Level, MethodSpec, OverTokens, Pair, RejectSpec, Sign, Statistic

E = TypeVar("E", bound=Enum)


class Untranslated(Exception):
    """The adapter, not trimtab, doesn't know what a case asks for: a failure, never a refusal that a case expects."""


@dataclass(frozen=True)
class Case:
    """One golden file."""

    data: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.data['system']}/{self.data['case']}"

    @property
    def system(self) -> str:
        return self.data["system"]

    @property
    def function(self) -> str:
        return self.data["function"]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.data["config"]

    @property
    def outputs(self) -> Mapping[str, Any]:
        return self.data["outputs"]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.data["dtype"].startswith("float32") else torch.float64

    def has(self, key: str) -> bool:
        return self.data["inputs"].get(key) is not None

    def raw(self, key: str) -> Any:
        return self.data["inputs"][key]

    def numbers(self, key: str) -> Tensor:
        return flat(self.raw(key), self.dtype)

    def some(self, key: str) -> Tensor | None:
        return self.numbers(key) if self.has(key) else None

    def flags(self, key: str) -> Tensor:
        return self.numbers(key) != 0


@dataclass(frozen=True)
class Layout:
    """Rows laid flat."""

    row_N: Tensor
    length_B: Tensor

    @property
    def rows(self) -> int:
        return len(self.length_B)

    def per_row(self, token_N: Tensor, valid_N: Tensor) -> Tensor:
        """One number a row, of numbers that are the same at all valid tokens of it; 0 for a row without any."""
        row_M, token_M = self.row_N[valid_N], token_N[valid_N]
        value_B = torch.zeros(self.rows, dtype=token_N.dtype)
        value_B[row_M] = token_M
        if not torch.equal(value_B[row_M], token_M):
            raise Untranslated("trimtab has one advantage for each row; these differ from token to token")
        return value_B


def layout(rows: list[list[Any]]) -> Layout:
    """Of rows given as lists, padded or ragged."""
    return layout_of(torch.tensor([len(row) for row in rows]))


def layout_of(length_B: Tensor) -> Layout:
    return Layout(torch.repeat_interleave(torch.arange(len(length_B)), length_B), length_B)


def leaves(value: Any) -> Iterator[float]:
    """The numbers of nested lists, in order; "nan", "inf" and "-inf" are numbers, too."""
    if isinstance(value, list):
        for one in value:
            yield from leaves(one)
    else:
        yield float(value)


def flat(value: Any, dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(leaves(value)), dtype=torch.float64).to(dtype)


def choice(kind: type[E], name: str) -> E:
    """The member of one of trimtab's options, by the name it is typed as."""
    if name not in kind.__members__:
        raise Untranslated(f"trimtab's {kind.__name__} has no {name}; it has {', '.join(kind.__members__)}")
    return kind[name]


def number(value: Any) -> float:
    """A number of a config, which may stand there as text."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except ValueError as error:
        raise Untranslated(f"{value!r} is no number") from error


def off_policy_mask(delta: float, pair: Pair) -> RejectSpec:
    """Leaves out responses with A < 0 and mean(denominator - numerator) > delta."""
    return RejectSpec(
        Statistic.k1, Level.sequence, OverTokens.mean, None, delta, inverse=True, sign=Sign.negative, pair=pair
    )


@dataclass(frozen=True)
class Said:
    """What trimtab says for one entry of a case's outputs.

    ``path``: the keys that lead to it. ``where``: which of its numbers are compared (others are padding). ``row_N``:
    the case gives one number a row where trimtab gives one a token. ``absent``: what null in the case stands for;
    without, null says nothing. ``scale``: of a sum, the size of what is summed, to which its rounding is relative.
    """

    path: tuple[str, ...]
    value: Tensor | float
    where: Tensor | None = None
    row_N: Tensor | None = None
    absent: float | None = None
    scale: float = 0.0


def metrics(found: Mapping[str, Any], *path: str, where: Tensor | None = None) -> list[Said]:
    return [Said((*path, name), value, where=where) for name, value in found.items()]


def ratio_inputs(
    case: Case, numerator: str, rollout: str, valid_N: Tensor, lay: Layout, advantage_B: Tensor | None = None
) -> Inputs:
    """Of a correction without a loss: the numerator takes the place of the proximal policy, and of the current one."""
    numerator_N = case.numbers(numerator)
    return Inputs(
        current_N=numerator_N,
        rollout_N=case.numbers(rollout),
        valid_N=valid_N,
        row_N=lay.row_N,
        length_B=lay.length_B,
        advantage_B=torch.zeros(lay.rows, dtype=case.dtype) if advantage_B is None else advantage_B,
        proximal_N=numerator_N,
    )


def total(result: Result) -> Said:
    """The loss; it is a sum over tokens, as large as its terms before they cancel."""
    terms_N = result.coefficients.policy_N * result.surrogate.loss_N.detach()
    return Said(("loss",), result.loss.total.detach(), scale=float(terms_N.abs().sum()))


def loss(
    method: MethodSpec,
    inputs: Inputs,
    gradient: str,
    *,
    totals: Counts | None = None,
    given: Coefficients | None = None,
) -> tuple[Result, list[Said]]:
    """The loss and its gradient by the log-probs."""
    result = evaluate(method, inputs, totals=totals, given=given)
    gradient_N = token_gradient(method, inputs, totals=totals, given=given)
    return result, [
        total(result),
        Said((gradient,), gradient_N, absent=0.0),
    ]
