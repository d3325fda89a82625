"""What is called unread has no effect on a method's loss and gradient, and every other option has one somewhere."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from trimtab.config import check, resolve
from trimtab.config.keys import options, value_of, with_values
from trimtab.config.unread import STAGES
from trimtab.errors import ConfigError
from trimtab.method import Inputs, evaluate
from trimtab.spec import (
    AdvantageKl,
    Aggregate,
    Algo,
    Denominator,
    KlEstimator,
    KlImportance,
    Level,
    LossName,
    MethodSpec,
    OverTokens,
    Proximal,
    RatioLevel,
    RejectSpec,
    RejectTerms,
    RunSpec,
    Statistic,
    TisMode,
)

K3 = RejectSpec(Statistic.k3, Level.token, upper=0.05)
GEOMETRIC = RejectSpec(Statistic.ratio, Level.sequence, OverTokens.mean, 0.8, 1.2)
VALUES: dict[str, list[Any]] = {
    "algo.metrics_only": [True, False], "algo.proximal": [*Proximal],
    "mis.tis_mode": [*TisMode], "mis.tis_level": [*Level], "mis.tis_lower_bound": [0.3, 0.9],
    "mis.tis_upper_bound": [1.1, 3.0], "mis.tis_batch_normalize": [True, False], "mis.use_rs": [True, False],
    "mis.rs_level": [*Level], "mis.rs_lower_bound": [0.3, 0.9], "mis.rs_upper_bound": [1.1, 3.0],
    "mis.rs_veto_threshold": [0.1, None], "mis.reject": [[], [K3], [GEOMETRIC]], "mis.m2_threshold": [None, 0.05],
    "mis.log_ratio_clamp": [20.0, None, 0.8],
    "loss.name": [*LossName], "loss.ratio_level": [*RatioLevel], "loss.clip_low": [0.2, 0.05],
    "loss.clip_high": [0.2, 0.05], "loss.dual_clip": [None, 1.3], "loss.log_ratio_clamp": [20.0, None, 0.3],
    "loss.ratio_cap": [None, 1.3], "loss.sapo_tau_positive": [1.0, 2.0], "loss.sapo_tau_negative": [1.05, 2.0],
    "loss.vespo_positive": [[2.0, 3.0], [1.0, 1.0]], "loss.vespo_negative": [[3.0, 2.0], [1.0, 1.0]],
    "loss.aggregate": [*Aggregate], "loss.sum_constant": [3.0, 7.0], "loss.denominator": [*Denominator],
    "loss.reject_terms": [*RejectTerms], "loss.kl_coef": [0.0, 0.1], "loss.kl_value": [*KlEstimator],
    "loss.kl_gradient": [*KlEstimator], "loss.kl_importance": [*KlImportance], "loss.kl_input_clamp": [None, 0.5],
    "loss.kl_clamp": [None, 0.3], "loss.advantage_kl": [*AdvantageKl], "loss.advantage_kl_coef": [0.0, 0.2],
    "loss.log_ratio_penalty": [0.0, 0.2], "loss.top_entropy": [1.0, 0.5], "loss.positive_nll_coef": [0.0, 0.3],
    "loss.entropy_coef": [0.0, 0.1],
}  # fmt: skip
BASES: list[dict[str, Any]] = [
    {},
    {"mis.reject": [K3], "loss.kl_coef": 0.1, "loss.log_ratio_penalty": 0.1, "loss.advantage_kl": AdvantageKl.anchor,
     "loss.advantage_kl_coef": 0.1, "mis.tis_mode": TisMode.clip},
    {"mis.use_rs": True, "loss.denominator": Denominator.kept, "loss.kl_coef": 0.1, "mis.tis_mode": TisMode.off,
     "loss.reject_terms": RejectTerms.all, "loss.aggregate": Aggregate.sequence_sum},
    {"mis.reject": [GEOMETRIC], "loss.log_ratio_penalty": 0.1, "loss.denominator": Denominator.kept,
     "mis.tis_mode": TisMode.unbounded},
    {"mis.tis_mode": TisMode.mask, "loss.denominator": Denominator.kept, "loss.aggregate": Aggregate.token_mean},
]  # fmt: skip


@cache
def inputs() -> Inputs:
    """Eight responses, log-ratios of usual and of extreme sizes in both directions, under both signs of advantages."""
    length_B = torch.tensor([9, 7, 1, 12, 8, 0, 10, 6])
    tokens, made = int(length_B.sum()), torch.Generator().manual_seed(1)

    def random(scale: float) -> Tensor:
        return torch.randn(tokens, generator=made, dtype=torch.float64) * scale

    rollout_N = -torch.rand(tokens, generator=made, dtype=torch.float64) * 3 - 0.05
    proximal_N = (rollout_N + random(0.5)).clamp(max=-0.01)
    current_N = (proximal_N + random(0.4)).clamp(max=-0.01)
    reference_N = (current_N + random(0.8)).clamp(max=-0.01)
    for at, (mu, old, new) in {
        3: (-0.5, -25.5, -25.0), 5: (-0.4, -0.3, -24.0), 20: (-30.0, -0.4, -0.5), 30: (-24.0, -23.5, -0.3),
        40: (-1.0, -5.0, -5.1), 44: (-3.5, -3.0, -0.02), 45: (-0.05, -0.02, -4.0), 46: (-2.5, -2.0, -0.03),
        47: (-0.2, -0.1, -5.0), 12: (-0.1, -0.1, -0.9), 49: (-1.5, -1.4, -0.6), 50: (-0.3, -0.3, -0.7),
    }.items():  # fmt: skip
        rollout_N[at], proximal_N[at], current_N[at] = mu, old, new
    advantage_B = torch.tensor([1.0, -1.0, 0.5, -0.7, 0.9, 0.3, -1.2, 0.8], dtype=torch.float64)
    return Inputs(
        current_N, rollout_N, torch.rand(tokens, generator=made) > 0.1,
        torch.repeat_interleave(torch.arange(len(length_B)), length_B), length_B, advantage_B, proximal_N, reference_N,
        torch.rand(tokens, generator=made, dtype=torch.float64), (advantage_B > 0).double(),
        torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), torch.randint(0, 3, (tokens,), generator=made),
    )  # fmt: skip


def outcome(spec: RunSpec) -> Tensor:
    """Loss, its policy term and its gradient."""
    given, current_N = inputs(), inputs().current_N.clone().requires_grad_()
    forwards = spec.algo.name in (Algo.standard, Algo.decoupled) and spec.algo.proximal is Proximal.recompute
    given = replace(given, current_N=current_N, proximal_N=given.proximal_N if forwards else None)
    loss = evaluate(MethodSpec(spec.algo, spec.mis, spec.loss), given).loss
    (gradient_N,) = torch.autograd.grad(loss.total + 0 * current_N.sum(), current_N)
    return torch.cat([loss.total.detach()[None], loss.policy[None], gradient_N])


def same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def unread(spec: RunSpec) -> set[str]:
    found = {key for stage in STAGES for one in stage(spec) for key in one.keys}
    if spec.algo.name is Algo.standard:  # its rules are taken out, not passed over
        found -= {"mis.use_rs", "mis.rs_veto_threshold", "mis.reject", "mis.m2_threshold", "mis.tis_mode"}
    return (found - {"mis.tis_mode", "algo.proximal"}) & {*VALUES}


@pytest.mark.parametrize("name", LossName)
@pytest.mark.parametrize("algo", Algo)
def test_what_is_unread_has_no_effect(algo: Algo, name: LossName) -> None:
    for base in BASES:
        spec = resolve(with_values(RunSpec(), {"algo.name": algo, "loss.name": name} | base))
        before = outcome(spec)
        for key in sorted(unread(spec)):
            for value in VALUES[key]:
                if key != "mis.rs_level" and value != value_of(spec, key):
                    assert same(outcome(with_values(spec, {key: value})), before), (key, value, base)


@pytest.mark.parametrize("key", VALUES)
def test_what_is_read_has_an_effect(key: str) -> None:
    """In at least one combination each, for every pair of neighbouring values that resolving keeps apart."""
    neighbours = list(itertools.pairwise(VALUES[key]))
    found = dict.fromkeys(range(len(neighbours)), False)
    extra = {"loss.vespo": LossName.vespo, "loss.sapo_": LossName.sapo}.get(key[:10], LossName.ppo_clip)
    for algo, base, (i, pair) in itertools.product(Algo, BASES, enumerate(neighbours)):
        if found[i]:
            continue
        start = {"algo.name": algo, "loss.name": extra, "loss.aggregate": Aggregate.sequence_sum} | base
        if key.startswith("loss.kl_"):
            start["loss.kl_coef"] = 0.1
        specs = [with_values(RunSpec(), start | {key: value}) for value in pair]
        try:
            for spec in specs:
                check(spec)
        except ConfigError:
            continue
        one, other = (resolve(spec) for spec in specs)
        found[i] = one != other and not same(outcome(one), outcome(other))
    assert all(found.values()), [pair for i, pair in enumerate(neighbours) if not found[i]]


def test_every_option_of_a_method_is_looked_at() -> None:
    methods = [key for key in options() if key.split(".")[0] in ("algo", "mis", "loss")]
    assert {*methods} - {*VALUES} == {"algo.name", "mis.numerator"}
