"""Which options have no effect, and why: stage by stage, the keys that a configuration does not read."""

from __future__ import annotations

from typing import Any, Mapping

from trimtab.config.keys import value_of
from trimtab.config.stage import Stage, Unread
from trimtab.config.unread_run import STAGES as RUN
from trimtab.spec import (
    AdvantageKl,
    Aggregate,
    Algo,
    Denominator,
    KlEstimator,
    KlImportance,
    LossName,
    LossSpec,
    Overlong,
    RatioLevel,
    RunSpec,
    Scale,
    TisMode,
)

TIS = (
    "mis.tis_level", "mis.tis_lower_bound", "mis.tis_upper_bound", "mis.tis_batch_normalize", "mis.log_ratio_clamp",
)  # fmt: skip
RS = ("mis.rs_level", "mis.rs_lower_bound", "mis.rs_upper_bound")
MIS = (
    "mis.tis_mode", *TIS, "mis.use_rs", *RS, "mis.rs_veto_threshold", "mis.reject", "mis.m2_threshold", "mis.numerator",
)  # fmt: skip
CLIP = ("loss.clip_low", "loss.clip_high", "loss.dual_clip", "loss.ratio_cap")
KL = ("loss.kl_value", "loss.kl_gradient", "loss.kl_importance", "loss.kl_clamp", "loss.kl_input_clamp")
READ_BY: Mapping[str, frozenset[LossName]] = {
    "loss.ratio_level": frozenset({LossName.ppo_clip, LossName.importance, LossName.cispo, LossName.sapo}),
    "loss.clip_low": frozenset({LossName.ppo_clip, LossName.cispo, LossName.gmpo, LossName.dppo_tv, LossName.dppo_kl}),
    "loss.clip_high": frozenset({LossName.ppo_clip, LossName.cispo, LossName.gmpo, LossName.dppo_tv, LossName.dppo_kl}),
    "loss.dual_clip": frozenset({LossName.ppo_clip}),
    "loss.ratio_cap": frozenset({LossName.ppo_clip, LossName.dppo_tv, LossName.dppo_kl}),
    "loss.sapo_tau_positive": frozenset({LossName.sapo}),
    "loss.sapo_tau_negative": frozenset({LossName.sapo}),
    "loss.vespo_positive": frozenset({LossName.vespo}),
    "loss.vespo_negative": frozenset({LossName.vespo}),
}
"""Which losses read an option; the others of the section are every loss's."""
CLAMPED = frozenset(LossName) - {LossName.reinforce, LossName.vespo}
"""Losses that exponentiate a log-ratio within loss.log_ratio_clamp."""
AT_RATIO_1: Mapping[LossName, LossName] = {
    LossName.importance: LossName.ppo_clip,
    LossName.cispo: LossName.reinforce,
    LossName.dppo_tv: LossName.reinforce,
    LossName.dppo_kl: LossName.reinforce,
}
"""What a loss is where current and anchor are equal."""
ANCHOR_BY_ANOTHER_NAME: Mapping[tuple[Algo, KlImportance], KlImportance] = {
    (Algo.bypass, KlImportance.anchor): KlImportance.rollout,
    (Algo.bypass, KlImportance.anchor_live): KlImportance.rollout_live,
    (Algo.on_policy, KlImportance.anchor_live): KlImportance.current_live,
}


OFF: Mapping[str, Any] = {"mis.tis_mode": TisMode.off}


def _on_policy(spec: RunSpec) -> list[Unread]:
    """At a ratio of 1 several losses are one, in value and gradient."""
    loss, weighted = spec.loss, spec.mis.tis_mode is not TisMode.off and not spec.algo.metrics_only
    if spec.algo.name is not Algo.on_policy:
        return []
    found: list[Unread] = []
    same = AT_RATIO_1.get(loss.name, loss.name)
    if loss.name is LossName.vespo and not weighted:
        same = LossName.reinforce
    if same is not loss.name:
        why = f"algo=on_policy has the ratio 1, at which loss.name={loss.name.name} is {same.name}"
        found.append(Unread(why, ("loss.name",), {"loss.name": same}))
    if loss.ratio_level is RatioLevel.sequence_token:
        found.append(Unread("algo=on_policy has the ratio 1, whose tokens keep their gradient", ("loss.ratio_level",)))
    return found


def _algo(spec: RunSpec) -> list[Unread]:
    found: list[Unread] = []
    match spec.algo.name:
        case Algo.standard:
            found.append(Unread("algo=standard reads no mis.* key", MIS, OFF))
        case Algo.bypass if spec.loss.name is not LossName.reinforce:
            why = "algo=bypass reads no tis_* key: its ratio current/rollout already is the importance weight"
            found.append(Unread(why, ("mis.tis_mode", *TIS), OFF))
        case Algo.on_policy:
            why = "algo=on_policy has the ratio current/current, which is 1"
            clamp = () if _kl_exponentiates(spec.loss) else ("loss.log_ratio_clamp",)
            found.append(Unread(why, (*CLIP, *clamp, "loss.log_ratio_penalty")))
        case Algo.bypass | Algo.decoupled:
            pass
    if spec.algo.name is not Algo.decoupled:
        found.append(Unread("only algo=decoupled compares with a proximal policy of its own", ("algo.proximal",)))
    return found + _anchor(spec)


def _anchor(spec: RunSpec) -> list[Unread]:
    """Terms that look at current/anchor: 1 under on_policy, current/rollout by another name under bypass."""
    algo, loss, found = spec.algo.name, spec.loss, list[Unread]()
    same = algo is Algo.on_policy
    if same and loss.advantage_kl is AdvantageKl.anchor:
        found.append(Unread("algo=on_policy has current - anchor = 0", ("loss.advantage_kl", "loss.advantage_kl_coef")))
    if same and loss.kl_importance is KlImportance.anchor:
        found.append(Unread("algo=on_policy has current/anchor = 1", ("loss.kl_importance",)))
    renamed = ANCHOR_BY_ANOTHER_NAME.get((algo, loss.kl_importance))
    if renamed is not None:
        found.append(Unread("the same weight", ("loss.kl_importance",), {"loss.kl_importance": renamed}, quiet=True))
    return found


def _surrogate(spec: RunSpec) -> list[Unread]:
    name = spec.loss.name
    unread = tuple(key for key, names in READ_BY.items() if name not in names)
    found = [Unread(f"loss.name={name.name} does not read it", unread)]
    if name not in CLAMPED and spec.loss.log_ratio_penalty == 0 and not _kl_exponentiates(spec.loss):
        found.append(Unread(f"loss.name={name.name} exponentiates no single ratio", ("loss.log_ratio_clamp",)))
    return found


def _kl_exponentiates(loss: LossSpec) -> bool:
    """Whether the KL term takes an exp of a log-ratio that may be other than 0."""
    weighted = loss.kl_importance not in (KlImportance.none, KlImportance.current_live)
    return loss.kl_coef != 0 and (weighted or KlEstimator.k3 in (loss.kl_value, loss.kl_gradient))


def _mis(spec: RunSpec) -> list[Unread]:
    found: list[Unread] = []
    if spec.mis.tis_mode is TisMode.off:
        found.append(Unread("tis_mode=off has no weights", TIS))
    if spec.mis.tis_mode is TisMode.unbounded:
        found.append(Unread("tis_mode=unbounded has no bounds", ("mis.tis_lower_bound", "mis.tis_upper_bound")))
    if spec.mis.tis_mode is TisMode.truncate:
        passed_on = spec.mis.use_rs and spec.mis.rs_level is spec.mis.tis_level and spec.mis.rs_lower_bound is None
        found.append(Unread("tis_mode=truncate has no lower bound", ("mis.tis_lower_bound",), quiet=passed_on))
    if not spec.mis.use_rs:
        pairs = (("mis.tis_lower_bound", "mis.rs_lower_bound"), ("mis.tis_upper_bound", "mis.rs_upper_bound"))
        echo = tuple(rs for tis, rs in pairs if value_of(spec, rs) == value_of(spec, tis))  # as miles' presets have it
        found.append(Unread("mis.use_rs=false rejects nothing", tuple(key for key in RS if key not in echo)))
        found.append(Unread("mis.use_rs=false rejects nothing", echo, quiet=True))
    if spec.mis.tis_mode is TisMode.off and not rejects(spec):
        found.append(Unread("there is no correction to measure only", ("algo.metrics_only",)))
    return found


def _rejection(spec: RunSpec) -> list[Unread]:
    """What counts rejected tokens, and what they lose."""
    loss = spec.loss
    if not rejects(spec):
        why = "nothing is rejected (tis_mode is not mask, rs=none, veto=none, no mis.reject, no mis.m2_threshold)"
        return [Unread(why, ("loss.denominator", "loss.reject_terms"))]
    if spec.algo.metrics_only:
        why = "algo.metrics_only=true rejects nothing from the loss"
        return [Unread(why, ("loss.denominator", "loss.reject_terms"))]
    pulls = loss.log_ratio_penalty != 0 and loss.denominator is Denominator.kept  # its tokens are all, its counts not
    if loss.kl_coef == 0 and loss.entropy_coef == 0 and not pulls:
        return [Unread("the policy term is the only one (no KL, no entropy)", ("loss.reject_terms",))]
    return []


def _loss(spec: RunSpec) -> list[Unread]:
    loss, found = spec.loss, list[Unread]()
    if loss.kl_coef == 0:
        found.append(Unread("loss.kl_coef=0", KL))
    if loss.advantage_kl is AdvantageKl.none:
        found.append(Unread("loss.advantage_kl=none takes nothing from the advantage", ("loss.advantage_kl_coef",)))
    elif loss.advantage_kl_coef == 0:
        found.append(Unread("loss.advantage_kl_coef=0 takes nothing from the advantage", ("loss.advantage_kl",)))
    if loss.aggregate is not Aggregate.sequence_sum:
        found.append(Unread(f"loss.aggregate={loss.aggregate.name} has no constant", ("loss.sum_constant",)))
    return found


def _advantage(spec: RunSpec) -> list[Unread]:
    advantage, found = spec.advantage, list[Unread]()
    if advantage.scale is Scale.none:
        found.append(Unread("advantage.scale=none divides by nothing", ("advantage.epsilon",)))
    if advantage.overlong is Overlong.punish and advantage.overlong_penalty == 0:
        keys = ("advantage.overlong", "advantage.overlong_buffer", "advantage.overlong_penalty")
        found.append(Unread("advantage.overlong_penalty=0 punishes nothing", keys))
    elif advantage.overlong is not Overlong.punish:
        why = f"advantage.overlong={advantage.overlong.name} punishes nothing"
        found.append(Unread(why, ("advantage.overlong_buffer", "advantage.overlong_penalty")))
    return found


# Each stage sees what the ones before it left: bypass switches tis_mode off, and then tis_level goes too.
FIRST: tuple[Stage, ...] = (_on_policy, _surrogate, _algo)
STAGES: tuple[Stage, ...] = (
    *FIRST, _mis, _rejection, _loss, _advantage, *RUN,
)  # fmt: skip


def rejects(spec: RunSpec) -> bool:
    """Whether any rule can reject a token."""
    mis = spec.mis
    single = mis.use_rs or mis.rs_veto_threshold is not None or mis.m2_threshold is not None
    return mis.tis_mode is TisMode.mask or single or bool(mis.reject)
