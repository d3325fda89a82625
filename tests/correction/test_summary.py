"""The five numbers against ``measure`` and against the weights themselves."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from trimtab.correction import RejectRule, WeightRule, correct, correct_given, log_ratio, measure, summarise
from trimtab.spec import Level, OverTokens, Statistic, TisMode

LENGTHS = [4, 0, 7, 1, 12, 3, 40]
RULES = [
    RejectRule(Statistic.ratio, Level.token, None, 0.5, 3.0),
    RejectRule(Statistic.k3, Level.sequence, OverTokens.mean, upper=0.3),
]


def batch(scale: float, odd: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    n = sum(LENGTHS)
    rollout = -torch.rand(n, generator=generator, dtype=torch.float64)
    numerator = rollout + scale * torch.randn(n, generator=generator, dtype=torch.float64)
    mask = torch.rand(n, generator=generator) > 0.2
    if odd:
        rollout[1], numerator[13], rollout[14], numerator[15] = math.nan, -math.inf, -math.inf, math.nan
        mask[[1, 13, 14, 15]] = True
    return [numerator, rollout, mask, torch.tensor(LENGTHS)]


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("scale", [0.0, 0.5, 20.0])
def test_the_summary_is_that_of_the_weights(scale, odd):
    tensors = batch(scale, odd)
    mask, shared = tensors[2], log_ratio(*tensors)
    for level, mode, normalize, rules in itertools.product(Level, [None, *TisMode], [False, True], [[], RULES]):
        weight = None if mode is None else WeightRule(level, mode, 0.6, 1.8, normalize)
        done = correct_given(shared, weight=weight, reject=rules)
        alone = correct(*tensors, weight=weight, reject=rules)
        assert torch.equal(done.weight_N, alone.weight_N) and torch.equal(done.keep_N, alone.keep_N)
        found, metrics = summarise(done), measure(alone).as_dict()
        for name in ("mis_kept_token_fraction", "mis_kept_seq_fraction", "mis_ess"):
            assert found[name] == pytest.approx(metrics[name], rel=1e-12)
        kept = done.weight_N[done.keep_N]
        assert found["mis_weight_mean"] == pytest.approx(float(kept.mean()) if len(kept) else 0.0, rel=1e-12)
        d = tensors[0][mask] - tensors[1][mask]
        d = d.where(~tensors[1][mask].isnan(), 0.0).nan_to_num(nan=-math.inf, posinf=math.inf)
        rows = torch.arange(len(LENGTHS)).repeat_interleave(tensors[3])[mask]
        if level is not Level.token:
            total = torch.zeros(len(LENGTHS), dtype=torch.float64).index_add(0, rows, d).nan_to_num(nan=-math.inf)
            count = torch.zeros(len(LENGTHS), dtype=torch.float64).index_add(0, rows, torch.ones_like(d))
            d = (total if level is Level.sequence else total / count)[rows]
        low, high = {
            None: (-math.inf, math.inf),
            TisMode.off: (-20, 20),
            TisMode.unbounded: (-20, 20),
            TisMode.mask: (-20, 20),
            TisMode.truncate: (-20, math.log(1.8)),
        }.get(mode, (math.log(0.6), math.log(1.8)))
        saturated = float(((d < low) | (d > high)).double().mean())
        assert found["mis_saturated_fraction"] == pytest.approx(saturated, abs=1e-15), mode


def test_no_tokens():
    none = torch.zeros(0)
    done = correct(none, none, none.bool(), torch.zeros(2, dtype=torch.int64), weight=None, m2=0.1, reject=RULES)
    assert set(summarise(done).values()) == {0.0}


def test_the_shared_log_ratio_is_left_as_it_was():
    """No method may change what the next one sees."""
    tensors = batch(0.5, True)
    shared = log_ratio(*tensors)
    before = shared.log_ratio_M.clone(), shared.ratio_M.clone(), shared.sum_B.clone()
    for level, mode, inverse in itertools.product(Level, TisMode, [False, True]):
        rules = [RejectRule(s, Level.token, None, 0.1, 1.5, inverse) for s in Statistic]
        summarise(correct_given(shared, weight=WeightRule(level, mode, 0.6, 1.8, True), reject=rules, veto=0.5, m2=0.1))
    for one, two in zip(before, (shared.log_ratio_M, shared.ratio_M, shared.sum_B), strict=True):
        assert torch.equal(one, two)
