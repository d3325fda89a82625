"""TRL: the importance sampling block of GRPOTrainer and its losses; padded B x T lists."""

from __future__ import annotations

from dataclasses import replace

import torch
from adapt.shared import Case, Said, choice, layout, loss, metrics, off_policy_mask, ratio_inputs
from torch import Tensor

from trimtab.method import Inputs, evaluate
from trimtab.objective.aggregate import Counts
from trimtab.peers import trl
from trimtab.peers.options import member
from trimtab.spec import (
    Aggregate,
    Algo,
    AlgoSpec,
    KlEstimator,
    KlImportance,
    Level,
    LossName,
    LossSpec,
    MethodSpec,
    MisSpec,
    Pair,
    RatioLevel,
    TisMode,
)

NAMES = {"cispo": LossName.cispo, "sapo": LossName.sapo, "vespo": LossName.vespo}
AGGREGATES = {
    "grpo": Aggregate.sequence_mean,
    "sapo": Aggregate.sequence_mean,
    "bnpo": Aggregate.token_mean,
    "dapo": Aggregate.token_mean,
    "cispo": Aggregate.token_mean,
    "vespo": Aggregate.token_mean,
    "dr_grpo": Aggregate.sequence_sum,
    "luspo": Aggregate.sequence_sum,
}
GLOBAL = ("dapo", "cispo", "vespo")  # divided by the tokens of the whole batch


def said(case: Case) -> list[Said]:
    return _loss(case) if "loss_type" in case.config else _weights(case)


def method(case: Case) -> MethodSpec:
    if "loss_type" in case.config:
        return MethodSpec(AlgoSpec(Algo.decoupled), _loss_mis(case), _loss_spec(case))
    return MethodSpec(AlgoSpec(Algo.decoupled), _mis(case))


# -- config ----------------------------------------------------------------------------------------------------------


def _bounds(case: Case) -> tuple[float | None, float | None]:
    prefix = "" if "loss_type" in case.config else "vllm_importance_sampling_"
    return case.config[f"{prefix}clip_min"], case.config[f"{prefix}clip_max"]


def _mode(name: str) -> trl.SamplingMode:
    return member(trl.SamplingMode, "vllm_importance_sampling_mode", name)


def _mis(case: Case) -> MisSpec:
    mode = case.config["vllm_importance_sampling_mode"]
    if not mode:
        return MisSpec(tis_mode=TisMode.off, log_ratio_clamp=None)
    lower, upper = _bounds(case)
    trl.check_sampling(_mode(mode), lower, upper)
    level, _, action = _mode(mode).value.partition("_")
    truncate = TisMode.truncate if lower is None else TisMode.clip
    return MisSpec(
        tis_mode=TisMode.zero if action == "mask" else truncate,
        tis_level=Level[level],
        tis_lower_bound=lower,
        tis_upper_bound=upper,
        log_ratio_clamp=None,
    )


def _loss_mis(case: Case) -> MisSpec:
    delta = case.config["off_policy_mask_threshold"]
    if delta is None:
        return _mis(case)
    pair = Pair.current_rollout if case.has("sampling_per_token_logps") else Pair.current_proximal
    return replace(_mis(case), reject=[off_policy_mask(delta, pair)])


def _loss_spec(case: Case) -> LossSpec:
    config, kind = case.config, case.config["loss_type"]
    high = config["epsilon_high"]
    return LossSpec(
        name=NAMES.get(kind, LossName.ppo_clip),
        ratio_level=choice(RatioLevel, config["importance_sampling_level"]),
        clip_low=1.0 if kind == "cispo" else config["epsilon"],  # cispo: free below, and epsilon_high is the bound
        clip_high=high - 1 if kind == "cispo" else high,
        ratio_cap=config["delta"],
        log_ratio_clamp=None,
        aggregate=AGGREGATES[member(trl.LossType, "loss_type", kind).value],
        sum_constant=float(config["max_completion_length"]) if kind == "dr_grpo" else 1.0,
        sapo_tau_positive=_float32(config.get("sapo_temperature_pos", 1.0)),
        sapo_tau_negative=_float32(config.get("sapo_temperature_neg", 1.05)),
        vespo_positive=[config.get("vespo_k_pos", 2.0), config.get("vespo_lambda_pos", 3.0)],
        vespo_negative=[config.get("vespo_k_neg", 3.0), config.get("vespo_lambda_neg", 2.0)],
        kl_coef=config["beta"],
        kl_value=KlEstimator.k3,
        kl_gradient=KlEstimator.k3,
        kl_importance=KlImportance.anchor_live if config["use_bias_correction_kl"] else KlImportance.none,
        top_entropy=config["top_entropy_quantile"],
    )


def _float32(option: float) -> float:
    """TRL holds these options in a float32 tensor."""
    return torch.tensor(option, dtype=torch.float32).item()


def _totals(case: Case, rows: int, valid_N: Tensor) -> Counts:
    """What the loss is divided by: global tokens a process, or the batch's own counts times the accumulated batches."""
    config = case.config
    if config["loss_type"] in GLOBAL:
        return Counts(case.raw("num_items_in_batch") / config["num_processes"], rows)
    steps = config["current_gradient_accumulation_steps"]
    return Counts(int(valid_N.sum()) * steps, rows * steps)


# -- what trimtab says -----------------------------------------------------------------------------------------------


def _valid(case: Case) -> Tensor:
    mask_N = case.flags("completion_mask")
    return mask_N & case.flags("tool_mask") if case.has("tool_mask") else mask_N


def _ratio(case: Case, inputs: Inputs, weight_N: Tensor) -> tuple[Tensor | None, list[Said]]:
    """TRL's ratio, from its namesake in trimtab and from the weights that the loss takes."""
    path, where = ("importance_sampling_ratio",), inputs.valid_N
    mode = case.config["vllm_importance_sampling_mode"]
    if not mode:
        return None, [Said(path, weight_N, where=where, absent=1.0)]
    lower, upper = _bounds(case)
    ratio_L = trl.sampling_ratio(
        proximal_N=inputs.proximal_N,
        rollout_N=inputs.rollout_N,
        valid_N=inputs.valid_N,
        row_N=inputs.row_N,
        length_B=inputs.length_B,
        mode=_mode(mode),
        clip_min=lower,
        clip_max=upper,
    )
    if mode.startswith("sequence"):
        return ratio_L, [Said(path, ratio_L), Said(path, weight_N, where=where, row_N=inputs.row_N)]
    return ratio_L, [Said(path, ratio_L), Said(path, weight_N, where=where)]


def _weights(case: Case) -> list[Said]:
    lay, valid_N = layout(case.raw("completion_mask")), _valid(case)
    inputs = ratio_inputs(case, "old_per_token_logps", "sampling_per_token_logps", valid_N, lay)
    _, ratio = _ratio(case, inputs, evaluate(method(case), inputs).applied.weight_N)
    lower, upper = _bounds(case)
    found = trl.sampling_metrics(
        proximal_N=inputs.proximal_N,
        rollout_N=inputs.rollout_N,
        valid_N=valid_N,
        row_N=lay.row_N,
        length_B=lay.length_B,
        mode=_mode(case.config["vllm_importance_sampling_mode"]),
        clip_min=lower,
        clip_max=upper,
    )
    return [*ratio, *metrics(found, "metrics_restated_by_harness")]


def _loss(case: Case) -> list[Said]:
    lay, valid_N = layout(case.raw("completion_mask")), _valid(case)
    sampled = "sampling_per_token_logps" if case.has("sampling_per_token_logps") else "old_per_token_logps"
    inputs = replace(
        ratio_inputs(case, "old_per_token_logps", sampled, valid_N, lay, case.numbers("advantages")),
        current_N=case.numbers("per_token_logps"),
        reference_N=case.some("ref_per_token_logps"),
        entropy_N=case.some("entropies"),
    )
    result, found = loss(method(case), inputs, "grad_per_token_logps", totals=_totals(case, lay.rows, valid_N))
    applied = result.applied
    ratio_L, ratio = _ratio(case, inputs, applied.weight_N)
    config = case.config
    logged = trl.loss_metrics(
        current_N=inputs.current_N,
        proximal_N=inputs.proximal_N,
        valid_N=valid_N,
        row_N=lay.row_N,
        length_B=lay.length_B,
        advantage_B=inputs.advantage_B,
        entropy_N=inputs.entropy_N,
        reference_N=inputs.reference_N,
        weight_N=ratio_L,
        options=trl.Options(
            loss_type=member(trl.LossType, "loss_type", config["loss_type"]),
            importance_sampling_level=choice(RatioLevel, config["importance_sampling_level"]),
            vespo_positive=tuple(method(case).loss.vespo_positive),
            vespo_negative=tuple(method(case).loss.vespo_negative),
            **{key: config[key] for key in ("epsilon", "epsilon_high", "beta", "delta", "use_bias_correction_kl")},
        ),
    )
    return [
        *found,
        *ratio,
        Said(("off_policy_mask",), applied.keep_N, where=valid_N, row_N=lay.row_N, absent=1.0),
        *metrics(logged, "metrics"),
    ]
