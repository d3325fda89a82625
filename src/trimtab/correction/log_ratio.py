"""The log-ratio numerator minus rollout on the tokens that count, with missing and infinite ones told apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Callable, Hashable, Iterator

import numpy as np
import torch
from torch import Tensor

from trimtab.correction.rows import Array, Rows, room
from trimtab.errors import DataError
from trimtab.stat import Extremes

WEIGHT_LIMIT = 1e140
"""Largest weight in a metric: any batch of their squares still adds up to a float64."""


@dataclass(frozen=True)
class LogRatio:
    """d = numerator - rollout at the M tokens whose mask is set, in nats, in the inputs' dtype.

    ``log_ratio_M`` is 0 where the rollout log-prob is missing, +-inf where catastrophic, never NaN.
    ``at_M`` holds the tokens' flat positions among ``tokens`` N, None if they are all there.
    ``missing_M`` and ``infinite_M`` are None when there are none. ``device``: where the caller's tensors lie.
    What several corrections of one pair of policies have in common is computed once, when first asked for.
    """

    rows: Rows
    tokens: int
    at_M: Tensor | None
    numerator_M: Tensor
    log_ratio_M: Tensor
    rollout_M: Tensor
    device: torch.device
    missing_M: Tensor | None = None
    infinite_M: Tensor | None = None
    _cache: dict[Hashable, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """``make()``, kept under ``key`` for whoever asks next."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    @cached_property
    def sum_B(self) -> Tensor:
        """Σd of each row, float64; an undefined one (inf - inf) counts as -inf."""
        sum_B = self.rows.sum(self.log_ratio_M)
        return sum_B.where(~sum_B.isnan(), -torch.inf)

    @cached_property
    def extremes(self) -> Extremes:
        """Smallest and largest d of a token."""
        if not self.rows.tokens:
            return Extremes()
        low, high = self.log_ratio_M.aminmax()
        return Extremes(float(low), float(high))

    @cached_property
    def infinite_B(self) -> Tensor | None:
        """Whether a token of the row has an infinite d; None when none has."""
        return None if self.infinite_M is None else self.rows.sum(self.infinite_M) > 0

    @cached_property
    def ratio_M(self) -> Tensor:
        """exp(d) of each token, not clamped (it may be inf)."""
        return torch.exp(self.log_ratio_M, out=room(self.log_ratio_M))

    @cached_property
    def ratio_range(self) -> tuple[float, float]:
        """Smallest and largest exp(d) of a token; (1, 1) of no token."""
        if not self.rows.tokens:
            return 1.0, 1.0
        low, high = self.ratio_M.aminmax()
        return float(low), float(high)

    @cached_property
    def ratio_moments_B(self) -> tuple[Tensor, Tensor]:
        """Row sums of exp(d) and of its square, float64."""
        return moments(self.rows, finite_weight(self.ratio_M) if math.isinf(self.ratio_range[1]) else self.ratio_M)

    def scatter(self, x_M: Tensor, default: float | bool) -> Tensor:
        """Lay values of the M tokens out over all N, ``default`` elsewhere."""
        if self.at_M is None:
            return x_M
        x_N = torch.from_numpy(np.full(self.tokens, default, dtype=x_M.numpy().dtype))
        return x_N.scatter_(0, self.at_M, x_M)

    def finite(self) -> LogRatio:
        """Only the tokens with a finite log-ratio that is not missing: those that mismatch metrics describe."""
        if self.missing_M is None and self.infinite_M is None:
            return self
        scored_M = self.log_ratio_M.isfinite()
        if self.missing_M is not None:
            scored_M &= ~self.missing_M
        return LogRatio(
            rows=Rows(self.rows.sum(scored_M).long()),
            tokens=self.tokens,
            at_M=None,
            numerator_M=self.numerator_M[scored_M],
            log_ratio_M=self.log_ratio_M[scored_M],
            rollout_M=self.rollout_M[scored_M],
            device=self.device,
        )


def moments(rows: Rows, weight_M: Tensor) -> tuple[Tensor, Tensor]:
    """Row sums of finite weights and of their squares, float64."""
    weight = weight_M.numpy()

    def columns(at: slice) -> Iterator[Array]:
        x = weight[at].astype(np.float64)
        yield x
        yield np.square(x, out=x)

    sum_B, squares_B = rows.sums(columns)
    return sum_B, squares_B


def finite_weight(weight_L: Tensor) -> Tensor:
    """Weights whose sums and squares stay finite: at most WEIGHT_LIMIT and the dtype's largest number."""
    return weight_L.clamp(max=min(WEIGHT_LIMIT, torch.finfo(weight_L.dtype).max))


def log_ratio(numerator_logp_N: Tensor, rollout_logp_N: Tensor, mask_N: Tensor, length_B: Tensor) -> LogRatio:
    """Select the masked-in tokens, then subtract; nothing that stands elsewhere is ever computed with.

    For what the arguments hold and the errors raised see ``correct``.
    """
    _check(numerator_logp_N, rollout_logp_N, mask_N, length_B)
    numerator, rollout = _floats(numerator_logp_N, rollout_logp_N)
    device = numerator_logp_N.device
    mask, rows, at = mask_N.detach().cpu().bool(), Rows(length_B.detach().cpu().long()), None
    if not mask.numpy().all():
        at = torch.from_numpy(np.flatnonzero(mask.numpy()))  # several times as fast as torch's nonzero
        rows = Rows(rows.sum(mask).long())
        numerator, rollout = (torch.from_numpy(x.numpy().take(at.numpy())) for x in (numerator, rollout))
    d = torch.sub(numerator, rollout, out=room(numerator))
    if d.sum().isfinite():
        return LogRatio(rows, mask.numel(), at, numerator, d, rollout, device)
    missing = rollout.isnan()
    # a NaN that is not missing is a defect of the numerator or inf - inf: as bad as a token can be, never neutral
    d = d.where(~missing, 0.0).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    infinite = d.isinf()
    return LogRatio(
        rows, mask.numel(), at, numerator, d, rollout, device, _unless_empty(missing), _unless_empty(infinite)
    )


def _unless_empty(flag_M: Tensor) -> Tensor | None:
    return flag_M if flag_M.any() else None


def _floats(*tensors: Tensor) -> list[Tensor]:
    """On the CPU, without gradient, in float64 if any of them is, else in float32."""
    wide = any(t.dtype == torch.float64 for t in tensors)
    return [t.detach().to(device="cpu", dtype=torch.float64 if wide else torch.float32) for t in tensors]


def _check(numerator_logp_N: Tensor, rollout_logp_N: Tensor, mask_N: Tensor, length_B: Tensor) -> None:
    _check_lengths(length_B)
    tokens = int(length_B.sum())
    given = {"numerator_logp_N": numerator_logp_N, "rollout_logp_N": rollout_logp_N, "mask_N": mask_N}
    for name, tensor in given.items():
        if tensor.shape != (tokens,):
            raise DataError(f"{name} has shape {tuple(tensor.shape)}; length_B adds up to {tokens} flat tokens")


def _check_lengths(length_B: Tensor) -> None:
    allowed = "it must give each row's number of tokens, integers from 0 up"
    if length_B.dim() != 1:
        raise DataError(f"length_B has shape {tuple(length_B.shape)}, not (B,); {allowed}")
    counts = not (length_B.is_floating_point() or length_B.is_complex() or length_B.dtype == torch.bool)
    if length_B.numel() and not counts:  # torch.tensor([]), no rows, is a float
        raise DataError(f"length_B is {length_B.dtype} {length_B[:8].tolist()}; {allowed}")
    if length_B.numel() and int(length_B.min()) < 0:
        raise DataError(f"length_B holds {int(length_B.min())} for row {int(length_B.argmin())}; {allowed}")
