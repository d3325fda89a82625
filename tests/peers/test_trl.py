"""TRL's metrics against loops over rows and tokens."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch
from peers.ragged import mean, ragged

from trimtab.peers import trl
from trimtab.spec import RatioLevel

DATA = ragged(1)
CLIPPED = [trl.LossType.grpo, trl.LossType.bnpo, trl.LossType.dr_grpo, trl.LossType.dapo, trl.LossType.luspo]


def rows_of(top, bottom):
    a, b = DATA.rows(vars(DATA)[top]), DATA.rows(vars(DATA)[bottom])
    return [[x - y for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(a, b, strict=True)]


@pytest.mark.parametrize("low", [None, 0.8])
@pytest.mark.parametrize("mode", list(trl.SamplingMode))
def test_sampling(mode, low):
    found = trl.sampling_metrics(**DATA.of("proximal_N", "rollout_N"), mode=mode, clip_min=low, clip_max=1.3)
    by_row, masks = mode.value.startswith("sequence"), mode.value.endswith("mask")
    floor = -math.inf if low is None else low

    def bounded(r):
        return (r if floor <= r <= 1.3 else 0.0) if masks else max(min(r, 1.3), floor)

    rows = rows_of("proximal_N", "rollout_N")
    ratios = [math.exp(sum(ds)) for ds in rows] if by_row else [math.exp(d) for ds in rows for d in ds]
    ratios, apart = [bounded(r) for r in ratios], [abs(d) for ds in rows for d in ds]
    assert list(found.values()) == pytest.approx([mean(apart), max(apart), min(ratios), mean(ratios), max(ratios)])


def loss_metrics(**options):
    names = ("current_N", "proximal_N", "advantage_B", "entropy_N", "reference_N")
    return trl.loss_metrics(**DATA.of(*names), options=trl.Options(**options))


@pytest.mark.parametrize("loss_type", CLIPPED)
@pytest.mark.parametrize("level", [RatioLevel.token, RatioLevel.sequence, RatioLevel.sequence_token])
def test_clip_shares(level, loss_type):
    found = loss_metrics(loss_type=loss_type, importance_sampling_level=level, epsilon=0.1, epsilon_high=0.15)
    low, high = [], []
    for ds, a in zip(rows_of("current_N", "proximal_N"), DATA.advantage_B.tolist(), strict=True):
        row = [math.exp(mean(ds))] * (1 if level is RatioLevel.sequence else len(ds))
        if level is RatioLevel.token:
            row = [math.exp(d) for d in ds]
        low.append([r < 0.9 and a < 0 for r in row]), high.append([r > 1.15 and a > 0 for r in row])
    flat_low, flat_high = list(chain.from_iterable(low)), list(chain.from_iterable(high))
    assert any(flat_low) or any(flat_high)
    assert found["clip_ratio/low_mean"] == pytest.approx(mean(flat_low))
    assert found["clip_ratio/high_mean"] == pytest.approx(mean(flat_high))
    assert found["clip_ratio/region_mean"] == pytest.approx(mean(flat_low) + mean(flat_high))
    assert found["clip_ratio/low_min"] == pytest.approx(min(mean(row) for row in low if row))
    assert found["clip_ratio/high_max"] == pytest.approx(max(mean(row) for row in high if row))


def test_delta_bounds_the_ratio_before_the_shares():
    assert loss_metrics(epsilon_high=0.05)["clip_ratio/high_mean"] > 0
    assert loss_metrics(epsilon_high=0.05, delta=1.05)["clip_ratio/high_mean"] == 0


@pytest.mark.parametrize("level", [RatioLevel.token, RatioLevel.sequence])
@pytest.mark.parametrize("corrected", [False, True])
def test_kl_and_entropy(corrected, level):
    found = loss_metrics(
        loss_type=trl.LossType.sapo, beta=0.1, use_bias_correction_kl=corrected, importance_sampling_level=level
    )
    kls = []
    for xs, ds in zip(rows_of("reference_N", "current_N"), rows_of("current_N", "proximal_N"), strict=True):
        for x, d in zip(xs, ds, strict=True):
            ratio = math.exp(d if level is RatioLevel.token else mean(ds))
            kls.append((math.exp(x) - x - 1) * (ratio if corrected else 1.0))
    assert found == pytest.approx({"kl": mean(kls), "entropy": mean(DATA.entropy_N[DATA.valid_N].tolist())})


def test_cispo_cap():
    found = loss_metrics(loss_type=trl.LossType.cispo, epsilon_high=1.1)
    flags = [
        math.exp(d) > 1.1 and a > 0
        for ds, a in zip(rows_of("current_N", "proximal_N"), DATA.advantage_B.tolist(), strict=True)
        for d in ds
    ]
    assert found["cispo_clip_ratio"] == pytest.approx(mean(flags)) and any(flags)


def test_vespo_weight():
    weight_N = torch.where(DATA.valid_N, (DATA.proximal_N - DATA.rollout_N).exp().clamp(max=1.2), 1.0)
    found = trl.loss_metrics(
        **DATA.of("current_N", "proximal_N", "advantage_B"),
        options=trl.Options(loss_type=trl.LossType.vespo),
        weight_N=weight_N,
    )
    phis = []
    pairs = zip(rows_of("current_N", "proximal_N"), rows_of("proximal_N", "rollout_N"), strict=True)
    for (ds, cs), a in zip(pairs, DATA.advantage_B.tolist(), strict=True):
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        log_w = sum(ds) + sum(min(c, math.log(1.2)) for c in cs)
        phis.append(math.exp(rate + k * log_w - rate * math.exp(log_w)))
    assert found["vespo/phi_seq_mean"] == pytest.approx(mean(phis))
