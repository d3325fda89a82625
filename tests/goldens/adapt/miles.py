"""miles and slime: the masked-importance-sampling example, the built-in corrections and OPSM; ragged lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from adapt.shared import Case, Said, layout, loss, metrics, off_policy_mask, ratio_inputs

from trimtab.method import evaluate
from trimtab.objective.aggregate import Counts
from trimtab.peers import miles
from trimtab.spec import (
    LOG_RATIO_CLAMP,
    Aggregate,
    Algo,
    AlgoSpec,
    Level,
    LossSpec,
    MethodSpec,
    MisSpec,
    Pair,
    TisMode,
)


def said(case: Case) -> list[Said]:
    if "opsm" in case.function:
        return _opsm(case)
    if "compute_mis_weights" in case.function:
        return _mis(case)
    return _built_in(case)


def method(case: Case) -> MethodSpec:
    if "opsm" in case.function:
        mis = MisSpec(tis_mode=TisMode.off, reject=[off_policy_mask(case.config["opsm_delta"], Pair.current_proximal)])
        return MethodSpec(AlgoSpec(Algo.decoupled), mis)
    if "compute_mis_weights" in case.function:
        return MethodSpec(AlgoSpec(Algo.decoupled), _mis_spec(case.config))
    return _built_in_method(case)


# -- config ----------------------------------------------------------------------------------------------------------


def _bounds(config: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    return miles.bounds(
        (config["tis_lower_bound"], config["tis_upper_bound"]), (config["rs_lower_bound"], config["rs_upper_bound"])
    )


def _mis_spec(config: Any) -> MisSpec:
    """Without use_tis nothing is corrected; use_rs switches the veto on, too."""
    if not config["use_tis"]:
        return MisSpec(tis_mode=TisMode.off)
    (lower, upper), (rs_lower, rs_upper) = _bounds(config)
    mode = miles.mode(config["tis_mode"])
    miles.check_bounds(mode, lower, upper)
    weights = MisSpec(
        tis_mode=mode,
        tis_level=miles.level("tis_level", config["tis_level"]),
        tis_lower_bound=lower,
        tis_upper_bound=upper,
        tis_batch_normalize=config["tis_batch_normalize"],
    )
    if not config["use_rs"]:
        return weights
    return replace(
        weights,
        use_rs=True,
        rs_level=miles.level("rs_level", config["rs_level"]),
        rs_lower_bound=rs_lower,
        rs_upper_bound=rs_upper,
        rs_veto_threshold=config["rs_veto_threshold"],
    )


def _built_in_method(case: Case) -> MethodSpec:
    config = case.config
    mis = MisSpec(
        tis_mode=TisMode.zero if "icepop" in case.function else TisMode.clip,
        tis_lower_bound=config["tis_clip_low"],
        tis_upper_bound=config["tis_clip"],
        log_ratio_clamp=None,
    )
    spec = LossSpec(
        clip_low=config["eps_clip"],
        clip_high=config["eps_clip_high"],
        dual_clip=config["eps_clip_c"],
        aggregate=Aggregate.sequence_mean,
        log_ratio_clamp=LOG_RATIO_CLAMP if case.system == "miles" else None,
    )
    return MethodSpec(AlgoSpec(Algo.decoupled), mis, spec)


# -- what trimtab says -----------------------------------------------------------------------------------------------


def _mis(case: Case) -> list[Said]:
    config, lay, valid_N = case.config, layout(case.raw("loss_masks")), case.flags("loss_masks")
    inputs = ratio_inputs(case, "train_log_probs", "rollout_log_probs", valid_N, lay)
    applied = evaluate(method(case), inputs).applied
    at = (inputs.current_N, inputs.rollout_N, valid_N, lay.row_N, lay.length_B)
    found = miles.off_policy(*at)
    if config["use_tis"]:
        (lower, upper), (rs_lower, rs_upper) = _bounds(config)
        found |= miles.importance(
            *at,
            level=Level[config["tis_level"]],
            mode=TisMode[config["tis_mode"]],
            lower=lower,
            upper=upper,
            batch_normalize=config["tis_batch_normalize"],
        )
        if config["use_rs"]:
            veto = config["rs_veto_threshold"]
            found |= miles.rejection(*at, level=Level[config["rs_level"]], lower=rs_lower, upper=rs_upper, veto=veto)
    found = {name.removeprefix("mis_"): value_N for name, value_N in found.items()}
    return [
        Said(("weights",), applied.weight_N, where=valid_N, absent=1.0),
        Said(("mask",), applied.keep_N),
        *metrics(found, "metrics"),
        *metrics(miles.sample_mean(found, valid_N, lay.row_N, lay.length_B), "metrics_reduced_sample_mean"),
    ]


def _built_in(case: Case) -> list[Said]:
    lay, valid_N, spec = layout(case.raw("loss_masks")), case.flags("loss_masks"), _built_in_method(case)
    advantage_N = case.numbers("advantages")
    inputs = replace(
        ratio_inputs(case, "train_log_probs", "rollout_log_probs", valid_N, lay, lay.per_row(advantage_N, valid_N)),
        current_N=case.numbers("log_probs"),
    )
    totals = Counts(1, lay.rows)  # the mean over all samples, those without a token too
    result, found = loss(spec, inputs, "grad_log_probs", totals=totals)
    plain = evaluate(replace(spec, mis=MisSpec(tis_mode=TisMode.off)), inputs)
    proximal_N, rollout_N = case.numbers("train_log_probs"), inputs.rollout_N
    lower, upper = case.config["tis_clip_low"], case.config["tis_clip"]
    clipped = miles.policy_loss(
        inputs.current_N, proximal_N, valid_N, lay.row_N, lay.length_B,
        advantage_N=advantage_N, clip_low=spec.loss.clip_low, clip_high=spec.loss.clip_high,
    )  # fmt: skip
    return [
        *found,
        Said(("mask",), result.applied.keep_N),
        Said(("pg_loss_tokens_before",), plain.surrogate.loss_N.detach(), where=valid_N),
        Said(("pg_loss_tokens_after",), result.surrogate.loss_N.detach(), where=valid_N),
        Said(("pg_clipfrac_tokens",), clipped["pg_clipfrac"], where=valid_N),
        *metrics(miles.built_in(proximal_N, rollout_N, lower=lower, upper=upper), "metrics_tokens"),
    ]


def _opsm(case: Case) -> list[Said]:
    lay, valid_N = layout(case.raw("loss_masks")), case.flags("loss_masks")
    current_N, old_N, rollout_N = (
        case.numbers(key) for key in ("full_log_probs", "full_old_log_probs", "rollout_log_probs")
    )
    advantage_N = case.numbers("advantages")
    inputs = replace(
        ratio_inputs(case, "full_old_log_probs", "rollout_log_probs", valid_N, lay, lay.per_row(advantage_N, valid_N)),
        current_N=current_N,
    )
    at = (current_N, old_N, valid_N, lay.row_N, lay.length_B)
    return [
        Said(("opsm_mask",), evaluate(method(case), inputs).applied.keep_N, where=valid_N),
        *metrics(miles.opsm(*at, advantage_N=advantage_N, delta=case.config["opsm_delta"])),
        Said(("gspo_ppo_kl",), miles.ppo_kl(*at, gspo=True)),
        Said(
            ("train_rollout_kl_tokens",),
            miles.mismatch(old_N, rollout_N, clamp=case.system == "miles")["train_rollout_kl"],
        ),
    ]
