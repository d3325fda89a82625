"""The corrections a method asks for: which policies are compared, by which weight rule and which rejections."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.correction import RejectRule, WeightRule
from trimtab.spec import Algo, MethodSpec, MisSpec, Pair, Proximal, RejectSpec, TisMode


@dataclass(frozen=True)
class Stage:
    """One call of ``correct``: a pair of policies and the rules that look at its log-ratio.

    ``moving``: it changes with each update, because the current policy takes part.
    """

    pair: Pair
    weight: WeightRule | None = None
    reject: tuple[RejectRule, ...] = ()
    veto: float | None = None
    m2: float | None = None
    moving: bool = False

    @property
    def rejects(self) -> bool:
        masks = self.weight is not None and self.weight.mode is TisMode.mask
        return masks or bool(self.reject) or self.veto is not None or self.m2 is not None


def stages(method: MethodSpec) -> tuple[Stage, ...]:
    """The stages of a resolved method: first the weights' own, then one for each other pair that a rule names.

    The first is there even if it has no rule: the mismatch metrics are those of its pair.
    """
    mis, base = method.mis, _base(method)
    named = {pair: tuple(_rule(r) for r in mis.reject if (r.pair or base) is pair) for pair in Pair}
    ratio = (_ratio(mis),) if mis.use_rs else ()
    guessed = method.algo.proximal is Proximal.loglinear
    moving = {pair: pair is not Pair.proximal_rollout or guessed for pair in Pair}
    first = Stage(
        base, _weight(mis), (*ratio, *named[base]), mis.rs_veto_threshold, mis.m2_threshold, moving=moving[base]
    )
    others = (pair for pair in Pair if pair is not base and named[pair])
    return (first, *(Stage(pair, reject=named[pair], moving=moving[pair]) for pair in others))


def _base(method: MethodSpec) -> Pair:
    match method.algo.name:
        case Algo.standard | Algo.decoupled:
            return Pair.proximal_rollout
        case Algo.bypass | Algo.on_policy:
            return Pair.current_rollout


def _weight(mis: MisSpec) -> WeightRule | None:
    if mis.tis_mode is TisMode.off:
        return None
    return WeightRule(
        level=mis.tis_level,
        mode=TisMode.off if mis.tis_mode is TisMode.unbounded else mis.tis_mode,
        lower=mis.tis_lower_bound,
        upper=mis.tis_upper_bound,
        batch_normalize=mis.tis_batch_normalize,
        clamp=mis.log_ratio_clamp,
    )


def _ratio(mis: MisSpec) -> RejectRule:
    lower = 0.0 if mis.rs_lower_bound is None else mis.rs_lower_bound
    upper = math.inf if mis.rs_upper_bound is None else mis.rs_upper_bound
    return RejectRule.ratio(mis.rs_level, lower, upper)


def _rule(spec: RejectSpec) -> RejectRule:
    return RejectRule(
        statistic=spec.statistic,
        level=spec.level,
        over_tokens=spec.over_tokens,
        lower=-math.inf if spec.lower is None else spec.lower,
        upper=math.inf if spec.upper is None else spec.upper,
        inverse=spec.inverse,
        clamp=spec.clamp,
        sign=spec.sign,
    )
