"""AReaL's per-token statistics against loops over rows and tokens."""

from __future__ import annotations

import math

import pytest
import torch
from peers.ragged import mean, ragged

from trimtab.peers import areal
from trimtab.spec import RatioLevel

DATA = ragged(2)
NAMES = ("current_N", "proximal_N", "rollout_N", "advantage_B")


def expected(kept_N, level, low, high, c, weight_N=None):
    """ratio, loss, clip mask, dual clip mask of kept tokens, in order."""
    out = []
    for b in range(len(DATA.length_B)):
        at = [n for n in range(len(DATA.row_N)) if DATA.row_N[n] == b and kept_N[n]]
        ds, a = [float(DATA.current_N[n] - DATA.proximal_N[n]) for n in at], float(DATA.advantage_B[b])
        for n, d in zip(at, ds, strict=True):
            r = math.exp(d if level is RatioLevel.token else mean(ds))
            free, bounded = -a * r, -a * min(max(r, 1 - low), 1 + high)
            loss, dual = max(free, bounded), False
            if c is not None:
                loss, dual = min(loss, c * abs(a)), c * abs(a) < loss
            out.append((r, loss * (1.0 if weight_N is None else float(weight_N[n])), free < bounded, dual))
    return [list(column) for column in zip(*out, strict=True)]


@pytest.mark.parametrize("c", [None, 1.02])
@pytest.mark.parametrize("level", [RatioLevel.token, RatioLevel.sequence])
def test_without_rejection(level, c):
    found = areal.actor_stats(**DATA.of(*NAMES), options=areal.Options(level, 0.05, 0.1, c))
    ratio, loss, clipped, dual = expected(DATA.valid_N, level, 0.05, 0.1, c)
    at = DATA.valid_N
    assert found["importance_weight"][at].tolist() == pytest.approx(ratio)
    assert found["loss"][at].tolist() == pytest.approx(loss)
    assert found["clip_mask"][at].tolist() == clipped and any(clipped)
    assert found["dual_clip_mask"][at].tolist() == dual and any(dual) == (c is not None)
    assert found["importance_weight"][~at].tolist() == [0.0] * int((~at).sum())
    assert not found["clip_mask"][~at].any()
    assert "behave_mask" not in found


@pytest.mark.parametrize("level", [RatioLevel.token, RatioLevel.sequence])
def test_masked_by_rejection(level):
    raw_N = torch.where(DATA.valid_N, (DATA.proximal_N - DATA.rollout_N).exp(), 1.0)
    keep_N = DATA.valid_N & (raw_N < 1.2)
    found = areal.actor_stats(
        **DATA.of(*NAMES), options=areal.Options(level), behave=areal.Behave(keep_N=keep_N, weight_N=raw_N)
    )
    ratio, loss, _, _ = expected(keep_N, level, 0.2, 0.2, None, raw_N)
    assert found["importance_weight"][keep_N].tolist() == pytest.approx(ratio)
    assert found["loss"][keep_N].tolist() == pytest.approx(loss)
    assert found["loss"][DATA.valid_N & ~keep_N].abs().sum() == 0
    assert torch.equal(found["behave_mask"], keep_N)
    assert torch.equal(found["behave_imp_weight"], torch.where(keep_N, raw_N, 0.0))
    apart_N = DATA.proximal_N - DATA.rollout_N
    assert torch.equal(found["behave_approx_kl"], torch.where(keep_N, apart_N, 0.0))
    gone = int((DATA.valid_N & ~keep_N).sum())
    assert gone and found["filtered_fraction"] == pytest.approx(gone / int(DATA.valid_N.sum()))


def test_clamped_weights_are_counted_as_filtered():
    raw_N = torch.where(DATA.valid_N, (DATA.proximal_N - DATA.rollout_N).exp(), 1.0)
    bounded_N = raw_N.clamp(0.9, 1.1)
    found = areal.actor_stats(
        **DATA.of(*NAMES), options=areal.Options(), behave=areal.Behave(DATA.valid_N, bounded_N, raw_N)
    )
    moved = sum(not 0.9 <= r <= 1.1 for r in raw_N[DATA.valid_N].tolist())
    assert moved and found["filtered_fraction"] == pytest.approx(moved / int(DATA.valid_N.sum()))
