"""PipelineRL's metrics against loops over rows and tokens."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch
from peers.ragged import mean, ragged

from trimtab.peers import pipelinerl
from trimtab.peers.pipelinerl import Options, PolicyLoss

DATA = ragged(3)
NAMES = ("current_N", "rollout_N", "reference_N", "advantage_B", "reward_B", "entropy_N")
WEIGHT_N = pipelinerl.token_weights(DATA.row_N, batch_size=4)


def step(**changes):
    given = dict(weight_N=WEIGHT_N, loss=-0.5, options=Options(), **DATA.of(*NAMES)) | changes
    return pipelinerl.step_metrics(**given)


def rows_of(function, *names):
    """Each row's list of a function of its tokens' values."""
    columns = [DATA.rows(vars(DATA)[name]) for name in names]
    return [[function(*v) for v in zip(*rows, strict=True)] for rows in zip(*columns, strict=True)]


def test_means_of_rows_are_summed():
    found = step(kl_coef=0.1, entropy_bonus_coef=0.2, input_size=77)
    for name, source in (("new_logprobs", "current_N"), ("old_logprobs", "rollout_N"), ("entropy", "entropy_N")):
        assert found[name] == pytest.approx(sum(map(mean, DATA.rows(vars(DATA)[source]))))
    kl = rows_of(lambda r, c: math.exp(r - c) - (r - c) - 1, "reference_N", "current_N")
    assert found["kl"] == pytest.approx(sum(map(mean, kl)))
    assert [found["max_kl"], found["min_kl"]] == pytest.approx(
        [max(max(row) for row in kl if row), min(min(row) for row in kl if row)]
    )
    ref_old = rows_of(lambda r, g: math.exp(r - g), "reference_N", "rollout_N")
    assert found["ratio_ref_old"] == pytest.approx(sum(map(mean, ref_old)))
    filled = [b for b, row in enumerate(kl) if row]
    assert found["advantage"] == pytest.approx(sum(float(DATA.advantage_B[b]) for b in filled))
    assert found["max_advantage"] == pytest.approx(max(float(DATA.advantage_B[b]) for b in filled))
    assert found["reward"] == pytest.approx(sum(float(DATA.reward_B[b]) for b in filled))
    assert found["token_weight"] == pytest.approx(len(filled) / 4)
    assert found["num_output_tokens_sum"] == sum(map(len, kl))
    assert [found["kl_coef"], found["entropy_bonus_coef"], found["input_size"]] == pytest.approx([0.5, 1.0, 77])
    assert [found["loss"], found["max_loss"], found["min_loss"]] == [-0.5] * 3


@pytest.mark.parametrize("policy_loss", list(PolicyLoss))
def test_ratio_and_its_clamp(policy_loss):
    options = Options(policy_loss, epsilon_low=0.1, epsilon_high=0.15)
    given = DATA.of("current_N", "rollout_N")
    found = pipelinerl.ratio_metrics(**given, options=options)
    apart = rows_of(lambda c, g: c - g, "current_N", "rollout_N")
    ratios, flags = [], []
    for ds in apart:
        raw = [math.exp(d) for d in ds]
        if policy_loss is PolicyLoss.reinforce:
            ratios.append([min(r, 1.15) for r in raw]), flags.append([r > 1.15 for r in raw])
        elif policy_loss is PolicyLoss.ppo:
            ratios.append(raw), flags.append([not 0.9 <= r <= 1.15 for r in raw])
        else:
            ratios.append(raw), flags.append([not 0.9 <= math.exp(mean(ds)) <= 1.15] * len(ds))
    every = list(chain.from_iterable(ratios))
    assert found["ratio_new_old"] == pytest.approx(sum(map(mean, ratios)))
    assert found["ratio_new_old_sum"] == pytest.approx(sum(every))
    assert found["ratio_new_old_squared_sum"] == pytest.approx(sum(r * r for r in every))
    assert found["rl/ess"] == pytest.approx(sum(every) ** 2 / sum(r * r for r in every) / len(every))
    assert found["clamp_log_ratio_new_old_indicator"] == pytest.approx(sum(map(mean, flags)))
    assert found["kl_new_old"] == pytest.approx(sum(mean([math.exp(d) - d - 1 for d in ds]) for ds in apart))
    assert found["mean_abs_log_ratio_new_old"] == pytest.approx(sum(mean([abs(d) for d in ds]) for ds in apart))
    in_step = step(options=options)
    assert found.items() <= in_step.items()


def test_reference_ratio_is_clamped():
    found = step(options=Options(clamp_log_ratio_ref_new_value=0.3))
    apart = rows_of(lambda r, c: r - c, "reference_N", "current_N")
    clamped = [[min(max(x, -0.3), 0.3) for x in xs] for xs in apart]
    flags = [[abs(x) > 0.3 for x in xs] for xs in apart]
    assert found["kl"] == pytest.approx(sum(mean([math.exp(x) - x - 1 for x in xs]) for xs in clamped))
    assert found["clamp_log_ratio_ref_new_indicator"] == pytest.approx(sum(map(mean, flags))) and any(map(any, flags))
    assert found["ratio_ref_new"] == pytest.approx(sum(mean([math.exp(x) for x in xs]) for xs in apart))


def test_a_batch_without_labels_has_its_size_only():
    nothing = dict(valid_N=torch.zeros_like(DATA.valid_N))
    assert step(**nothing) == {"input_size": float(len(DATA.row_N))}
    given = DATA.of("current_N", "rollout_N") | nothing
    assert pipelinerl.ratio_metrics(**given, options=Options()) == {}


def test_token_weights_and_coefficients():
    group, overflow = torch.tensor([2.0, 2.0, 5.0, 5.0, 4.0]), torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    weight_N = pipelinerl.token_weights(DATA.row_N, batch_size=8, group_tokens_B=group, overflow_B=overflow)
    assert weight_N.tolist() == [[0.5, 0.0, 0.2, 0.2, 0.25][b] for b in DATA.row_N.tolist()]
    assert set(WEIGHT_N.tolist()) == {0.25}
    assert pipelinerl.linear_decay(3, 10, 0.01, 0.0) == pytest.approx(0.007)
    assert pipelinerl.ess(0.0, 0.0, 3) == 0.0
