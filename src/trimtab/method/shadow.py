"""What other methods would have made of a batch at its first update: many methods, one look at what they share.

At the first update the current policy is the proximal one. So current/rollout is proximal/rollout, and a rule on
current/proximal rejects nothing. Only the policy term is asked: no KL, entropy or other terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trimtab.correction import LogRatio, WeightRule, correct_given, log_ratio, summarise
from trimtab.method.evaluate import Applied, Coefficients, denominators, loglinear, loss_of, nothing
from trimtab.method.inputs import Inputs
from trimtab.method.rules import Stage, stages
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


def policy_term(method: MethodSpec) -> MethodSpec:
    """The method without its other terms, and with its corrections applied even if it would only measure them."""
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

        ``inputs.proximal_N`` holds the policy's log-probs before the first update; ``current_N`` is not looked at. Where
        the weight is the ratio of the loss (bypass), the figures are of that ratio, saturated where the loss clips it.
        pg_loss is the policy term at the first update, as ``evaluate`` gives it.
        """
        start = Start(inputs)
        return {name: _figures(start, shadow) for name, shadow in self._shadows.items()}


@dataclass(frozen=True)
class Shadow:
    """A method as it is asked: its stages as one, and ``ratio``, the weight inside its loss, if that is where it is.

    ``loss_key`` is equal for methods whose unweighted losses are. ``over_rows``: the loss of a token depends on others.
    """

    method: MethodSpec
    stage: Stage
    ratio: WeightRule | None
    loss_key: str
    over_rows: bool
    folds_weight: bool


def _prepared(method: MethodSpec) -> Shadow:
    first, *others = stages(method)
    reject = sum((stage.reject for stage in others if stage.pair is not Pair.current_proximal), start=first.reject)
    folds_weight = method.loss.name in (LossName.gmpo, LossName.vespo)
    unread = {"aggregate": Aggregate.token_mean, "sum_constant": None, "denominator": Denominator.all}
    return Shadow(
        method=method,
        stage=replace(first, reject=reject),
        ratio=_ratio(method),
        loss_key=f"{method.algo} {replace(method.loss, **unread)}",
        over_rows=folds_weight or method.loss.ratio_level is not RatioLevel.token,
        folds_weight=folds_weight,
    )


@dataclass
class Start:
    """A batch before its first update, with what methods share computed once."""

    inputs: Inputs
    _batches: dict[Proximal, Inputs] = field(default_factory=dict)
    _given: dict[Proximal, LogRatio] = field(default_factory=dict)
    _coefficients: dict[tuple[Aggregate, float | None], Coefficients] = field(default_factory=dict)
    _surrogates: dict[str, Surrogate] = field(default_factory=dict)

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

    def given(self, proximal: Proximal) -> LogRatio:
        """proximal/rollout, or its guess."""
        if proximal not in self._given:
            batch = self.batch(proximal)
            assert batch.proximal_N is not None
            self._given[proximal] = log_ratio(batch.proximal_N, batch.rollout_N, batch.valid_N, batch.length_B)
        return self._given[proximal]

    def coefficients(self, loss: LossSpec, keep_N: Tensor) -> Coefficients:
        """The denominators; those of the whole batch once for each way to count."""
        if loss.denominator is Denominator.kept:
            return denominators(loss, self.inputs, keep_N)
        key = (loss.aggregate, loss.sum_constant)
        if key not in self._coefficients:
            self._coefficients[key] = denominators(loss, self.inputs, keep_N)
        return self._coefficients[key]

    def unweighted(self, shadow: Shadow) -> Surrogate:
        """The loss of each token, all kept, weights of 1: once for the methods that share it."""
        if shadow.loss_key not in self._surrogates:
            method = shadow.method
            batch, all_ones = self.batch(method.algo.proximal), nothing(self.inputs.rollout_N, self.inputs.valid_N)
            every = replace(method, loss=replace(method.loss, denominator=Denominator.all))
            coefficients = Coefficients(all_ones.weight_N, all_ones.weight_N)
            self._surrogates[shadow.loss_key] = loss_of(every, batch, all_ones, coefficients).surrogate
        return self._surrogates[shadow.loss_key]


def _figures(start: Start, shadow: Shadow) -> Figures:
    stage = shadow.stage
    correction = correct_given(
        start.given(shadow.method.algo.proximal), weight=shadow.ratio or stage.weight, reject=stage.reject,
        veto=stage.veto, m2=stage.m2, advantage_B=start.inputs.advantage_B,
    )  # fmt: skip
    figures = {name.removeprefix("mis_"): value for name, value in summarise(correction).items()}
    weight_N = None if shadow.ratio is not None or stage.weight is None else correction.weight_N
    figures["pg_loss"] = _loss(start, shadow, weight_N, correction.keep_N)
    if shadow.ratio is not None:
        surrogate, valid_N = start.unweighted(shadow), start.inputs.valid_N
        clipped_N = surrogate.clipped_low_N | surrogate.clipped_high_N | surrogate.dual_clipped_N
        figures["saturated_fraction"] = float((clipped_N & valid_N).sum()) / max(correction.given.rows.tokens, 1)
    return figures


def _ratio(method: MethodSpec) -> WeightRule | None:
    """The importance weight that is inside the loss: current/rollout, in bypass."""
    if method.algo.name is not Algo.bypass or method.loss.name is LossName.reinforce:
        return None
    level = Level.token if method.loss.ratio_level is RatioLevel.token else Level.geometric
    return WeightRule(level, TisMode.unbounded, None, None, clamp=method.loss.log_ratio_clamp)


def _loss(start: Start, shadow: Shadow, weight_N: Tensor | None, keep_N: Tensor) -> float:
    loss, batch = shadow.method.loss, start.batch(shadow.method.algo.proximal)
    coefficients = start.coefficients(loss, keep_N)
    folded = shadow.folds_weight and weight_N is not None
    if folded or (shadow.over_rows and loss.denominator is Denominator.kept):  # weights or keeps shape the surrogate
        applied = Applied(torch.ones_like(batch.rollout_N) if weight_N is None else weight_N, keep_N)
        return float(loss_of(shadow.method, batch, applied, coefficients).loss.policy)
    loss_N = start.unweighted(shadow).loss_N
    if weight_N is not None:
        loss_N = loss_N * weight_N
    return float(torch.where(keep_N, loss_N, 0.0) @ coefficients.policy_N)
