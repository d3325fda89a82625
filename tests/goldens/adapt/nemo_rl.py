"""NeMo-RL: ``ClippedPGLossFn`` and the filter by sequence error; padded B x T lists, already shifted by one."""

from __future__ import annotations

import torch
from adapt.shared import Case, Said, choice, layout, loss, metrics, ratio_inputs

from trimtab.method import Inputs, evaluate
from trimtab.objective.aggregate import Counts
from trimtab.peers import nemo_rl
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
    OverTokens,
    RatioLevel,
    RejectSpec,
    Statistic,
    TisMode,
)

LOGGED = (
    "token_level_loss", "sequence_level_importance_ratios", "disable_ppo_ratio", "force_on_policy_ratio",
    "ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "kl_input_clamp_value", "kl_output_clamp_value",
    "use_on_policy_kl_approximation", "positive_example_nll_weight",
)  # fmt: skip


def said(case: Case) -> list[Said]:
    return _filter(case) if "seq_logprob_error_threshold" in case.config else _loss(case)


def method(case: Case) -> MethodSpec:
    if "seq_logprob_error_threshold" in case.config:
        threshold = case.config["seq_logprob_error_threshold"]
        error = RejectSpec(Statistic.mult_error, Level.sequence, OverTokens.mean, None, threshold)
        return MethodSpec(
            AlgoSpec(Algo.decoupled),
            MisSpec(tis_mode=TisMode.off, log_ratio_clamp=None, reject=[] if threshold is None else [error]),
        )
    algo = Algo.on_policy if case.config["force_on_policy_ratio"] else Algo.decoupled
    return MethodSpec(AlgoSpec(algo), _mis(case), _loss_spec(case))


# -- config ----------------------------------------------------------------------------------------------------------


def _mis(case: Case) -> MisSpec:
    config = case.config
    rule = _truncation(case)
    if not config["use_importance_sampling_correction"]:
        return MisSpec(tis_mode=TisMode.off, log_ratio_clamp=None)
    lower, upper = (None, None) if rule is None else (rule.lower, rule.upper)
    mode, reject = TisMode.unbounded, []
    match None if rule is None else rule.kind:
        case nemo_rl.TruncationKind.tis:
            mode = TisMode.truncate if lower is None else TisMode.clip
        case nemo_rl.TruncationKind.icepop:
            mode = TisMode.zero
        case nemo_rl.TruncationKind.seq_mask_tis:
            reject = [RejectSpec(Statistic.ratio, Level.sequence, OverTokens.mean, lower, upper)]
    return MisSpec(
        tis_mode=mode,
        tis_level=Level.sequence if config["sequence_level_importance_ratios"] else Level.token,
        tis_lower_bound=None if mode is TisMode.unbounded else lower,
        tis_upper_bound=None if mode is TisMode.unbounded else upper,
        reject=reject,
        log_ratio_clamp=None,
    )


def _kl_coefficient(case: Case) -> float:
    return 0.0 if case.config["use_kl_in_reward"] else case.config["reference_policy_kl_penalty"]


def _loss_spec(case: Case) -> LossSpec:
    config = case.config
    kind = choice(KlEstimator, config["reference_policy_kl_type"])
    name = LossName.ppo_clip
    if config["use_cispo"]:
        name = LossName.cispo
    elif config["disable_ppo_ratio"] and not config["force_on_policy_ratio"]:
        name = LossName.reinforce
    by_row = config["sequence_level_importance_ratios"] and not config["force_on_policy_ratio"]
    approximate = config["use_on_policy_kl_approximation"]
    return LossSpec(
        name=name,
        ratio_level=RatioLevel.sequence if by_row else RatioLevel.token,
        clip_low=config["ratio_clip_min"],
        clip_high=config["ratio_clip_max"],
        dual_clip=config["ratio_clip_c"],
        log_ratio_clamp=None,
        aggregate=Aggregate.token_mean if config["token_level_loss"] else Aggregate.sequence_mean,
        kl_coef=_kl_coefficient(case),
        kl_value=kind,
        kl_gradient=kind,
        kl_importance=KlImportance.rollout_live if approximate else KlImportance.current_live,
        kl_input_clamp=config["kl_input_clamp_value"],
        kl_clamp=config["kl_output_clamp_value"],
        positive_nll_coef=config["positive_example_nll_weight"],
    )


def _truncation(case: Case) -> nemo_rl.Truncation | None:
    kind, ratio, ratio_min = (
        case.config[f"truncated_importance_sampling_{name}"] for name in ("type", "ratio", "ratio_min")
    )
    return nemo_rl.truncation(kind, ratio, ratio_min, corrected=case.config["use_importance_sampling_correction"])


def _options(case: Case) -> nemo_rl.Options:
    config = case.config
    return nemo_rl.Options(
        truncation=_truncation(case),
        reference_policy_kl_type=choice(KlEstimator, config["reference_policy_kl_type"]),
        reference_policy_kl_penalty=_kl_coefficient(case),
        **{key: config[key] for key in LOGGED},
    )


# -- what trimtab says -----------------------------------------------------------------------------------------------


def _inputs(case: Case, current: str) -> tuple[Inputs, torch.Tensor]:
    lay, sample_B = layout(case.raw("token_mask")), case.flags("sample_mask")
    valid_N = case.flags("token_mask") & sample_B[lay.row_N]
    reward_B = case.some("rewards")
    prior = ratio_inputs(
        case, "prev_logprobs" if case.has("prev_logprobs") else current, "generation_logprobs", valid_N, lay
    )
    return Inputs(
        current_N=case.numbers(current),
        rollout_N=prior.rollout_N,
        valid_N=valid_N,
        row_N=lay.row_N,
        length_B=lay.length_B,
        advantage_B=lay.per_row(case.numbers("advantages"), valid_N) if case.has("advantages") else prior.advantage_B,
        proximal_N=prior.proximal_N,
        reference_N=case.some("reference_policy_logprobs"),
        reward_B=reward_B,
    ), sample_B


def _loss(case: Case) -> list[Said]:
    inputs, sample_B = _inputs(case, "curr_logprobs")
    totals = None
    if case.has("global_valid_toks"):
        totals = Counts(*(int(case.raw(key)) for key in ("global_valid_toks", "global_valid_seqs")))
    result, found = loss(method(case), inputs, "grad_curr_logprobs", totals=totals)
    logged = nemo_rl.loss_metrics(
        current_N=inputs.current_N,
        proximal_N=inputs.proximal_N,
        rollout_N=inputs.rollout_N,
        valid_N=inputs.valid_N,
        row_N=inputs.row_N,
        length_B=inputs.length_B,
        options=_options(case),
        loss=result.loss.total.detach(),
        reference_N=inputs.reference_N,
        reward_B=inputs.reward_B,
        sample_B=sample_B,
        totals=totals,
    )
    weights = [Said(("weights",), result.applied.weight_N, where=inputs.valid_N)]
    return [*found, *weights, *metrics(logged, "metrics")]


def _filter(case: Case) -> list[Said]:
    inputs, sample_B = _inputs(case, "prev_logprobs")
    keep_N = evaluate(method(case), inputs).applied.keep_N
    logged = nemo_rl.sequence_filter_metrics(
        proximal_N=inputs.proximal_N,
        rollout_N=inputs.rollout_N,
        valid_N=inputs.valid_N,
        row_N=inputs.row_N,
        length_B=inputs.length_B,
        reward_B=inputs.reward_B,
        threshold=case.config["seq_logprob_error_threshold"],
        sample_B=sample_B,
    )
    stays_B = logged.pop("sample_mask")
    return [
        Said(("sample_mask",), stays_B),
        Said(("sample_mask",), keep_N, where=inputs.valid_N, row_N=inputs.row_N),
        *metrics(logged, "metrics"),
    ]
