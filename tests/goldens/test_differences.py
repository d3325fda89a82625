"""What is right where trimtab differs from a system: one test for each entry of docs/differences.md, in closed form."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import replay
import torch
from adapt import pipelinerl, trl
from adapt.differences import DIFFERENCES, GUARD
from adapt.shared import Case, flat

from trimtab.correction import WeightRule, correct
from trimtab.method import Inputs, evaluate, token_gradient
from trimtab.peers import verl_rules
from trimtab.peers.verl import RsOption
from trimtab.spec import (
    Aggregate,
    Algo,
    AlgoSpec,
    Denominator,
    KlEstimator,
    KlImportance,
    Level,
    LossName,
    LossSpec,
    MethodSpec,
    MisSpec,
    RatioLevel,
    TisMode,
)

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "differences.md"
CASES = {case.name: case for case in replay.cases(HERE)}


def test_every_difference_has_its_heading_and_every_test_it_names_exists() -> None:
    text = DOCS.read_text()
    slugs = {
        re.sub(r"[^a-z0-9 -]", "", line[3:].lower()).replace(" ", "-")
        for line in text.splitlines()
        if line[:3] == "## "
    }
    assert {one.anchor for one in DIFFERENCES} <= slugs
    tests = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.M))
    assert set(re.findall(r"`(test_\w+)`", text)) <= tests


def batch(current: list[list[float]], rollout: list[list[float]], advantages: list[float], **more: Any) -> Inputs:
    length_B = torch.tensor([len(row) for row in current])
    return Inputs(
        current_N=flat(current, torch.float64),
        rollout_N=flat(rollout, torch.float64),
        valid_N=torch.ones(int(length_B.sum()), dtype=torch.bool),
        row_N=torch.repeat_interleave(torch.arange(len(current)), length_B),
        length_B=length_B,
        advantage_B=torch.tensor(advantages, dtype=torch.float64),
        **{"proximal_N": flat(rollout, torch.float64)} | more,
    )


def weights(d: list[list[float]], rule: WeightRule, dtype: torch.dtype = torch.float64) -> list[float]:
    length_B = torch.tensor([len(row) for row in d])
    d_N = flat(d, dtype)
    done = correct(d_N, torch.zeros_like(d_N), torch.ones(len(d_N), dtype=torch.bool), length_B, weight=rule)
    return done.weight_N.tolist()


def test_guards_means_are_exact() -> None:
    """Sums over counts: 1/n for n = 1, where a guard of 1e-8 would show in the eighth digit."""
    method = MethodSpec(
        AlgoSpec(Algo.decoupled), MisSpec(tis_mode=TisMode.off), LossSpec(aggregate=Aggregate.sequence_mean)
    )
    inputs = batch([[-1.0], [-2.0, -2.0]], [[-1.0], [-2.0, -2.0]], [1.0, -3.0])
    assert float(evaluate(method, inputs).loss.total) == (-1.0 + 3.0) / 2
    assert token_gradient(method, inputs).tolist() == [-0.5, 0.75, 0.75]
    rule = WeightRule(Level.sequence, TisMode.truncate, None, 10.0, batch_normalize=True)
    assert weights([[math.log(2.0)], [math.log(6.0)]], rule) == pytest.approx([0.5, 1.5], rel=1e-15)
    assert GUARD / 1 > 1e-9  # what one guard changes in a mean over one


def test_cast_a_loss_keeps_the_precision_of_its_inputs() -> None:
    method = MethodSpec(AlgoSpec(Algo.decoupled), MisSpec(tis_mode=TisMode.off), LossSpec())
    inputs = batch([[-1.0 + 1e-9]], [[-1.0]], [1.0])
    assert float(evaluate(method, inputs).loss.total) == pytest.approx(-math.exp(1e-9), rel=1e-15)


def test_overflow_a_weight_grows_with_its_ratio_up_to_the_bound() -> None:
    rule = WeightRule(Level.token, TisMode.truncate, None, 2.0, clamp=None)
    d = [[-95.0, -1.0, 0.0, 0.5, 60.0, 95.0, 1e30]]
    found = weights(d, rule, torch.float32)
    assert found == pytest.approx([0.0, math.exp(-1), 1.0, math.exp(0.5), 2.0, 2.0, 2.0], rel=1e-6, abs=1e-38)
    assert found == sorted(found)


def test_overflow_a_weight_without_a_bound_saturates() -> None:
    """At e^(log(largest number) - 10), for whatever lies above; below nothing changes."""
    rule = WeightRule(Level.token, TisMode.unbounded, None, None, clamp=None)
    found = weights([[78.0, 79.0, 95.0, 1e30, math.inf, -math.inf]], rule, torch.float32)
    most = math.exp(88.72283905206835 - 10)
    assert found == pytest.approx([math.exp(78.0), most, most, most, most, 0.0], rel=1e-5)
    by_row = WeightRule(Level.sequence, TisMode.unbounded, None, None, clamp=None)
    assert weights([[50.0, 50.0]], by_row, torch.float32) == pytest.approx([most, most], rel=1e-5)


def test_a_ratio_and_its_logarithm_differ_on_the_bound_alone() -> None:
    d = [[-math.log(bound)] for bound in (3.0, 5.0, 10.0)] + [[-math.log(3.0) + 1e-12], [-math.log(3.0) - 1e-12]]
    kept = []
    for make in (verl_rules.rule, verl_rules.ratio_rule):
        found = []
        for upper, row in zip((3.0, 5.0, 10.0, 3.0, 3.0), d, strict=True):
            mis = MisSpec(tis_mode=TisMode.off, reject=[make(RsOption.token_k1, upper=upper)])
            inputs = batch([row], [[0.0]], [1.0], proximal_N=flat([row], torch.float64))
            method = MethodSpec(AlgoSpec(Algo.decoupled), mis, LossSpec())
            found.append(bool(evaluate(method, inputs).applied.keep_N))
        kept.append(found)
    assert kept[0] == [True, True, True, True, False]
    assert kept[1][3:] == [True, False]


def test_guards_in_an_exponent_grow_with_it() -> None:
    """One token with a ratio of e^40: trimtab's loss is exact, a guard of 1e-8 in the mean would take 40e-8 of it."""
    spec = LossSpec(ratio_level=RatioLevel.sequence, aggregate=Aggregate.sequence_mean, log_ratio_clamp=None)
    for name, within in ((LossName.ppo_clip, 1e-14), (LossName.gmpo, 2e-10)):  # gmpo adds 1e-10 to a weight
        method = MethodSpec(AlgoSpec(Algo.decoupled), MisSpec(tis_mode=TisMode.off), replace(spec, name=name))
        loss = float(evaluate(method, batch([[-1.0]], [[-41.0]], [-1.0])).loss.total)
        assert loss == pytest.approx(math.exp(40.0), rel=within)
    assert 1 - math.exp(40.0 / (1 + GUARD)) / math.exp(40.0) == pytest.approx(40 * GUARD, rel=1e-3)


def test_luspo_padding_has_no_share_in_the_loss() -> None:
    """The same case with four more columns of padding: TRL's mean over B x T would be smaller, the right one is not."""
    case = CASES["trl/loss_luspo_tokentrunc_wide"]
    wider = copy.deepcopy(case.data)
    for key, value in wider["inputs"].items():
        if isinstance(value, list) and isinstance(value[0], list):
            wider["inputs"][key] = [[*row, 0.0, 0.0, 0.0, 0.0] for row in value]
    losses = [next(s.value for s in trl.said(c) if s.path == ("loss",)) for c in (case, Case(wider))]
    assert float(losses[0]) == float(losses[1]) == pytest.approx(2.2486293671119324, rel=1e-12)


def test_division_by_zero_huge_ratios_have_weights() -> None:
    rule = WeightRule(Level.sequence, TisMode.zero, 0.5, 2.0)
    assert weights([[95.0], [-95.0, 1.0], [0.0, 0.0]], rule, torch.float32) == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_empty_a_batch_without_valid_tokens_has_a_loss_of_0() -> None:
    for aggregate in (Aggregate.token_mean, Aggregate.sequence_mean):
        for algo in (Algo.decoupled, Algo.bypass):
            method = MethodSpec(AlgoSpec(algo), MisSpec(tis_batch_normalize=True), LossSpec(aggregate=aggregate))
            inputs = batch([[-1.0, math.nan]], [[-1.0, 3.0]], [1.0])
            inputs.valid_N.fill_(False)
            result = evaluate(method, inputs)
            assert float(result.loss.total) == 0.0
            assert not result.applied.keep_N.any()
            assert token_gradient(method, inputs).tolist() == [0.0, 0.0]


def test_mean_neither_a_rejected_weight_nor_an_empty_response_enters_it() -> None:
    masked = WeightRule(Level.token, TisMode.mask, 0.5, 2.0, batch_normalize=True)
    kept = [[math.log(0.8), math.log(1.6)]]
    alone, beside = weights(kept, masked), weights([*kept, [19.0]], masked)
    assert alone == pytest.approx([0.8 / 1.2, 1.6 / 1.2], rel=1e-15)
    assert beside[:2] == alone
    by_row = WeightRule(Level.sequence, TisMode.clip, 0.5, 2.0, batch_normalize=True)
    assert weights([[math.log(0.8)], [], [math.log(1.6)]], by_row) == pytest.approx([0.8 / 1.2, 1.6 / 1.2], rel=1e-15)
    geometric = WeightRule(Level.geometric, TisMode.clip, 0.5, 2.0, batch_normalize=True)
    assert weights([[math.log(0.64), 0.0], [math.log(1.6)]], geometric) == pytest.approx(
        [0.8 / 1.2, 0.8 / 1.2, 1.6 / 1.2], rel=1e-15
    )


def test_clamp_a_weight_is_inside_its_bounds_whatever_the_largest_token() -> None:
    """Geometric mean 0.5, largest token 1: AReaL with agg=max leaves the weight 0.5, below its lower bound of 0.8."""
    rule = WeightRule(Level.geometric, TisMode.clip, 0.8, 1.2)
    assert weights([[math.log(0.25), 0.0]], rule) == [0.8, 0.8]
    data = copy.deepcopy(CASES["areal/seq_clamp_ratio_mean_multiturn"].data)
    data["config"]["rejection_sampling"] |= {"agg": "max"}
    assert "a-clamp-that-looks-at-the-largest-token" in [one.anchor for one in DIFFERENCES if one.applies(Case(data))]


def test_unpacked_rows_have_the_loss_that_they_have_packed() -> None:
    packed = copy.deepcopy(CASES["pipelinerl/ppo_packed_ragged"].data)
    rows = copy.deepcopy(CASES["pipelinerl/ppo_ragged"].data)
    for data in (packed, rows):
        data["config"] |= {"policy_loss": "gspo"}
    found = [{s.path: s.value for s in pipelinerl.said(Case(data))} for data in (packed, rows)]
    assert float(found[0]["loss",]) == pytest.approx(float(found[1]["loss",]), rel=1e-14)


def test_infinite_log_ratios_are_rejected_or_bounded_never_1() -> None:
    """AReaL takes a log-ratio that is not finite for 0, a weight of 1; trimtab for the extreme that it is."""
    truncate = WeightRule(Level.token, TisMode.truncate, None, 2.0)
    assert weights([[math.inf, 0.0]], truncate) == [2.0, 1.0]
    d_N = torch.tensor([math.inf, 0.0, -math.inf])
    mask = WeightRule(Level.token, TisMode.mask, 0.5, 2.0)
    done = correct(d_N, torch.zeros(3), torch.ones(3, dtype=torch.bool), torch.tensor([3]), weight=mask)
    assert done.keep_N.tolist() == [False, True, False]


def test_switches_stand_for_themselves() -> None:
    """miles ignores rs and veto without use_tis, and the veto without use_rs; trimtab has each by itself."""
    d = [[0.0, -10.0], [0.1, 0.0]]
    mis = MisSpec(tis_mode=TisMode.off, rs_veto_threshold=1e-4)
    inputs = batch([[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [1.0, 1.0], proximal_N=flat(d, torch.float64))
    keep_N = evaluate(MethodSpec(AlgoSpec(Algo.decoupled), mis, LossSpec()), inputs).applied.keep_N
    assert keep_N.tolist() == [False, False, True, True]


def test_a_kl_weight_follows_the_ratio_level_and_has_no_clamp_if_the_ratio_has_none() -> None:
    """TRL weighs the KL with the loss's own ratio; NeMo-RL never clamps its weight."""
    spec = LossSpec(
        name=LossName.ppo_clip, ratio_level=RatioLevel.sequence, log_ratio_clamp=None, kl_coef=1.0,
        kl_value=KlEstimator.k1, kl_gradient=KlEstimator.k1, kl_importance=KlImportance.anchor_live,
    )  # fmt: skip
    inputs = batch([[30.0, 0.0]], [[0.0, 0.0]], [0.0], reference_N=torch.tensor([29.0, -1.0], dtype=torch.float64))
    result = evaluate(MethodSpec(AlgoSpec(Algo.decoupled), MisSpec(tis_mode=TisMode.off), spec), inputs)
    assert float(result.loss.kl) == pytest.approx(math.exp(15.0), rel=1e-14)
    token = LossSpec(
        log_ratio_clamp=None, kl_coef=1.0, kl_value=KlEstimator.k1, kl_gradient=KlEstimator.k1,
        kl_importance=KlImportance.rollout_live, denominator=Denominator.all,
    )  # fmt: skip
    result = evaluate(MethodSpec(AlgoSpec(Algo.decoupled), MisSpec(tis_mode=TisMode.off), token), inputs)
    assert float(result.loss.kl) == pytest.approx((math.exp(30.0) + 1) / 2, rel=1e-14)
