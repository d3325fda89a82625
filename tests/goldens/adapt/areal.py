"""AReaL: ``ppo_actor_loss_fn`` with rejection sampling, and M2PO; float32, padded B x T lists or packed rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from adapt.shared import Case, Layout, Said, choice, layout, layout_of, loss, metrics, ratio_inputs
from torch import Tensor

from trimtab.method import Inputs, Result, evaluate
from trimtab.objective.aggregate import count
from trimtab.peers import areal
from trimtab.spec import (
    Algo,
    AlgoSpec,
    Denominator,
    Level,
    LossSpec,
    MethodSpec,
    MisSpec,
    OverTokens,
    RatioLevel,
    RejectSpec,
    Statistic,
    TisMode,
)


def said(case: Case) -> list[Said]:
    return _m2po(case) if "m2_threshold" in case.config else _loss(case)


def method(case: Case) -> MethodSpec:
    if "m2_threshold" in case.config:
        mis = MisSpec(tis_mode=TisMode.off, m2_threshold=case.config["m2_threshold"])
        return MethodSpec(AlgoSpec(Algo.decoupled), mis, LossSpec(denominator=Denominator.kept))
    return MethodSpec(AlgoSpec(Algo.decoupled), _mis(case), _loss_spec(case))


# -- config ----------------------------------------------------------------------------------------------------------


def _mis(case: Case) -> MisSpec:
    if not case.config["rejection_sampling"]:
        return MisSpec(tis_mode=TisMode.off, log_ratio_clamp=None)
    given = areal.rejection_sampling(case.config["rejection_sampling"])
    by_row, ratio = given.level is areal.Unit.sequence, given.metric is areal.Metric.ratio
    # a row's weight is the geometric mean, whatever the aggregate; with a KL as metric, each token has its own
    weights = MisSpec(
        tis_mode=TisMode.unbounded,
        tis_level=Level.geometric if by_row and ratio else Level.token,
        log_ratio_clamp=None,
    )
    lower, upper = given.lower, given.upper
    if given.action is areal.Action.clamp:
        low = 0.0 if lower is None else lower
        return replace(weights, tis_mode=TisMode.clip, tis_lower_bound=low, tis_upper_bound=upper)
    name = given.metric.value.removeprefix("kl_")
    rule = RejectSpec(
        statistic=choice(Statistic, name),
        level=Level.sequence if by_row else Level.token,
        over_tokens=choice(OverTokens, given.agg.value) if by_row else None,
        lower=lower,
        upper=upper,
        inverse=name == "k3",
    )
    return replace(weights, reject=[rule])


def _loss_spec(case: Case) -> LossSpec:
    config = case.config
    return LossSpec(
        ratio_level=choice(RatioLevel, config["importance_sampling_level"]),
        clip_low=config["eps_clip"],
        clip_high=config["eps_clip"] if config["eps_clip_higher"] is None else config["eps_clip_higher"],
        dual_clip=config["c_clip"],
        log_ratio_clamp=None,
        denominator=Denominator.kept,  # GSPO's means are over kept tokens; the divisor is handed over
    )


# -- what trimtab says -----------------------------------------------------------------------------------------------


def _lay(case: Case) -> Layout:
    if case.has("cu_seqlens"):
        return layout_of(torch.tensor(case.raw("cu_seqlens")).diff())
    return layout(case.raw("loss_mask"))


def _m2po(case: Case) -> list[Said]:
    valid_N = case.flags("loss_mask")
    applied = evaluate(
        method(case), ratio_inputs(case, "prox_logp", "old_logp", valid_N, layout(case.raw("loss_mask")))
    )
    return [Said(("mask",), applied.applied.keep_N)]


def _loss(case: Case) -> list[Said]:
    lay, valid_N, spec = _lay(case), case.flags("loss_mask"), method(case)
    advantage_B = lay.per_row(case.numbers("advantages"), valid_N)
    inputs = replace(
        ratio_inputs(case, "proximal_logprobs", "old_logprobs", valid_N, lay, advantage_B),
        current_N=case.numbers("logprobs"),
    )
    _, totals = count(valid_N, lay.row_N, lay.rows)  # rejected tokens stay in the denominator
    result, found = loss(spec, inputs, "grad_logprobs", totals=totals)
    behave = _behave(case, spec, inputs, result) if case.config["rejection_sampling"] else None
    stat = areal.actor_stats(
        current_N=inputs.current_N,
        proximal_N=inputs.proximal_N,
        rollout_N=inputs.rollout_N,
        valid_N=valid_N,
        row_N=lay.row_N,
        length_B=lay.length_B,
        advantage_B=advantage_B,
        options=areal.Options(
            spec.loss.ratio_level, case.config["eps_clip"], case.config["eps_clip_higher"], case.config["c_clip"]
        ),
        behave=behave,
    )
    tokens = {name: value for name, value in stat.items() if isinstance(value, Tensor)}
    shares = {name: value for name, value in stat.items() if name not in tokens}
    found += [*metrics(tokens, "stat", where=valid_N), *metrics(shares, "stat"), *metrics(shares)]
    if behave is None:
        return found
    kept_N = valid_N & behave.keep_N
    return [
        *found,
        Said(("mask",), kept_N),
        Said(("weights",), torch.where(kept_N, behave.weight_N, 0.0)),
    ]


def _behave(case: Case, spec: MethodSpec, inputs: Inputs, result: Result) -> areal.Behave:
    """What rejection sampling decided; weights without their bounds tell which ones those have changed."""
    raw_N = None
    if case.config["rejection_sampling"]["action"] == "clamp":
        raw = replace(spec.mis, tis_mode=TisMode.unbounded)
        raw_N = evaluate(replace(spec, mis=raw), inputs).applied.weight_N
    return areal.Behave(result.applied.keep_N, result.applied.weight_N, raw_N)
