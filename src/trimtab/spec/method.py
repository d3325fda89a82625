"""A method: which policies are compared, how they are corrected, what is minimised. The home of its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from trimtab.spec.choices import (
    AdvantageKl,
    Aggregate,
    Algo,
    Baseline,
    Denominator,
    EqualGroups,
    KlEstimator,
    KlImportance,
    Level,
    LossName,
    Numerator,
    Overlong,
    OverTokens,
    Pair,
    Proximal,
    RatioLevel,
    RejectTerms,
    Scale,
    Sign,
    Statistic,
    TisMode,
)
from trimtab.spec.option import opt

LOG_RATIO_CLAMP = 20.0
"""Largest |log-ratio|, in nats, whose exp a weight or a loss uses: exp(20) = 4.9e8 is far beyond any bound or clip."""


@dataclass(frozen=True)
class AlgoSpec:
    name: Algo = opt(Algo.decoupled, "which policies the loss compares; see docs/methods.md")
    proximal: Proximal = opt(
        Proximal.recompute, "proximal log-probs: recomputed by a forward, or interpolated between rollout and current"
    )
    metrics_only: bool = opt(False, "measure the mismatch and the correction, never touch the loss")


@dataclass(frozen=True)
class RejectSpec:
    """One rejection rule: keep what has lower <= statistic <= upper, both inclusive; docs/methods.md, "Rejection"."""

    statistic: Statistic = opt(Statistic.ratio, "what is bounded, of the log-ratio d of a token")
    level: Level = opt(Level.sequence, "what one decision covers: token or sequence")
    over_tokens: Optional[OverTokens] = opt(None, "level=sequence: how the tokens' statistics become the response's")
    lower: Optional[float] = opt(None, "smallest accepted statistic")
    upper: Optional[float] = opt(None, "largest accepted statistic")
    inverse: bool = opt(False, "bound rollout/proximal instead of proximal/rollout: d changes its sign")
    clamp: Optional[float] = opt(None, "bound on each token's |d| before the statistic; null for none")
    sign: Sign = opt(Sign.any, "which advantages the rule looks at; the others are kept")
    pair: Optional[Pair] = opt(None, "policies of d; empty: mis.numerator over rollout")


@dataclass(frozen=True)
class MisSpec:
    """The correction; names as in the miles table. None means: resolved from the level (config/resolve.py)."""

    tis_mode: TisMode = opt(TisMode.truncate, "how importance weights are bounded")
    tis_level: Level = opt(Level.token, "what one importance weight covers")
    tis_lower_bound: Optional[float] = opt(None, "lower bound of the weight (clip, mask, zero); 0 for none")
    tis_upper_bound: Optional[float] = opt(None, "upper bound of the weight")
    tis_batch_normalize: bool = opt(False, "divide weights by their batch mean")
    use_rs: bool = opt(False, "rejection sampling: leave out what lies outside the rs bounds")
    rs_level: Level = opt(Level.token, "what one rejection decision covers")
    rs_lower_bound: Optional[float] = opt(None, "smallest accepted ratio proximal/rollout; 0 for none")
    rs_upper_bound: Optional[float] = opt(None, "largest accepted ratio proximal/rollout")
    rs_veto_threshold: Optional[float] = opt(None, "reject a sequence holding a token with ratio below this")
    reject: List[RejectSpec] = opt([], "rejection rules of any statistic, chained with use_rs and the veto")
    m2_threshold: Optional[float] = opt(
        None, "M2PO: leave out the tokens of largest squared log-ratio until the mean of the rest is below this"
    )
    log_ratio_clamp: Optional[float] = opt(
        LOG_RATIO_CLAMP, "bound on a weight's |log-ratio|, against overflow; null: what the dtype can hold"
    )
    numerator: Optional[Numerator] = opt(None, "policy in the numerator; empty: proximal if decoupled, else current")


@dataclass(frozen=True)
class LossSpec:
    name: LossName = opt(LossName.ppo_clip, "the per-token surrogate; see docs/methods.md")
    ratio_level: RatioLevel = opt(RatioLevel.token, "what one ratio current/anchor covers; sequence is GSPO")
    clip_low: float = opt(0.2, "lower bound of the clip: ratio >= 1 - clip_low; other losses: docs/methods.md")
    clip_high: float = opt(0.2, "upper bound of the clip: ratio <= 1 + clip_high; other losses: docs/methods.md")
    dual_clip: Optional[float] = opt(None, "cap of the loss at dual_clip * |advantage| for negative advantages (> 1)")
    log_ratio_clamp: Optional[float] = opt(
        LOG_RATIO_CLAMP, "bound on the |log-ratio| current - anchor, against overflow; null: what the dtype can hold"
    )
    ratio_cap: Optional[float] = opt(None, "bound on the unclipped ratio, on both signs of the advantage")
    sapo_tau_positive: float = opt(1.0, "sapo: temperature of the gate for positive advantages")
    sapo_tau_negative: float = opt(1.05, "sapo: temperature of the gate for the others")
    vespo_positive: List[float] = opt([2.0, 3.0], "vespo: exponent and rate of the weight for advantages >= 0")
    vespo_negative: List[float] = opt([3.0, 2.0], "vespo: exponent and rate of the weight for advantages < 0")
    aggregate: Aggregate = opt(Aggregate.token_mean, "how token losses become one number")
    sum_constant: Optional[float] = opt(None, "divisor of sequence_sum; empty: rollout.max_tokens")
    denominator: Denominator = opt(Denominator.all, "whether rejected tokens count in the denominator")
    reject_terms: RejectTerms = opt(
        RejectTerms.policy, "which terms a rejection removes: policy, or KL and entropy too"
    )
    kl_coef: float = opt(0.0, "weight of the KL penalty to the reference")
    kl_value: KlEstimator = opt(KlEstimator.k3, "estimator of the KL's reported value")
    kl_gradient: KlEstimator = opt(KlEstimator.k2, "estimator whose gradient is used; k2's is that of the true KL")
    kl_importance: KlImportance = opt(
        KlImportance.none, "weight of the KL term for off-policy tokens: current/rollout, current/anchor"
    )
    kl_input_clamp: Optional[float] = opt(None, "bound on |current - reference| before the KL estimate; null for none")
    kl_clamp: Optional[float] = opt(None, "bound on the weighted KL estimate of a token; null for none")
    advantage_kl: AdvantageKl = opt(
        AdvantageKl.none, "KL inside the advantage: current - anchor, or current - reference, taken from it"
    )
    advantage_kl_coef: float = opt(0.0, "weight of the KL inside the advantage")
    log_ratio_penalty: float = opt(0.0, "coefficient of the squared log-ratio current/anchor, a pull to the anchor")
    top_entropy: float = opt(1.0, "share of tokens, those of highest entropy, that the policy term keeps")
    positive_nll_coef: float = opt(0.0, "weight of the log-likelihood of responses with a positive reward")
    entropy_coef: float = opt(0.0, "weight of the entropy bonus")


@dataclass(frozen=True)
class AdvantageSpec:
    baseline: Baseline = opt(Baseline.group_mean, "what is taken from the reward")
    scale: Scale = opt(Scale.std, "what the centred reward is divided by")
    epsilon: float = opt(1e-6, "added to the standard deviation")
    overlong: Overlong = opt(Overlong.keep, "responses cut at max_tokens: keep, drop, or punish by length")
    overlong_buffer: int = opt(0, "punish: the reward falls over this many last tokens before max_tokens")
    overlong_penalty: float = opt(1.0, "punish: what a response of max_tokens loses")
    equal_groups: EqualGroups = opt(EqualGroups.keep, "groups whose rewards are all equal: keep or drop their rows")


@dataclass(frozen=True)
class MethodSpec:
    """What makes a method's loss and gradient, resolved; what ``evaluate`` takes."""

    algo: AlgoSpec = opt(AlgoSpec, "algorithm")
    mis: MisSpec = opt(MisSpec, "correction")
    loss: LossSpec = opt(LossSpec, "objective")
