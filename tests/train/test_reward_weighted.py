"""``train/reward_weighted`` against a loop over tokens in float64."""

from __future__ import annotations

import math

import pytest
import torch
from composing import composed
from toy import ToyPolicy, toy_batch

from trimtab.objective.advantage import group_advantages
from trimtab.spec import Baseline, Scale
from trimtab.train.clock import Clock
from trimtab.train.optim import Optimizer
from trimtab.train.update import Updater

TRUNCATE = (lambda r: min(r, 1.1), lambda r: True)
MASK = (lambda r: r, lambda r: 0.9 <= r <= 1.1)
REJECT = (lambda r: 1.0, lambda r: 0.9 <= r <= 1.1)


@pytest.mark.parametrize(
    ("overrides", "weight", "keep"),
    [
        (["algo=standard"], lambda r: 1.0, lambda r: True),
        (["algo=decoupled", "mis.tis_upper_bound=1.1"], *TRUNCATE),
        (["algo=reinforce", "mis.tis_upper_bound=1.1"], *TRUNCATE),
        (["tis_mode=mask", "mis.tis_lower_bound=0.9", "mis.tis_upper_bound=1.1"], *MASK),
        (["tis_mode=off", "rs=token", "mis.rs_lower_bound=0.9", "mis.rs_upper_bound=1.1"], *REJECT),
        (["algo=decoupled", "algo.metrics_only=true"], lambda r: 1.0, lambda r: True),
    ],
)
@pytest.mark.parametrize("cut", [["optim.microbatch_tokens=12"], ["optim.minibatches=2"], ["optim.epochs=2"]])
def test_rewards_by_the_correction_s_weight(overrides: list[str], weight, keep, cut: list[str]) -> None:  # type: ignore[no-untyped-def]
    spec, policy = composed(*overrides, *cut, "optim.lr=1e-9"), ToyPolicy()
    batch = toy_batch(policy)
    dropped_B = torch.zeros(batch.rows, dtype=torch.bool)
    dropped_B[1] = True
    advantage_B = group_advantages(
        batch.reward_B, batch.group_B, baseline=Baseline.group_mean, scale=Scale.std
    ).advantage_B
    update = Updater(policy, Optimizer(policy.parameters(), spec.optim, spec.steps), spec)
    metrics = update(batch, advantage_B, dropped_B, torch.zeros_like(batch.version_N), 1, Clock()).metrics

    table, at, total, weights = policy.initial, 0, 0.0, 0.0
    for row in range(batch.rows):
        ids, n = batch.ids_B[row].tolist(), int(batch.length_B[row])
        applied = []
        for i in range(len(ids) - n, len(ids)):
            logp = float(table[ids[i - 1]].log_softmax(0)[ids[i]])
            ratio = math.exp(logp - float(batch.rollout_logp_N[at]))
            applied += [weight(ratio) * keep(ratio)] if bool(batch.mask_N[at]) else []
            at += 1
        if applied and not bool(dropped_B[row]):
            mean = sum(applied) / len(applied)
            total, weights = total + mean * float(batch.reward_B[row]), weights + mean
    assert metrics["train/reward_weighted"] == pytest.approx(total / weights, rel=1e-5)


def test_nothing_kept_is_0() -> None:
    spec, policy = composed("tis_mode=off", "rs=token", "mis.rs_lower_bound=0.9999999",
                            "mis.rs_upper_bound=1.0000001"), ToyPolicy()  # fmt: skip
    batch = toy_batch(policy)
    update = Updater(policy, Optimizer(policy.parameters(), spec.optim, spec.steps), spec)
    none_B = torch.zeros(batch.rows)
    outcome = update(batch, none_B, none_B.bool(), torch.zeros_like(batch.version_N), 1, Clock())
    assert outcome.metrics["train/reward_weighted"] == 0.0
