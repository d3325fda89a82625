"""A method's loss and gradient, option by option, and what must hold for every method."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from method.cases import ROWS, as_seen, made, presets, random_inputs
from torch import Tensor

from trimtab.config import recipes
from trimtab.errors import DataError
from trimtab.method import (
    Inputs,
    apply_stage,
    denominators,
    evaluate,
    loss_of,
    needs_whole,
    nothing,
    policy_term,
    stages,
    token_gradient,
)
from trimtab.method.evaluate import loglinear
from trimtab.spec import AdvantageKl, Algo

# -- options one by one ----------------------------------------------------------------------------------------------


def test_loglinear_goes_from_rollout_to_current_by_lag() -> None:
    current_N = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    rollout_N = torch.tensor([-2.0, -1.0, torch.nan, -1.0], dtype=torch.float64)
    guessed = loglinear(current_N, rollout_N, torch.tensor([0, 1, 5, 3]))
    assert guessed.tolist() == [-2.0, -1.5, -3.0, -1.0 + 0.75 * -3.0]


def test_a_guessed_proximal_policy_equals_the_same_one_given() -> None:
    inputs = random_inputs(3)
    assert inputs.lag_N is not None
    guess_N = loglinear(inputs.current_N, inputs.rollout_N, inputs.lag_N)
    guessed = evaluate(policy_term(presets()["areal/loglinear"]), replace(inputs, proximal_N=None))
    given = evaluate(policy_term(presets()["areal/decoupled"]), replace(inputs, proximal_N=guess_N))
    assert float(guessed.loss.total) == pytest.approx(float(given.loss.total), rel=1e-12)


@pytest.mark.parametrize("kind", [AdvantageKl.anchor, AdvantageKl.reference])
def test_a_kl_inside_the_advantage_lowers_it_by_coef_times_log_ratio(kind: AdvantageKl) -> None:
    inputs, method = random_inputs(1), policy_term(made("algo=reinforce", "tis_mode=off"))
    loss = replace(method.loss, advantage_kl=kind, advantage_kl_coef=0.3)
    assert inputs.reference_N is not None
    other_N = inputs.rollout_N if kind is AdvantageKl.anchor else inputs.reference_N
    lower_N = inputs.advantage_B[inputs.row_N] - 0.3 * (inputs.current_N - other_N)
    expected = torch.where(inputs.valid_N, -lower_N / int(inputs.valid_N.sum()), 0.0)
    assert torch.allclose(token_gradient(replace(method, loss=loss), inputs), expected, rtol=1e-12, atol=0)


def test_on_policy_equals_decoupled_at_the_first_update() -> None:
    for seed in range(4):
        inputs = random_inputs(seed)
        first = replace(inputs, current_N=inputs.proximal_N)
        for rules in (["level=sequence"], ["rs=token", "mis.rs_upper_bound=1.2"], ["mis.tis_batch_normalize=true"]):
            decoupled = token_gradient(made("algo=decoupled", *rules), first)
            on_policy = token_gradient(made("algo=on_policy", *rules), replace(first, proximal_N=None))
            bypass = token_gradient(made("algo=reinforce", *rules), replace(first, proximal_N=None))
            assert torch.allclose(decoupled, on_policy, rtol=1e-12, atol=0)
            assert torch.allclose(decoupled, bypass, rtol=1e-12, atol=0)


def test_metrics_only_has_corrections_and_the_loss_of_none() -> None:
    inputs = random_inputs(2)
    result = evaluate(presets()["miles/metrics_only"], inputs)
    plain = evaluate(presets()["miles/standard"], inputs)
    assert torch.equal(result.loss.total, plain.loss.total) and bool(result.applied.keep_N.all())
    (correction,) = result.applied.corrections
    assert float((correction.weight_N - 1).abs().max()) > 0.1


def test_top_entropy_keeps_the_policy_term_of_the_most_uncertain_tokens() -> None:
    inputs, method = random_inputs(5), made("loss.top_entropy=0.3")
    assert inputs.entropy_N is not None
    every = token_gradient(made(), inputs)
    bound = torch.quantile(inputs.entropy_N[inputs.valid_N].float(), 0.7)
    expected = torch.where(inputs.entropy_N >= bound, every, 0.0)
    assert torch.equal(token_gradient(method, inputs), expected) and 0 < int((expected != 0).sum()) < 20
    with pytest.raises(DataError, match="entropy_N"):
        evaluate(method, replace(inputs, entropy_N=None))


def test_positive_likelihood_is_a_mean_over_tokens_of_rewarded_rows() -> None:
    inputs = random_inputs(6)
    assert inputs.reward_B is not None
    positive_N = inputs.valid_N & (inputs.reward_B > 0)[inputs.row_N]
    added = token_gradient(made("loss.positive_nll_coef=0.5"), inputs) - token_gradient(made(), inputs)
    expected = torch.where(positive_N, -0.5 / int(positive_N.sum()), 0.0).double()
    assert torch.allclose(added, expected, atol=1e-15)


# -- what holds for every method -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recipes())
def test_micro_batches_add_up_to_the_whole(name: str) -> None:
    """The corrections of the whole, cut; where nothing depends on it all, the micro-batch's own."""
    method, inputs = presets()[name], as_seen(presets()[name], random_inputs(7))
    whole = evaluate(method, inputs)
    expected = token_gradient(method, inputs)
    gradient, total = torch.zeros_like(inputs.current_N), 0.0
    for rows in ([0, 1, 2], [3], [4, 5, 6, 7, 8, 9], [10, 11]):
        at = torch.isin(inputs.row_N, torch.tensor(rows)).nonzero()[:, 0]
        part = cut(inputs, rows, at)
        current_N = part.current_N.clone().requires_grad_()
        applied = whole.applied.at(at)
        if not needs_whole(method) and not method.mis.tis_batch_normalize and method.mis.m2_threshold is None:
            applied = nothing(part.rollout_N, part.valid_N)
            for stage in stages(method):
                applied = applied.then(apply_stage(stage, part), measured_only=method.algo.metrics_only)
        loss = loss_of(method, replace(part, current_N=current_N), applied, whole.coefficients.at(at)).loss.total
        gradient[at] = torch.autograd.grad(loss, current_N)[0]
        total += float(loss.detach())
    assert total == pytest.approx(float(whole.loss.total), rel=1e-11, abs=1e-13)
    assert torch.allclose(gradient, expected, rtol=1e-11, atol=1e-14)


def cut(inputs: Inputs, rows: list[int], at: Tensor) -> Inputs:
    def tokens(x_N: Tensor | None) -> Tensor | None:
        return None if x_N is None else x_N[at]

    assert inputs.reward_B is not None and inputs.group_B is not None
    return Inputs(
        current_N=inputs.current_N[at], rollout_N=inputs.rollout_N[at], valid_N=inputs.valid_N[at],
        row_N=torch.repeat_interleave(torch.arange(len(rows)), inputs.length_B[rows]), length_B=inputs.length_B[rows],
        advantage_B=inputs.advantage_B[rows], proximal_N=tokens(inputs.proximal_N),
        reference_N=tokens(inputs.reference_N), entropy_N=tokens(inputs.entropy_N), reward_B=inputs.reward_B[rows],
        group_B=inputs.group_B[rows], lag_N=tokens(inputs.lag_N),
    )  # fmt: skip


@pytest.mark.parametrize("name", recipes())
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_at_invalid_tokens_is_never_looked_at(name: str, poison: float) -> None:
    method, inputs = presets()[name], random_inputs(8)

    def spoilt(x_N: Tensor | None) -> Tensor:
        assert x_N is not None
        return torch.where(inputs.valid_N, x_N, poison)

    other = replace(
        inputs, current_N=spoilt(inputs.current_N), rollout_N=spoilt(inputs.rollout_N),
        proximal_N=spoilt(inputs.proximal_N), reference_N=spoilt(inputs.reference_N),
        entropy_N=spoilt(inputs.entropy_N),
    )  # fmt: skip
    one, two = token_gradient(method, as_seen(method, inputs)), token_gradient(method, as_seen(method, other))
    assert torch.equal(one, two) and bool((one[~inputs.valid_N] == 0).all())


@pytest.mark.parametrize("name", recipes())
def test_a_missing_log_prob_is_survived_and_what_is_rejected_may_be_infinite(name: str) -> None:
    method, inputs = presets()[name], random_inputs(9)
    rollout_N = inputs.rollout_N.clone()
    at = inputs.valid_N.nonzero()[:3, 0]
    rollout_N[at] = math.nan
    assert bool(token_gradient(method, as_seen(method, replace(inputs, rollout_N=rollout_N))).isfinite().all())
    rollout_N[at[0]] = -math.inf
    seen = as_seen(method, replace(inputs, rollout_N=rollout_N))
    result, gradient = evaluate(method, seen), token_gradient(method, seen)
    rejected_N = ~result.applied.keep_N
    if bool(rejected_N[at[0]]):
        assert bool(gradient.isfinite().all()) and bool(result.loss.policy.isfinite())


@pytest.mark.parametrize("name", recipes())
def test_no_tokens_and_nothing_kept_have_a_gradient_of_0(name: str) -> None:
    method, inputs = policy_term(presets()[name]), random_inputs(10)
    empty = as_seen(method, cut(inputs, [4], torch.zeros(0, dtype=torch.int64)))
    assert float(evaluate(method, empty).loss.total.detach()) == 0.0 and token_gradient(method, empty).numel() == 0
    masked = as_seen(method, replace(inputs, valid_N=torch.zeros_like(inputs.valid_N)))
    assert float(evaluate(method, masked).loss.total.detach()) == 0.0
    assert not bool(token_gradient(method, masked).any())


def test_everything_rejected_is_a_loss_of_0() -> None:
    for denominator in ("all", "kept"):
        method = made("rs=token", f"loss.denominator={denominator}")
        inputs = random_inputs(11)
        far = replace(inputs, rollout_N=inputs.rollout_N - 9.0)
        result = evaluate(method, far)
        assert float(result.loss.total) == 0.0 and not bool(token_gradient(method, far).any())
        assert not bool((result.applied.keep_N & far.valid_N).any())


def test_missing_inputs_are_named() -> None:
    inputs = random_inputs(0)
    with pytest.raises(DataError, match="proximal_N"):
        evaluate(made("algo=decoupled"), replace(inputs, proximal_N=None, lag_N=None))
    loss = replace(made().loss, advantage_kl=AdvantageKl.reference, advantage_kl_coef=0.1)
    with pytest.raises(DataError, match="reference_N"):
        evaluate(replace(made(), loss=loss), replace(inputs, reference_N=None))


def test_global_counts_replace_the_batchs_own() -> None:
    from trimtab.objective.aggregate import Counts

    inputs, method = random_inputs(1), made("tis_mode=off")
    tokens = int(inputs.valid_N.sum())
    share = evaluate(method, inputs, totals=Counts(4 * tokens, 4 * ROWS))
    assert float(share.loss.total) == pytest.approx(float(evaluate(method, inputs).loss.total) / 4)
    keep_N = torch.ones_like(inputs.valid_N)
    assert torch.equal(denominators(method.loss, inputs, keep_N).policy_N, inputs.valid_N.double() / tokens)


def test_algorithms_differ_in_their_anchor_alone_without_a_correction() -> None:
    inputs = random_inputs(4, moved=0.05)
    for algo, other_N in ((Algo.standard, inputs.proximal_N), (Algo.bypass, inputs.rollout_N)):
        method = made(f"algo={algo.name}", "tis_mode=off")
        assert other_N is not None
        expected = torch.where(inputs.valid_N, inputs.current_N - other_N, 0.0)
        assert torch.equal(evaluate(method, as_seen(method, inputs)).log_ratio_N, expected)
    on_policy = evaluate(made("algo=on_policy", "tis_mode=off"), replace(inputs, proximal_N=None))
    assert not bool(on_policy.log_ratio_N.any())
