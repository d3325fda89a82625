"""prime-rl: the three components of its loss, and the older loss with ratio masks; ragged lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from adapt.shared import Case, Layout, Said, Untranslated, layout, loss, metrics
from torch import Tensor

from trimtab.method import Inputs
from trimtab.objective.aggregate import Counts
from trimtab.peers import prime_rl
from trimtab.spec import (
    AdvantageKl,
    Aggregate,
    Algo,
    AlgoSpec,
    Level,
    LossName,
    LossSpec,
    MethodSpec,
    MisSpec,
    OverTokens,
    RejectSpec,
    Sign,
    Statistic,
    TisMode,
)

LEGACY_MASKS = (
    "token_mask_low", "token_mask_high", "geo_mask_low", "geo_mask_high", "sequence_mask_low", "sequence_mask_high"
)  # fmt: skip


def said(case: Case) -> list[Said]:
    return _legacy(case) if "ratio_type" in case.config["loss"] else _components(case)


def method(case: Case) -> MethodSpec:
    config = case.config["loss"]
    return _legacy_method(config) if "ratio_type" in config else _rl_method(config)


# -- config ----------------------------------------------------------------------------------------------------------


def _difference(lower: float | None, upper: float | None, sign: Sign = Sign.any) -> RejectSpec:
    """Bounds on how much a token's probability moved."""
    return RejectSpec(Statistic.prob_diff, Level.token, None, lower, upper, sign=sign)


def _method(reject: list[RejectSpec], spec: LossSpec) -> MethodSpec:
    return MethodSpec(AlgoSpec(Algo.bypass), MisSpec(tis_mode=TisMode.off, log_ratio_clamp=None, reject=reject), spec)


def _rl_method(config: Mapping[str, Any]) -> MethodSpec:
    match config["type"]:
        case "default":
            reject = [
                _difference(None, config["dppo_mask_high"], Sign.positive),
                _difference(-config["dppo_mask_low"], None, Sign.nonpositive),
            ]
        case "ipo":
            reject = [_difference(-config["ipo_threshold"], config["ipo_threshold"])]
        case other:
            raise Untranslated(f"trimtab has no translation of loss.type={other}; it has default and ipo")
    spec = LossSpec(name=LossName.importance, log_ratio_clamp=None, log_ratio_penalty=config["kl_tau"])
    return _method(reject, spec)


def _ref_kl_method() -> MethodSpec:
    """The advantage is the KL to the reference; its mask and its pull are constants of prime-rl."""
    spec = LossSpec(
        name=LossName.importance,
        log_ratio_clamp=None,
        log_ratio_penalty=prime_rl.REF_KL_TAU,
        advantage_kl=AdvantageKl.reference,
        advantage_kl_coef=1.0,
    )
    return _method([_difference(-prime_rl.REF_KL_MASK_LOW, None)], spec)


def _ce_method() -> MethodSpec:
    """The log-likelihood is REINFORCE with an advantage of 1."""
    return _method([], LossSpec(name=LossName.reinforce))


def _legacy_method(config: Mapping[str, Any]) -> MethodSpec:
    by_row = config["ratio_type"] == "sequence"
    mis = MisSpec(
        tis_mode=TisMode.truncate if by_row else TisMode.unbounded,
        tis_level=Level.sequence if by_row else Level.token,
        tis_upper_bound=min(config["sequence_clip_high"], prime_rl.LEGACY_SEQUENCE_CAP) if by_row else None,
        log_ratio_clamp=None,
        reject=[
            RejectSpec(Statistic.ratio, Level.token, None, config["token_mask_low"], config["token_mask_high"]),
            _row_ratio(OverTokens.mean, config["geo_mask_low"], config["geo_mask_high"]),
            _row_ratio(OverTokens.every, config["sequence_mask_low"], config["sequence_mask_high"]),
        ],
    )
    spec = LossSpec(
        name=LossName.reinforce,
        aggregate=Aggregate.sequence_mean if by_row else Aggregate.token_mean,
        advantage_kl=AdvantageKl.anchor,
        advantage_kl_coef=config["kl_tau"],
    )
    return MethodSpec(AlgoSpec(Algo.bypass), mis, spec)


def _row_ratio(over: OverTokens, lower: float, upper: float) -> RejectSpec:
    return RejectSpec(Statistic.ratio, Level.sequence, over, lower, upper)


# -- what trimtab says -----------------------------------------------------------------------------------------------


def _inputs(case: Case, where_N: Tensor, lay: Layout, advantage_B: Tensor) -> Inputs:
    return Inputs(
        current_N=case.numbers("trainer_logprobs"),
        rollout_N=case.numbers("inference_logprobs"),
        valid_N=where_N,
        row_N=lay.row_N,
        length_B=lay.length_B,
        advantage_B=advantage_B,
        reference_N=case.some("ref_logprobs") if "ref_logprobs" in case.data["inputs"] else None,
    )


def _advantages(case: Case, lay: Layout, valid_N: Tensor) -> Tensor:
    given_B = lay.per_row(case.numbers("advantages"), valid_N)
    return prime_rl.scaled(given_B, case.config["loss"]["adv_tau"])


def _component(
    case: Case, name: str, spec: MethodSpec, lay: Layout, within_N: Tensor, advantage_B: Tensor
) -> prime_rl.Component:
    """The tokens whose weight is not 0."""
    weight_N = case.numbers(f"{name}_weights")
    where_N = within_N & (weight_N != 0)
    given = prime_rl.coefficients(torch.where(where_N, weight_N, 0.0), case.config[f"{name}_scale"])
    return prime_rl.Component(spec, _inputs(case, where_N, lay, advantage_B), given=given)


def _parts(case: Case, lay: Layout, valid_N: Tensor) -> list[prime_rl.Component]:
    advantage_B, spec, every_N = _advantages(case, lay, valid_N), method(case), torch.ones_like(valid_N)
    if case.has("rl_weights"):
        found = [_component(case, "rl", spec, lay, valid_N, advantage_B)]
    else:
        totals = Counts(case.config["rl_scale"], 1)
        found = [prime_rl.Component(spec, _inputs(case, valid_N, lay, advantage_B), totals=totals)]
    if case.has("ce_weights"):
        found.append(_component(case, "ce", _ce_method(), lay, every_N, torch.ones_like(advantage_B)))
    if case.has("ref_kl_weights"):
        found.append(_component(case, "ref_kl", _ref_kl_method(), lay, every_N, torch.zeros_like(advantage_B)))
    return found


def _components(case: Case) -> list[Said]:
    lay, valid_N = layout(case.raw("loss_mask")), case.flags("loss_mask")
    total, gradient_N = prime_rl.total(_parts(case, lay, valid_N))
    return [
        Said(("loss",), total),
        Said(("grad_trainer_logprobs",), gradient_N, absent=0.0),
        *metrics(_logged(case, lay, valid_N), "metrics"),
    ]


def _logged(case: Case, lay: Layout, valid_N: Tensor) -> dict[str, Tensor]:
    config = case.config["loss"]
    at = {"current_N": case.numbers("trainer_logprobs"), "row_N": lay.row_N, "length_B": lay.length_B}
    pair = at | {"rollout_N": case.numbers("inference_logprobs")}
    weight_N = case.some("rl_weights")
    if config["type"] == "default":
        found = prime_rl.default_metrics(
            **pair,
            valid_N=valid_N,
            advantage_B=lay.per_row(case.numbers("advantages"), valid_N),
            dppo_mask_low=config["dppo_mask_low"],
            dppo_mask_high=config["dppo_mask_high"],
            weight_N=weight_N,
        )
    else:
        threshold = config["ipo_threshold"]
        found = prime_rl.ipo_metrics(**pair, valid_N=valid_N, ipo_threshold=threshold, weight_N=weight_N)
    if case.has("ce_weights"):
        found |= prime_rl.ce_metrics(**at, weight_N=case.numbers("ce_weights"))
    if case.has("ref_kl_weights"):
        found |= prime_rl.ref_kl_metrics(
            **pair, reference_N=case.numbers("ref_logprobs"), weight_N=case.numbers("ref_kl_weights")
        )
    return found


def _legacy(case: Case) -> list[Said]:
    lay, valid_N, config = layout(case.raw("loss_mask")), case.flags("loss_mask"), case.config["loss"]
    inputs = _inputs(case, valid_N, lay, _advantages(case, lay, valid_N))
    scale = case.config["loss_scale"]
    _, found = loss(method(case), inputs, "grad_trainer_logprobs", totals=Counts(scale, scale))
    logged = prime_rl.legacy_metrics(
        current_N=inputs.current_N,
        rollout_N=inputs.rollout_N,
        valid_N=valid_N,
        row_N=lay.row_N,
        length_B=lay.length_B,
        options=prime_rl.Legacy(**{key: config[key] for key in LEGACY_MASKS}),
    )
    return [*found, *metrics(logged, "metrics")]
