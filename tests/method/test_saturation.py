"""Without clamps no catastrophic token makes a loss or a gradient infinite: it is rejected, or it saturates."""

from __future__ import annotations

import math

import pytest
import torch

from trimtab.method import Inputs, evaluate, token_gradient
from trimtab.spec import (
    Algo,
    AlgoSpec,
    KlEstimator,
    KlImportance,
    Level,
    LossName,
    LossSpec,
    MethodSpec,
    MisSpec,
    RatioLevel,
    TisMode,
)

INF = math.inf
UNBOUNDED = MisSpec(tis_mode=TisMode.unbounded, log_ratio_clamp=None)
LIMIT = {torch.float32: 78.7228390520, torch.float64: 699.782712893384}


def batch(current: list[float], proximal: list[float], rollout: list[float], dtype: torch.dtype) -> Inputs:
    """Rows of two tokens; the first row has a negative advantage."""
    rows = len(current) // 2
    return Inputs(
        current_N=torch.tensor(current, dtype=dtype),
        proximal_N=torch.tensor(proximal, dtype=dtype),
        rollout_N=torch.tensor(rollout, dtype=dtype),
        reference_N=torch.tensor(rollout, dtype=dtype).clamp(min=-50.0),
        valid_N=torch.ones(2 * rows, dtype=torch.bool),
        row_N=torch.arange(rows).repeat_interleave(2),
        length_B=torch.full((rows,), 2),
        advantage_B=torch.tensor([-1.0, 0.5][:rows], dtype=dtype),
    )


HUGE = {
    "weight": ([-1.0, -1, -1, -1], [-1.0, -1, -1, -1], [-2000.0, -1, -INF, -1]),
    "ratio": ([-1.0, -1, -1, -1], [-2000.0, -1, -INF, -1], [-2000.0, -1, -1e30, -1]),
    "product": ([-1.0, -1, -1, -1], [-2000.0, -1, -900, -1], [-4000.0, -1, -1800, -1]),
}


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("name", [name for name in LossName if name is not LossName.vespo])
@pytest.mark.parametrize("huge", HUGE)
def test_losses_and_gradients_are_finite(huge: str, name: LossName, dtype: torch.dtype) -> None:
    inputs = batch(*HUGE[huge], dtype)
    for level in RatioLevel:
        for tis_level in (Level.token, Level.sequence):
            mis = MisSpec(tis_mode=TisMode.unbounded, tis_level=tis_level, log_ratio_clamp=None)
            spec = LossSpec(
                name=name, ratio_level=level, log_ratio_clamp=None, log_ratio_penalty=0.01, kl_coef=0.1,
                kl_clamp=10.0, kl_importance=KlImportance.rollout,
            )  # fmt: skip
            method = MethodSpec(AlgoSpec(Algo.decoupled), mis, spec)
            result = evaluate(method, inputs)
            assert result.applied.weight_N.isfinite().all()
            assert result.loss.total.isfinite(), (level, tis_level)
            assert token_gradient(method, inputs).isfinite().all(), (level, tis_level)


@pytest.mark.parametrize("dtype", LIMIT)
def test_values_where_it_saturates(dtype: torch.dtype) -> None:
    """A weight of e^limit times a loss of 1; a ratio of e^limit, whose gradient ends there; and both at once."""
    most = math.exp(LIMIT[dtype])
    for huge, slope in (("weight", most), ("ratio", 0.0), ("product", 0.0)):
        current, proximal, rollout = (x[:2] for x in HUGE[huge])
        if huge == "ratio":
            rollout = proximal
        method = MethodSpec(AlgoSpec(Algo.decoupled), UNBOUNDED, LossSpec(log_ratio_clamp=None))
        inputs = batch(current, proximal, rollout, dtype)
        assert float(evaluate(method, inputs).loss.total) == pytest.approx((most + 1) / 2, rel=1e-5)
        assert token_gradient(method, inputs).tolist() == pytest.approx([slope / 2, 0.5], rel=1e-5)


def test_below_the_limit_nothing_changes() -> None:
    spec = LossSpec(log_ratio_clamp=None, kl_coef=1.0, kl_value=KlEstimator.k1, kl_gradient=KlEstimator.k1)
    inputs = batch([-1.0, -1.0], [-71.0, -1.0], [-141.0, -1.0], torch.float64)
    result = evaluate(MethodSpec(AlgoSpec(Algo.decoupled), UNBOUNDED, spec), inputs)
    assert float(result.loss.policy) == pytest.approx((math.exp(140.0) + 1) / 2, rel=1e-12)
