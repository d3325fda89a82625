"""What other methods would have made of a batch at its first update: many methods, one look at what they share.

At the first update the current policy is the proximal one, unless a method guesses its proximal policy. Only the policy
term is asked: no KL, entropy or other terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trimtab.correction import Correction, LogRatio, WeightRule, correct_given, log_ratio, summarise_all
from trimtab.correction.correct import Keep
from trimtab.method.evaluate import Applied, Coefficients, loglinear, loss_of, nothing
from trimtab.method.inputs import Inputs
from trimtab.method.rules import Stage, stages
from trimtab.objective.aggregate import Counts, row_coefficients
from trimtab.objective.surrogate import Surrogate
from trimtab.spec import (
    AdvantageKl,
    Aggregate,
    Algo,
    Denominator,
    Level,
    LossName,
    LossSpec,
    MethodSpec,
    Pair,
    Proximal,
    RatioLevel,
    TisMode,
)

Figures = dict[str, float]

EXP_LIMIT = 88.0
"""Log-ratios whose exp is finite in float32; see ``loss_of`` on rejected ones beyond."""


def policy_term(method: MethodSpec) -> MethodSpec:
    """The method without its other terms."""
    loss = replace(
        method.loss, kl_coef=0.0, entropy_coef=0.0, log_ratio_penalty=0.0, positive_nll_coef=0.0, top_entropy=1.0,
        advantage_kl=AdvantageKl.none, advantage_kl_coef=0.0,
    )  # fmt: skip
    return replace(method, loss=loss)


class Shadows:
    """Resolved methods, made ready once and asked about each batch."""

    def __init__(self, methods: Mapping[str, MethodSpec]) -> None:
        self._shadows = {name: _prepared(policy_term(method)) for name, method in methods.items()}

    def __call__(self, inputs: Inputs) -> dict[str, Figures]:
        """Of each method: kept_token_fraction, kept_seq_fraction, ess, saturated_fraction, weight_mean, pg_loss.

        ``inputs.proximal_N`` holds the policy's log-probs before the first update; ``current_N`` is not looked at. The
        first five are of the method's corrections, also where it only measures them. Where the weight is the ratio of
        the loss (bypass), they are of that ratio, saturated where the loss clips it. pg_loss is the policy term at the
        first update, as ``evaluate`` gives it.
        """
        start = Start(inputs)
        corrections = {shadow.correction_key: start.correction(shadow) for shadow in self._shadows.values()}
        summaries = dict(zip(corrections, summarise_all(list(corrections.values())), strict=True))
        found = dict[str, Figures]()
        for name, shadow in self._shadows.items():
            correction, summary = corrections[shadow.correction_key], summaries[shadow.correction_key]
            found[name] = {key.removeprefix("mis_"): value for key, value in summary.items()}
            found[name]["pg_loss"] = _loss(start, shadow, correction)
            if shadow.inside:
                found[name]["saturated_fraction"] = start.tokens(shadow).clipped / max(correction.given.rows.tokens, 1)
        return found


@dataclass(frozen=True)
class Shadow:
    """A method as it is asked, and as it counts ``every`` token. ``weight``: a factor of the loss, or ``inside`` it.

    ``first``: all rules on the pair of the weight; ``others``: on other pairs, where those tell something else. The
    keys are equal for methods that share a correction, or the loss of each token. ``over_rows``: the loss of a token
    depends on others; ``folds``: on weights, too.
    """

    method: MethodSpec
    every: MethodSpec
    weight: WeightRule | None
    inside: bool
    first: Stage
    others: tuple[Stage, ...]
    correction_key: str
    loss_key: str
    over_rows: bool
    folds: bool


def _prepared(method: MethodSpec) -> Shadow:
    first, *rest = stages(method)
    others = list[Stage]()
    for stage in rest:
        if method.algo.proximal is Proximal.loglinear:
            others.append(stage)
        elif stage.pair is not Pair.current_proximal:  # whose policies are equal, which every rule keeps
            first = replace(first, reject=(*first.reject, *stage.reject))
    ratio = _ratio(method)
    weight = first.weight if ratio is None else ratio
    folds = method.loss.name in (LossName.gmpo, LossName.vespo)
    anchor = "rollout" if method.algo.name is Algo.bypass else method.algo.proximal.name
    if anchor == Proximal.recompute.name:
        method = _at_ratio_one(method)
    return Shadow(
        method=method,
        every=replace(method, loss=replace(method.loss, denominator=Denominator.all)),
        weight=weight,
        inside=ratio is not None,
        first=first,
        others=tuple(others),
        correction_key=f"{method.algo.proximal} {weight} {first} {others}",
        loss_key=f"{anchor} {_unread(method.loss)}",
        over_rows=folds or method.loss.ratio_level is not RatioLevel.token,
        folds=folds,
    )


def _at_ratio_one(method: MethodSpec) -> MethodSpec:
    """A simpler method with the same loss where current and anchor are equal: PPO's is -A there, at any level."""
    loss = method.loss
    if loss.name is not LossName.ppo_clip or any(x is not None and x < 1 for x in (loss.ratio_cap, loss.dual_clip)):
        return method
    plain = LossSpec(
        name=LossName.importance, aggregate=loss.aggregate, sum_constant=loss.sum_constant, denominator=loss.denominator
    )
    return replace(method, loss=plain)


def _unread(loss: LossSpec) -> LossSpec:
    """Without what the loss of a token, unweighted and with every token kept, does not depend on."""
    plain = LossSpec()
    return replace(
        loss, aggregate=plain.aggregate, sum_constant=None, denominator=plain.denominator,
        reject_terms=plain.reject_terms, kl_value=plain.kl_value, kl_gradient=plain.kl_gradient,
        kl_importance=plain.kl_importance, kl_input_clamp=None, kl_clamp=None,
    )  # fmt: skip


def _ratio(method: MethodSpec) -> WeightRule | None:
    """The importance weight that is inside the loss: current/rollout, in bypass."""
    if method.algo.name is not Algo.bypass or method.loss.name is LossName.reinforce:
        return None
    level = Level.token if method.loss.ratio_level is RatioLevel.token else Level.geometric
    return WeightRule(level, TisMode.unbounded, None, None, clamp=method.loss.log_ratio_clamp)


@dataclass(frozen=True)
class Tokens:
    """The loss of each of the M valid tokens, all kept, with weights of 1; its row sums; how many are clipped."""

    loss_M: Tensor
    loss_B: Tensor
    clipped: int


@dataclass
class Start:
    """A batch before its first update, with what methods share computed once."""

    inputs: Inputs
    _batches: dict[Proximal, Inputs] = field(default_factory=dict)
    _given: dict[tuple[Pair, Proximal], LogRatio] = field(default_factory=dict)
    _corrections: dict[str, Correction] = field(default_factory=dict)
    _coefficients: dict[tuple[Aggregate, float | None], Tensor] = field(default_factory=dict)
    _tokens: dict[str, Tokens] = field(default_factory=dict)

    def batch(self, proximal: Proximal) -> Inputs:
        """What a method sees: current = proximal, but for one that guesses its proximal policy."""
        if proximal not in self._batches:
            given = self.inputs
            assert given.proximal_N is not None
            current_N = proximal_N = given.proximal_N.detach()
            if proximal is Proximal.loglinear:
                assert given.lag_N is not None
                proximal_N = loglinear(current_N, given.rollout_N, given.lag_N)
            self._batches[proximal] = replace(given, current_N=current_N, proximal_N=proximal_N, entropy_N=None)
        return self._batches[proximal]

    def given(self, pair: Pair, proximal: Proximal) -> LogRatio:
        """The log-ratio of a pair of policies at each valid token."""
        if proximal is Proximal.recompute and pair is Pair.current_rollout:
            pair = Pair.proximal_rollout
        if (pair, proximal) not in self._given:
            batch = self.batch(proximal)
            assert batch.proximal_N is not None
            match pair:
                case Pair.proximal_rollout:
                    two = batch.proximal_N, batch.rollout_N
                case Pair.current_rollout:
                    two = batch.current_N, batch.rollout_N
                case Pair.current_proximal:
                    two = batch.current_N, batch.proximal_N
            self._given[pair, proximal] = log_ratio(*two, batch.valid_N, batch.length_B)
        return self._given[pair, proximal]

    def correction(self, shadow: Shadow) -> Correction:
        """The method's corrections together: once for the methods that share them."""
        if shadow.correction_key not in self._corrections:
            first, proximal, advantage_B = shadow.first, shadow.method.algo.proximal, self.inputs.advantage_B
            made = correct_given(
                self.given(first.pair, proximal), weight=shadow.weight, reject=first.reject, veto=first.veto,
                m2=first.m2, advantage_B=advantage_B,
            )  # fmt: skip
            for stage in shadow.others:
                other = correct_given(
                    self.given(stage.pair, proximal), weight=None, reject=stage.reject, advantage_B=advantage_B
                )
                made = replace(made, keep=_both(made.keep, other.keep))
            self._corrections[shadow.correction_key] = made
        return self._corrections[shadow.correction_key]

    def coefficients(self, loss: LossSpec, correction: Correction, kept: bool) -> Tensor:
        """The denominator of each row's tokens, float64 [B]; those of the whole batch once for each way to count."""
        key = (loss.aggregate, loss.sum_constant)
        if not kept and key in self._coefficients:
            return self._coefficients[key]
        rows, keep = correction.given.rows, correction.keep
        count_B = rows.count_B.double()
        if kept:
            count_B = (count_B if keep.token_M is None else rows.sum(keep.token_M)).where(keep.row_B, 0.0)
        total = Counts(int(count_B.sum()), int(count_B.count_nonzero()))
        constant = 1.0 if loss.sum_constant is None else loss.sum_constant
        made_B = row_coefficients(
            count_B, total, aggregate=loss.aggregate, constant=constant, group_B=self.inputs.group_B
        )
        if not kept:
            self._coefficients[key] = made_B
        return made_B

    def tokens(self, shadow: Shadow) -> Tokens:
        """The loss of each token: once for the methods that share it."""
        if shadow.loss_key not in self._tokens:
            ones = nothing(self.inputs.rollout_N, self.inputs.valid_N)
            batch, unit = self.batch(shadow.method.algo.proximal), Coefficients(ones.weight_N, ones.weight_N)
            surrogate = loss_of(shadow.every, batch, ones, unit).surrogate
            given = self.given(shadow.first.pair, shadow.method.algo.proximal)
            loss_M = surrogate.loss_N if given.at_M is None else surrogate.loss_N[given.at_M]
            made = Tokens(loss_M, given.rows.sum(loss_M), _clipped(surrogate))
            self._tokens[shadow.loss_key] = made
        return self._tokens[shadow.loss_key]


def _both(one: Keep, other: Keep) -> Keep:
    tokens = [token_M for token_M in (one.token_M, other.token_M) if token_M is not None]
    token_M = None if not tokens else tokens[0] if len(tokens) == 1 else tokens[0] & tokens[1]
    return Keep(one.row_B & other.row_B, token_M)


def _clipped(surrogate: Surrogate) -> int:
    return int((surrogate.clipped_low_N | surrogate.clipped_high_N | surrogate.dual_clipped_N).count_nonzero())


def _loss(start: Start, shadow: Shadow, correction: Correction) -> float:
    loss, applies = shadow.method.loss, not shadow.method.algo.metrics_only
    weighted = applies and not shadow.inside and shadow.weight is not None
    kept = applies and loss.denominator is Denominator.kept
    coefficient_B = start.coefficients(loss, correction, kept)
    overflows = not correction.given.extremes.magnitude < EXP_LIMIT
    if not ((shadow.folds and weighted) or (shadow.over_rows and (kept or overflows))):
        loss_B = _kept_loss(start.tokens(shadow), correction, weighted) if applies else start.tokens(shadow).loss_B
        return float(coefficient_B @ loss_B)
    batch = start.batch(shadow.method.algo.proximal)  # weights or keeps shape the surrogate
    weight_N = correction.weight_N if weighted else torch.ones_like(batch.rollout_N)
    coefficient_N = coefficient_B.to(weight_N.dtype)[batch.row_N]
    coefficients = Coefficients(coefficient_N, coefficient_N)
    return float(loss_of(shadow.method, batch, Applied(weight_N, correction.keep_N), coefficients).loss.policy)


def _kept_loss(tokens: Tokens, correction: Correction, weighted: bool) -> Tensor:
    """Row sums of the weighted loss of kept tokens, float64 [B]; what is rejected may be infinite."""
    rows, keep, weights = correction.given.rows, correction.keep, correction.weights if weighted else None
    loss_M, by_row = tokens.loss_M, weights is None or weights.rule.level is not Level.token
    if by_row and keep.token_M is None:
        sum_B = tokens.loss_B
    else:
        if weights is not None and not by_row:
            loss_M = loss_M * weights.bounded_L
        sum_B = rows.sum(loss_M if keep.token_M is None else loss_M.where(keep.token_M, 0.0))
    if weights is not None:
        sum_B = sum_B * weights.bounded_L / correction.factor if by_row else sum_B / correction.factor
    return sum_B.where(keep.row_B, 0.0)
