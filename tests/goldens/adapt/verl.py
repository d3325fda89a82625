"""verl: ``rollout_corr_helper.py`` and the policy losses of ``core_algos.py``, padded B x T lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from adapt.shared import Case, Layout, Said, Untranslated, choice, layout, loss, metrics, number, ratio_inputs
from torch import Tensor

from trimtab.config import config_hash, methods
from trimtab.method import Inputs, evaluate
from trimtab.objective.aggregate import Counts
from trimtab.peers import verl, verl_loss, verl_rules
from trimtab.peers.verl import RsOption
from trimtab.peers.verl_loss import VerlLoss
from trimtab.spec import (
    Aggregate,
    Algo,
    AlgoSpec,
    Denominator,
    Level,
    LossName,
    LossSpec,
    MethodSpec,
    MisSpec,
    RatioLevel,
    RejectSpec,
    RejectTerms,
    RunSpec,
    TisMode,
)

LEGACY = "418f964a"
LOSSES = {
    "vanilla": LossName.ppo_clip,
    "ppo_clip": LossName.ppo_clip,
    "gspo": LossName.ppo_clip,
    "gpg": LossName.reinforce,
    "reinforce": LossName.reinforce,
    "cispo": LossName.cispo,
    "sapo": LossName.sapo,
    "geo_mean": LossName.gmpo,
    "dppo_tv": LossName.dppo_tv,
    "dppo_kl": LossName.dppo_kl,
}
SEQUENCE_MEAN = ("gspo", "sapo", "geo_mean")  # whatever loss_agg_mode says


def said(case: Case) -> list[Said]:
    if case.function.startswith("compute_policy_loss"):
        return _bypass(case) if case.config["bypass_mode"] else _decoupled(case)
    if "classmethods" in case.function:
        return _presets(case)
    return _correction(case)


def method(case: Case) -> MethodSpec | None:
    """The correction of a case, as trimtab's options."""
    if case.function.startswith("compute_policy_loss"):
        return _loss_method(case)
    if "classmethods" in case.function:
        return None
    mis = _legacy(case.config) if _is_legacy(case) else _mis(case.config)
    return MethodSpec(AlgoSpec(Algo.decoupled), mis)


# -- config ----------------------------------------------------------------------------------------------------------


def _is_legacy(case: Case) -> bool:
    return case.data["commit"].startswith(LEGACY)


def _options(block: Mapping[str, Any]) -> list[tuple[RsOption, float | None, float]]:
    return verl_rules.options(block.get("rollout_rs"), block.get("rollout_rs_threshold"))


def _rules(block: Mapping[str, Any]) -> list[RejectSpec]:
    return [verl_rules.rule(option, upper=upper, lower=lower) for option, lower, upper in _options(block)]


def _weighted(block: Mapping[str, Any], *, legacy: bool = False) -> tuple[Level, float | None, float] | None:
    """Level and bounds of the weights, None if there are none."""
    given = block.get("rollout_is_threshold", 2.0)
    if block.get("rollout_is") is None or given is None:
        return None
    level = verl_rules.weight_level(block["rollout_is"], legacy=legacy)
    return level, *verl_rules.threshold("rollout_is_threshold", given)


def _weights(block: Mapping[str, Any], *, legacy: bool = False) -> MisSpec:
    weighted = _weighted(block, legacy=legacy)
    if weighted is None:
        return MisSpec(tis_mode=TisMode.off)
    level, lower, upper = weighted
    return MisSpec(
        tis_mode=TisMode.truncate if lower is None else TisMode.zero,
        tis_level=level,
        tis_lower_bound=lower,
        tis_upper_bound=upper,
        tis_batch_normalize=bool(block.get("rollout_is_batch_normalize")),
    )


def _mis(block: Mapping[str, Any]) -> MisSpec:
    return replace(_weights(block), reject=_rules(block))


def _legacy(block: Mapping[str, Any]) -> MisSpec:
    reject = []
    if block.get("rollout_rs"):
        upper, lower = _legacy_bounds(block)
        reject = [verl_rules.legacy_rule(choice(Level, block["rollout_rs"]), upper=upper, lower=lower)]
    veto = block.get("rollout_token_veto_threshold")
    return replace(_weights(block, legacy=True), reject=reject, rs_veto_threshold=veto)


def _legacy_bounds(block: Mapping[str, Any]) -> tuple[float, float | None]:
    upper, lower = block.get("rollout_rs_threshold"), block.get("rollout_rs_threshold_lower")
    fallback = block.get("rollout_is_threshold", 2.0)
    return number(fallback if upper is None else upper), None if lower is None else number(lower)


def _loss_name(case: Case) -> str:
    name = case.function.removeprefix("compute_policy_loss_")
    if name == "bypass_mode":
        name = (case.config["rollout_correction"] or {}).get("loss_type", "ppo_clip")
    if name not in LOSSES:
        raise Untranslated(f"trimtab has no loss {name}; it has {', '.join(LOSSES)}")
    return name


def _clip(case: Case) -> tuple[float, float, float | None]:
    actor = case.config["actor"]
    low, high = (
        actor["clip_ratio"] if actor.get(key) is None else actor[key] for key in ("clip_ratio_low", "clip_ratio_high")
    )
    cap = actor.get("clip_ratio_c", "default")
    return low, high, None if cap == "default" else cap


def _loss_spec(case: Case) -> LossSpec:
    name, actor = _loss_name(case), case.config["actor"]
    low, high, cap = _clip(case)
    mode = "seq-mean-token-mean" if name in SEQUENCE_MEAN else case.config["loss_agg_mode"]
    aggregate = {
        "token-mean": Aggregate.token_mean,
        "token-sum": Aggregate.sequence_sum,
        "seq-mean-token-sum": Aggregate.sequence_sum,
        "seq-mean-token-sum-norm": Aggregate.sequence_sum,
        "seq-mean-token-mean": Aggregate.sequence_mean,
    }[mode]
    width = case.config.get("loss_scale_factor") or len(case.raw("response_mask")[0])
    spec = LossSpec(
        name=LOSSES[name],
        clip_low=low,
        clip_high=high,
        aggregate=aggregate,
        sum_constant=width if mode == "seq-mean-token-sum-norm" else 1.0,
        denominator=Denominator.kept,
        reject_terms=RejectTerms.all,
        sapo_tau_positive=actor.get("tau_pos", 1.0),
        sapo_tau_negative=actor.get("tau_neg", 1.05),
    )
    match name:
        case "vanilla" | "ppo_clip":
            return replace(spec, dual_clip=3.0 if cap is None else cap)
        case "dppo_tv" | "dppo_kl":
            return replace(spec, ratio_cap=20.0 if cap is None else cap)
        case "gspo":
            return replace(spec, ratio_level=RatioLevel.sequence_token, log_ratio_clamp=10.0)
        case "geo_mean":
            return replace(spec, log_ratio_clamp=None)
        case _:
            return spec


def _loss_method(case: Case) -> MethodSpec:
    block, spec = case.config["rollout_correction"] or {}, _loss_spec(case)
    if not case.config["bypass_mode"]:
        return MethodSpec(AlgoSpec(Algo.decoupled), _mis(block), spec)
    # in ppo_clip the ratio current/rollout is the weight; verl's own weights are then metrics only
    mis = _mis(block) if spec.name is LossName.reinforce else MisSpec(tis_mode=TisMode.off, reject=_rules(block))
    return MethodSpec(AlgoSpec(Algo.bypass), mis, spec)


def _totals(case: Case, lay: Layout) -> Counts | None:
    name = _loss_name(case)
    if name == "geo_mean":
        return Counts(1, lay.rows)  # the mean over all rows, those without a token too
    summed = case.config["loss_agg_mode"] == "token-sum" and name not in SEQUENCE_MEAN
    return Counts(1, 1) if summed else None


# -- what trimtab says -----------------------------------------------------------------------------------------------


def _correction(case: Case) -> list[Said]:
    lay, valid_N, spec = layout(case.raw("response_mask")), case.flags("response_mask"), method(case)
    assert spec is not None
    inputs = ratio_inputs(case, "old_log_prob", "rollout_log_prob", valid_N, lay)
    applied = evaluate(spec, inputs).applied
    pair = (inputs.rollout_N, valid_N, lay.row_N, lay.length_B)
    found = _metrics(case, case.config, inputs.current_N, *pair, keep_N=applied.keep_N)
    return [
        Said(("weights",), applied.weight_N, where=valid_N, absent=1.0),
        Said(("mask",), applied.keep_N),
        *metrics(found, "metrics"),
    ]


def _metrics(
    case: Case,
    block: Mapping[str, Any],
    numerator_N: Tensor,
    rollout_N: Tensor,
    valid_N: Tensor,
    row_N: Tensor,
    length_B: Tensor,
    *,
    keep_N: Tensor,
) -> dict[str, float]:
    at = (numerator_N, rollout_N, valid_N, row_N, length_B)
    legacy = _is_legacy(case)
    found, weighted = verl.off_policy(*at), _weighted(block, legacy=legacy)
    normalise = bool(block.get("rollout_is_batch_normalize"))
    if weighted is not None and legacy:
        found |= verl.legacy_importance(*at, level=weighted[0], upper=weighted[2], batch_normalize=normalise)
    elif weighted is not None:
        level, lower, upper = weighted
        found |= verl.importance(*at, level=level, lower=lower, upper=upper, batch_normalize=normalise)
    if legacy:
        if block.get("rollout_rs"):
            upper, lower = _legacy_bounds(block)
            found |= verl.legacy_rejection(*at, level=choice(Level, block["rollout_rs"]), upper=upper, lower=lower)
        return found | verl.legacy_veto(*at, threshold=block.get("rollout_token_veto_threshold"))
    for option, lower, upper in _options(block):
        found |= verl.rejection(*at, option=option, lower=lower, upper=upper)
    if block.get("rollout_rs"):
        found |= verl.rejection_total(keep_N, valid_N, row_N, length_B, dtype=case.dtype)
    return found


def _inputs(case: Case) -> Inputs:
    lay, valid_N = layout(case.raw("response_mask")), case.flags("response_mask")
    advantage_B = lay.per_row(case.numbers("advantages"), valid_N)
    inputs = ratio_inputs(case, "old_log_prob", "rollout_log_prob", valid_N, lay, advantage_B)
    return replace(inputs, current_N=case.numbers("log_prob"))


def _decoupled(case: Case) -> list[Said]:
    inputs, spec = _inputs(case), _loss_method(case)
    result, found = loss(spec, inputs, "grad_log_prob", totals=_totals(case, Layout(inputs.row_N, inputs.length_B)))
    applied = result.applied
    return [
        *found,
        Said(("weights",), applied.weight_N, where=inputs.valid_N, absent=1.0),
        Said(("mask",), applied.keep_N),
        *metrics(_loss_metrics(case, inputs, applied.keep_N), "metrics"),
    ]


def _bypass(case: Case) -> list[Said]:
    """The mask that a case of bypass mode holds is the one given; weights are inside of the loss."""
    block, inputs, spec = case.config["rollout_correction"] or {}, _inputs(case), _loss_method(case)
    inputs = replace(inputs, proximal_N=None)
    result, found = loss(spec, inputs, "grad_log_prob", totals=_totals(case, Layout(inputs.row_N, inputs.length_B)))
    keep_N = result.applied.keep_N
    at = (inputs.current_N, inputs.rollout_N, inputs.valid_N, inputs.row_N, inputs.length_B)
    return [
        *found,
        Said(("mask",), inputs.valid_N),
        *metrics(_loss_metrics(case, inputs, keep_N), "metrics"),
        *metrics(_metrics(case, block, *at, keep_N=keep_N), "metrics"),
    ]


def _loss_metrics(case: Case, inputs: Inputs, keep_N: Tensor) -> dict[str, float]:
    name = _loss_name(case)
    if name == "gpg":
        return {}  # verl logs nothing of it
    low, high, cap = _clip(case)
    return verl_loss.policy_loss(
        inputs.current_N,
        inputs.rollout_N if inputs.proximal_N is None else inputs.proximal_N,
        keep_N,
        inputs.row_N,
        inputs.length_B,
        loss=VerlLoss.vanilla if name == "ppo_clip" else VerlLoss[name],
        advantage_N=inputs.advantage_B[inputs.row_N],
        clip_low=low,
        clip_high=high,
        cap=cap,
    )


# -- presets ---------------------------------------------------------------------------------------------------------


def _presets(case: Case) -> list[Said]:
    """1 for each of verl's presets that trains as trimtab's preset of that name does, once it is translated."""
    same = {name: _run(block) == _preset(name) for name, block in case.outputs["presets"].items()}
    return [
        *(Said(("presets", name), float(equal)) for name, equal in same.items()),
        Said(("yaml_default",), float(_run(case.outputs["yaml_default"]) == _preset("disabled"))),
        Said(("default_dataclass",), float(_run(case.outputs["default_dataclass"]) == _preset("decoupled_seq_is"))),
    ]


def _preset(name: str) -> str:
    one = methods([f"verl/{name}"], RunSpec())[f"verl/{name}"]
    return config_hash(RunSpec(algo=one.algo, mis=one.mis, loss=one.loss))


def _run(block: Mapping[str, Any]) -> str:
    """The hash of what trains the same."""
    bypass, reinforce = block["bypass_mode"], block["bypass_mode"] and block["loss_type"] == "reinforce"
    spec = LossSpec(
        name=LossName.reinforce if reinforce else LossName.ppo_clip,
        dual_clip=3.0,
        denominator=Denominator.all if bypass else Denominator.kept,
        reject_terms=RejectTerms.policy if bypass else RejectTerms.all,
    )
    # presets write the bounds of k1 as ratios
    rules = [verl_rules.ratio_rule(option, upper=upper, lower=lower) for option, lower, upper in _options(block)]
    weights = MisSpec(tis_mode=TisMode.off) if bypass and not reinforce else _weights(block)
    mis = replace(weights, reject=rules)
    return config_hash(RunSpec(algo=AlgoSpec(Algo.bypass if bypass else Algo.decoupled), mis=mis, loss=spec))
