"""What the peers' own options mean: bounds that are left empty, constants, coefficients of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from trimtab.errors import ConfigError
from trimtab.peers import miles, nemo_rl, pipelinerl, prime_rl, trl, verl_rules
from trimtab.peers.verl import RsOption
from trimtab.spec import Level, OverTokens, RatioLevel, RejectSpec, Statistic


def test_verl_k1_bounds_the_inverse_ratio_and_fills_its_lower_bound() -> None:
    one = verl_rules.rule(RsOption.seq_mean_k1, upper=4.0)
    assert one == RejectSpec(Statistic.ratio, Level.sequence, OverTokens.mean, 0.25, 4.0, inverse=True, clamp=20.0)
    assert verl_rules.rule(RsOption.token_k1, upper=4.0, lower=0.6).lower == 0.6
    assert verl_rules.rule(RsOption.token_k1, upper=4.0).over_tokens is None


def test_verl_k2_and_k3_have_an_upper_bound_alone() -> None:
    for option in RsOption:
        if not option.two_sided:
            one = verl_rules.rule(option, upper=0.3)
            assert (one.statistic.name, one.lower, one.upper) == (option.name[-2:], None, 0.3)
            assert one.level is (Level.token if option.of_tokens else Level.sequence)
            with pytest.raises(ConfigError, match="no lower bound"):
                verl_rules.rule(option, upper=0.3, lower=0.1)
        with pytest.raises(ConfigError, match="no threshold"):
            verl_rules.rule(option, upper=None)


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


def test_nemo_rl_refuses_what_it_asserts() -> None:
    with pytest.raises(ConfigError, match="ratio_min"):
        nemo_rl.Truncation(nemo_rl.TruncationKind.icepop, 2.0)
    with pytest.raises(ConfigError, match="ratio_min <= ratio"):
        nemo_rl.Truncation(nemo_rl.TruncationKind.tis, 2.0, 3.0)
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
