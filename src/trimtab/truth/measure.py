"""Exact expectation, bias, variance and mean squared error of a method's gradient under the rollout policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trimtab.method import Inputs, evaluate
from trimtab.objective.aggregate import Counts
from trimtab.spec import Aggregate, MethodSpec, Proximal
from trimtab.truth.enumerate import Enumeration, ascend, target_gradient
from trimtab.truth.limit import batch_factors, without_m2

LAG = 1
"""Updates by which the rollout policy is behind the proximal one, for methods that ask: a problem does not say."""


@dataclass(frozen=True)
class Kept:
    """What a method keeps, and its gradient with the denominator ``kept`` in a large batch.

    ``tokens``: expected kept tokens over expected tokens; ``rows``: probability that a row keeps a token. Leaving
    rejected tokens (loss.aggregate=token_mean) or rows (the others) out of the denominator divides the expectation by
    the share that is kept: ``bias`` is that of the quotient.
    """

    tokens: float
    rows: float
    bias: float


@dataclass(frozen=True)
class Estimate:
    """The gradient of one sequence's objective, minus the loss summed over tokens, as an estimator of ``target``.

    ``expectation``, ``target``: gradients in the current logits, [P * V] float64. ``bias``: L2 norm of their
    difference. ``variance``: trace of the covariance over a prompt drawn in proportion to its weight and a sequence of
    the rollout policy. ``mse`` = bias² + variance. ``cosine``: of expectation and target (nan if either is 0).
    """

    expectation: Tensor
    target: Tensor
    bias: float
    variance: float
    mse: float
    cosine: float
    kept: Kept

    @property
    def crossover(self) -> float:
        """Sequences in a batch at which bias² equals the variance of their mean; beyond, more of them help little."""
        return self.variance / self.bias**2 if self.bias > 1e-12 else math.inf


@dataclass(frozen=True)
class State:
    """One step of the inner loop: the current policy's logits, the exact gradient, the sequences that can occur."""

    listed: Enumeration
    logits_PV: Tensor
    target_PV: Tensor
    inputs: Inputs
    draw_B: Tensor
    prefix_N: Tensor
    token_N: Tensor


@dataclass(frozen=True)
class Moments:
    """E[g] as a table, E|g|², and expected kept and all tokens and rows."""

    mean_PV: Tensor
    square: float
    kept_tokens: float
    kept_rows: float
    tokens: float

    def scaled(self, share: float) -> Moments:
        return Moments(
            share * self.mean_PV,
            share * self.square,
            share * self.kept_tokens,
            share * self.kept_rows,
            share * self.tokens,
        )

    def plus(self, other: Moments) -> Moments:
        return Moments(
            self.mean_PV + other.mean_PV,
            self.square + other.square,
            self.kept_tokens + other.kept_tokens,
            self.kept_rows + other.kept_rows,
            self.tokens + other.tokens,
        )


def state(listed: Enumeration, step: int, step_size: float) -> State:
    """The inner loop after ``step`` exact-gradient steps from the problem's current policy.

    Sequences that the rollout policy never writes never reach an estimator; the target has them still.
    """
    logits_PV = ascend(listed, listed.logits_PV, step_size, step)
    draw_B = listed.draw_B
    can_B = draw_B > 0
    can_N = can_B[listed.row_N]
    length_B = listed.length_B[can_B]
    return State(
        listed=listed,
        logits_PV=logits_PV,
        target_PV=target_gradient(listed, logits_PV),
        inputs=Inputs(
            current_N=listed.tokens_of(logits_PV.log_softmax(-1))[can_N],
            rollout_N=listed.tokens_of(listed.rollout_PV)[can_N],
            proximal_N=listed.tokens_of(listed.proximal_PV)[can_N],
            valid_N=torch.ones(int(can_N.sum()), dtype=torch.bool),
            row_N=torch.repeat_interleave(torch.arange(len(length_B)), length_B),
            length_B=length_B,
            advantage_B=listed.advantage_B[can_B],
            group_B=listed.prompt_B[can_B],
            lag_N=torch.full((int(can_N.sum()),), LAG),
        ),
        draw_B=draw_B[can_B],
        prefix_N=listed.prefix_N[can_N],
        token_N=listed.token_N[can_N],
    )


def objective_alone(method: MethodSpec) -> MethodSpec:
    """The method with its loss summed over a sequence's tokens, and without the terms that change what is wanted.

    Left out: KL to a reference and entropy bonus, likelihood of rewarded responses, and the choice of tokens by
    entropy, for a problem has no reference policy, no reward beside the advantage, and no batch to take quantiles of.
    """
    loss = replace(
        method.loss, aggregate=Aggregate.sequence_sum, sum_constant=1.0, kl_coef=0.0, entropy_coef=0.0,
        positive_nll_coef=0.0, top_entropy=1.0,
    )  # fmt: skip
    return replace(method, loss=loss)


def left_out(method: MethodSpec) -> tuple[str, ...]:
    """Options of the method that its figures don't hold; see ``objective_alone``."""
    loss = method.loss
    set_ = {
        "loss.kl_coef": loss.kl_coef != 0,
        "loss.entropy_coef": loss.entropy_coef != 0,
        "loss.positive_nll_coef": loss.positive_nll_coef != 0,
        "loss.top_entropy": loss.top_entropy < 1,
    }
    return tuple(key for key, given in set_.items() if given)


def _seen_by(method: MethodSpec, at: State) -> Inputs:
    """The inputs as training has them: no forward gives a proximal policy that the method guesses."""
    match method.algo.proximal:
        case Proximal.recompute:
            return at.inputs
        case Proximal.loglinear:
            return replace(at.inputs, proximal_N=None)


def token_gradients(method: MethodSpec, at: State) -> tuple[Tensor, Tensor]:
    """d objective / d current log-prob of each token of each sequence on its own [N], and what is kept [N]."""
    current_N = at.inputs.current_N.detach().requires_grad_()
    inputs = replace(_seen_by(method, at), current_N=current_N)
    factors = batch_factors(method, inputs, at.draw_B)
    one_row = Counts(tokens=1, rows=1)  # each row is a batch of its own, and nothing is divided by
    result = evaluate(method, inputs, totals=one_row, factors=factors)
    if not result.loss.total.requires_grad:
        return torch.zeros_like(current_N), result.applied.keep_N
    (loss_N,) = torch.autograd.grad(result.loss.total, current_N)
    return -loss_N, result.applied.keep_N


def moments(method: MethodSpec, at: State) -> Moments:
    """Scatter the tokens' gradients onto the tree: d log π(v) / d logits = onehot(v) - π.

    A sequence passes a prefix once, so the tokens' parts of its gradient are orthogonal and their squares add up.
    """
    total, inputs = at.listed.total_weight, at.inputs
    gradient_N, keep_N = token_gradients(method, at)
    probability_PV = at.logits_PV.softmax(-1)
    draw_N = at.draw_B[inputs.row_N]
    mass_PV = torch.zeros_like(probability_PV)
    mass_PV.index_put_((at.prefix_N, at.token_N), draw_N * gradient_N, accumulate=True)
    mean_PV = total * (mass_PV - probability_PV * mass_PV.sum(-1, keepdim=True))
    own_N = probability_PV[at.prefix_N, at.token_N]
    score_N = 1.0 - 2.0 * own_N + probability_PV.square().sum(-1)[at.prefix_N]
    kept_B = torch.zeros_like(at.draw_B).index_add(0, inputs.row_N, keep_N.double()) > 0
    return Moments(
        mean_PV,
        total**2 * float((draw_N * gradient_N**2 * score_N).sum()),
        float(draw_N[keep_N].sum()),
        float(at.draw_B[kept_B].sum()),
        float(draw_N.sum()),
    )


def measure(method: MethodSpec, at: State) -> Estimate:
    """The estimate of a resolved method at one step of the inner loop; batch-wide rules at their limit (limit.py)."""
    by_tokens = method.loss.aggregate is Aggregate.token_mean
    mixture = without_m2(objective_alone(method), _seen_by(method, at), at.draw_B)
    found = [moments(part, at).scaled(share) for share, part in mixture]
    sum_ = found[0] if len(found) == 1 else found[0].plus(found[1])
    expectation, target = sum_.mean_PV.flatten(), at.target_PV.flatten()
    bias = float((expectation - target).norm())
    variance = max(sum_.square - float(expectation.square().sum()), 0.0)
    norms = float(expectation.norm() * target.norm())
    tokens = sum_.kept_tokens / sum_.tokens
    share = tokens if by_tokens else sum_.kept_rows
    kept_bias = float((expectation / share - target).norm()) if share > 0 else float(target.norm())
    return Estimate(
        expectation=expectation,
        target=target,
        bias=bias,
        variance=variance,
        mse=bias**2 + variance,
        cosine=float(expectation @ target) / norms if norms > 0 else math.nan,
        kept=Kept(tokens, sum_.kept_rows, kept_bias),
    )


@dataclass(frozen=True)
class Named:
    """A resolved method and what it is called."""

    name: str
    method: MethodSpec


def measure_all(
    listed: Enumeration,
    methods: list[Named],
    steps: list[int],
    step_size: float,
    report: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> dict[int, dict[str, Estimate]]:
    """Estimates by step of the inner loop and method; ``report(done, total, what)`` tells of the progress."""
    found: dict[int, dict[str, Estimate]] = {}
    for i, step in enumerate(steps):
        at = state(listed, step, step_size)
        found[step] = {}
        for j, named in enumerate(methods):
            report(i * len(methods) + j, len(steps) * len(methods), f"step {step} {named.name}")
            found[step][named.name] = measure(named.method, at)
    report(len(steps) * len(methods), len(steps) * len(methods), "")
    return found
