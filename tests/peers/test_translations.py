"""What the peers' own options mean: bounds that are left empty, constants, coefficients of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from trimtab.correction import RejectRule, correct
from trimtab.errors import ConfigError
from trimtab.method import Inputs
from trimtab.objective.aggregate import Counts
from trimtab.peers import areal, miles, nemo_rl, pipelinerl, prime_rl, trl, verl_rules
from trimtab.peers.verl import RsOption
from trimtab.spec import (
    Algo,
    AlgoSpec,
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


def test_verl_k1_bounds_the_logarithm_of_the_inverse_ratio_and_fills_its_lower_bound() -> None:
    one = verl_rules.rule(RsOption.seq_mean_k1, upper=4.0)
    low, high = math.log(0.25), math.log(4.0)
    assert one == RejectSpec(Statistic.k1, Level.sequence, OverTokens.mean, low, high, inverse=True, clamp=20.0)
    assert verl_rules.rule(RsOption.token_k1, upper=4.0, lower=0.6).lower == math.log(0.6)
    assert verl_rules.rule(RsOption.token_k1, upper=4.0).over_tokens is None
    preset = verl_rules.ratio_rule(RsOption.seq_mean_k1, upper=4.0)
    assert preset == RejectSpec(Statistic.ratio, Level.sequence, OverTokens.mean, 0.25, 4.0, inverse=True, clamp=20.0)
    assert verl_rules.ratio_rule(RsOption.token_k3, upper=0.1) == verl_rules.rule(RsOption.token_k3, upper=0.1)


@pytest.mark.parametrize("option", [RsOption.token_k1, RsOption.seq_sum_k1, RsOption.seq_mean_k1])
@pytest.mark.parametrize("bound", [1.1, 1.3, 1.5, 2.0, 3.0, 5.0, 10.0, 0.9, 0.7, 0.2, 0.1])
def test_verl_k1_keeps_what_lies_on_a_bound_in_log_space(option: RsOption, bound: float) -> None:
    """exp(log 3) is no 3: compared as a ratio, a token at d = -log(3) may be rejected that verl keeps."""
    lower, upper = (bound, None) if bound < 1 else (None, bound)
    spec = verl_rules.rule(option, upper=upper or 1.2, lower=lower or 0.05)
    rule = RejectRule(
        spec.statistic, spec.level, spec.over_tokens, spec.lower or 0.0, spec.upper or 0.0, spec.inverse, spec.clamp
    )

    def keeps(statistic: float) -> bool:
        d, one = torch.tensor([-statistic], dtype=torch.float64), torch.tensor([1])
        return bool(correct(d, torch.zeros_like(d), one.bool(), one, weight=None, reject=[rule]).keep_N)

    at = math.log(bound)
    assert keeps(at)
    assert not keeps(math.nextafter(at, math.inf if bound > 1 else -math.inf))


def test_verl_k2_and_k3_have_an_upper_bound_alone() -> None:
    for option in RsOption:
        if not option.two_sided:
            one = verl_rules.rule(option, upper=0.3)
            assert (one.statistic.name, one.lower, one.upper) == (option.name[-2:], None, 0.3)
            assert one.level is (Level.token if option.of_tokens else Level.sequence)
            with pytest.raises(ConfigError, match="no lower bound"):
                verl_rules.rule(option, upper=0.3, lower=0.1)


@pytest.mark.parametrize(
    ("level", "over"), [(Level.token, None), (Level.sequence, OverTokens.sum), (Level.geometric, OverTokens.mean)]
)
def test_verl_once_bounded_the_ratio_itself(level: Level, over: OverTokens | None) -> None:
    one = verl_rules.legacy_rule(level, upper=2.0)
    assert (one.over_tokens, one.lower, one.upper, one.inverse) == (over, 0.5, 2.0, False)


def test_miles_falls_back_to_the_inverse_and_to_the_weights_bounds() -> None:
    assert miles.bounds((None, 4.0), (None, None)) == ((0.25, 4.0), (0.25, 4.0))
    assert miles.bounds((0.5, 4.0), (None, 3.0)) == ((0.5, 4.0), (0.5, 3.0))
    assert miles.bounds((0.5, 4.0), (0.1, None)) == ((0.5, 4.0), (0.1, 4.0))


def test_pipelinerl_multiplies_advantages_or_rewards_and_may_drop_the_negative() -> None:
    advantage_B, reward_B = torch.tensor([-1.0, 2.0]), torch.tensor([3.0, -4.0])
    assert pipelinerl.policy_weights(advantage_B, reward_B).tolist() == [-1.0, 2.0]
    assert pipelinerl.policy_weights(advantage_B, reward_B, relu_log_p_weights=True).tolist() == [0.0, 2.0]
    relu = pipelinerl.policy_weights(advantage_B, reward_B, use_advantages=False, relu_log_p_weights=True)
    assert relu.tolist() == [3.0, 0.0]


def test_prime_rl_divides_token_weights_by_the_components_tokens() -> None:
    given = prime_rl.coefficients(torch.tensor([1.0, 0.0, 0.5]), 4)
    assert given.policy_N.tolist() == given.terms_N.tolist() == [0.25, 0.0, 0.125]
    assert prime_rl.scaled(torch.tensor([2.0, -1.0]), 0.5).tolist() == [1.0, -0.5]
    assert math.exp(10) == prime_rl.LEGACY_SEQUENCE_CAP


VERL_BAD = [
    (lambda: verl_rules.threshold("rollout_is_threshold", True), "rollout_is_threshold=True"),
    (lambda: verl_rules.threshold("rollout_is_threshold", -1.0), "a number > 0"),
    (lambda: verl_rules.threshold("rollout_is_threshold", "0_2"), "0 < lower <= upper"),
    (lambda: verl_rules.threshold("rollout_is_threshold", "-1_2"), "0 < lower <= upper"),
    (lambda: verl_rules.threshold("rollout_is_threshold", "5.0_0.5"), "rollout_is_threshold='5.0_0.5'"),
    (lambda: verl_rules.threshold("rollout_is_threshold", "abc"), "is no threshold"),
    (lambda: verl_rules.threshold("rollout_is_threshold", math.nan), "is refused"),
    (lambda: verl_rules.weight_level("geometric"), "rollout_is='geometric' is refused; allowed: token, sequence, null"),
    (lambda: verl_rules.options("token_k1", None), "rollout_rs_threshold=2.0"),
    (lambda: verl_rules.options("seq_max_k1", 2.0), "rollout_rs='seq_max_k1' is refused; allowed: token_k1"),
    (lambda: verl_rules.options("token_k2", "0.1_1.0"), "no lower bound"),
    (lambda: verl_rules.options("token_k1,token_k2,token_k3", "2,3"), "2 thresholds for 3"),
    (lambda: verl_rules.options("token_k2", "-1"), "rollout_rs_threshold='-1'"),
]


@pytest.mark.parametrize(("call", "message"), VERL_BAD, ids=[message for _, message in VERL_BAD])
def test_verl_refuses(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert message in str(error.value)


def test_verl_reads_thresholds() -> None:
    assert verl_rules.threshold("x", 2) == verl_rules.threshold("x", " 2.0") == (None, 2.0)
    assert verl_rules.threshold("x", "0.5_3.0") == (0.5, 3.0)
    assert verl_rules.threshold("x", "2.0_2.0") == (2.0, 2.0)
    assert verl_rules.weight_level("geometric", legacy=True) is Level.geometric
    assert verl_rules.options(None, 2.0) == []
    assert verl_rules.options("token_k1, seq_max_k2,token_k1", "0.5_2.0, 1.5") == [
        (RsOption.token_k1, 0.5, 2.0), (RsOption.seq_max_k2, None, 1.5)
    ]  # fmt: skip
    shared = verl_rules.options("token_k1,token_k2", 3)
    assert shared == [(RsOption.token_k1, None, 3.0), (RsOption.token_k2, None, 3.0)]


def test_areal_refuses_clamps_of_a_kl_and_bounds_that_are_no_ratios() -> None:
    assert areal.rejection_sampling({}) == areal.RejectionSampling()
    given = areal.rejection_sampling({"level": "sequence", "metric": "kl_k2", "agg": "max", "upper": 0.1})
    assert (given.level, given.metric, given.upper, given.lower) == (
        areal.Unit.sequence, areal.Metric.kl_k2, 0.1, None
    )  # fmt: skip
    for bad, message in (
        ({"action": "clamp", "metric": "kl_k2"}, "action=clamp with metric=kl_k2"),
        ({"upper": 1.0}, "upper=1 with metric=ratio"),
        ({"lower": 0.0}, "lower=0 with metric=ratio"),
        ({"lower": -1.0, "action": "clamp"}, "lower=-1"),
        ({"agg": "median"}, "agg='median' is refused; allowed: sum, mean, max"),
    ):
        with pytest.raises(ConfigError, match=message):
            areal.rejection_sampling(bad)


def test_trl_refuses_bounds_that_bound_nothing() -> None:
    for mode in trl.SamplingMode:
        for low, high in ((3.0, 2.0), (2.0, 2.0)):
            with pytest.raises(ConfigError, match="clip_min < clip_max"):
                trl.check_sampling(mode, low, high)
        trl.check_sampling(mode, 0.5, None)
        if mode in (trl.SamplingMode.token_truncate, trl.SamplingMode.sequence_truncate):
            with pytest.raises(ConfigError, match=r"vllm_importance_sampling_clip_max=3\.0"):
                trl.check_sampling(mode, None, None)


def test_miles_refuses_unknown_modes_and_equal_bounds() -> None:
    with pytest.raises(ConfigError, match="tis_mode='zero' is refused; allowed: truncate, clip, mask"):
        miles.mode("zero")
    with pytest.raises(ConfigError, match="rs_level='row' is refused"):
        miles.level("rs_level", "row")
    with pytest.raises(ConfigError, match="lower < upper"):
        miles.check_bounds(TisMode.mask, 2.0, 2.0)
    miles.check_bounds(TisMode.truncate, 2.0, 2.0)


def test_prime_rl_adds_its_components_up() -> None:
    """Σ over components of Σ coefficient · -A exp(current - rollout), and its gradient, in closed form."""
    current, rollout = torch.tensor([-1.0, -2.0], dtype=torch.float64), torch.tensor([-1.5, -2.0], dtype=torch.float64)
    inputs = Inputs(
        current_N=current, rollout_N=rollout, valid_N=torch.ones(2, dtype=torch.bool), row_N=torch.tensor([0, 0]),
        length_B=torch.tensor([2]), advantage_B=torch.tensor([3.0], dtype=torch.float64),
    )  # fmt: skip
    mis = MisSpec(tis_mode=TisMode.off)
    one = prime_rl.Component(
        MethodSpec(AlgoSpec(Algo.bypass), mis, LossSpec(name=LossName.importance)), inputs, totals=Counts(4, 1)
    )
    two = prime_rl.Component(
        MethodSpec(AlgoSpec(Algo.bypass), mis, LossSpec(name=LossName.reinforce)), inputs,
        given=prime_rl.coefficients(torch.tensor([0.0, 1.0], dtype=torch.float64), 2),
    )  # fmt: skip
    loss, gradient_N = prime_rl.total([one, two])
    first = [-3 * math.exp(0.5) / 4, -3 / 4]
    assert float(loss) == pytest.approx(sum(first) - 3 * -2.0 / 2, rel=1e-14)
    assert gradient_N.tolist() == pytest.approx([first[0], first[1] - 3 / 2], rel=1e-14)


def test_nemo_rl_refuses_what_it_asserts() -> None:
    with pytest.raises(ConfigError, match="ratio_min"):
        nemo_rl.Truncation(nemo_rl.TruncationKind.icepop, 2.0)
    with pytest.raises(ConfigError, match="ratio_min <= ratio"):
        nemo_rl.Truncation(nemo_rl.TruncationKind.tis, 2.0, 3.0)
    with pytest.raises(ConfigError, match="truncated_importance_sampling_type=None is refused; allowed: tis, icepop"):
        nemo_rl.truncation(None, 2.0)
    with pytest.raises(ConfigError, match="truncated_importance_sampling_type='bogus'"):
        nemo_rl.truncation("bogus", 2.0)
    with pytest.raises(ConfigError, match="use_importance_sampling_correction=true"):
        nemo_rl.truncation("tis", 2.0, corrected=False)
    assert nemo_rl.truncation("tis", None, corrected=False) is None
    assert nemo_rl.truncation("tis", 2.0) == nemo_rl.Truncation(nemo_rl.TruncationKind.tis, 2.0)
    with pytest.raises(ConfigError, match="ratio_clip_c=1 is refused"):
        nemo_rl.Options(ratio_clip_c=1.0)
    bounds = nemo_rl.Truncation(nemo_rl.TruncationKind.seq_mask_tis, 2.0, 0.5)
    with pytest.raises(ConfigError, match="token weights"):
        nemo_rl.Options(token_level_loss=False, sequence_level_importance_ratios=True, truncation=bounds)
    with pytest.raises(ConfigError, match="token_level_loss"):
        nemo_rl.Options(sequence_level_importance_ratios=True)


def test_trl_vespo_refuses_one_weight_a_row() -> None:
    three = torch.tensor([-1.0, -2.0, -1.5])
    with pytest.raises(ConfigError, match="token_mask"):
        trl.loss_metrics(
            current_N=three, proximal_N=three, valid_N=torch.ones(3, dtype=torch.bool),
            row_N=torch.tensor([0, 0, 1]), length_B=torch.tensor([2, 1]), advantage_B=torch.ones(2),
            options=trl.Options(loss_type=trl.LossType.vespo, importance_sampling_level=RatioLevel.token),
            weight_N=torch.ones(2),
        )  # fmt: skip
