"""Metrics against float64 loops, exact merging, and docs/metrics.md."""

from __future__ import annotations

import itertools
import math
from functools import reduce
from pathlib import Path

import oracle
import pytest
import torch

from trimtab.correction import CorrectionStats, RejectRule, WeightRule, correct, measure, rows
from trimtab.spec import Level, TisMode

BOUNDS = {Level.token: (0.5, 2.0), Level.sequence: (0.3, 3.0), Level.geometric: (0.9, 1.1)}
LENGTHS = [0, 9, 1, 0, 40, 17, 3, 150, 2, 0, 30]


def batch(seed: int, odd: bool = False, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    rollout = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    numerator = rollout + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    mask = torch.rand(n, generator=generator) > 0.2
    mask[50:67] = False
    if odd:
        at = 50 + torch.randperm(n - 50, generator=generator)[:40]
        rollout[at[:20]], rollout[at[20:25]], numerator[at[23:30]] = math.nan, -math.inf, -math.inf
        numerator[at[30:33]], numerator[at[33:]] = math.nan, 25.0
    return [numerator.to(dtype), rollout.to(dtype), mask, torch.tensor(LENGTHS)]


def rows_of(tensors: list[torch.Tensor]) -> list[list]:
    return [[row.tolist() for row in x.split(LENGTHS)] for x in tensors[:3]]


def close(metrics: dict[str, float], expected: dict[str, float], rel: float = 1e-10) -> None:
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=rel, abs=1e-13), name


@pytest.mark.parametrize("odd", [False, True])
def test_mismatch_metrics_match_the_loops(odd):
    tensors = batch(0, odd)
    metrics = measure(correct(*tensors, weight=None)).as_dict()
    close(metrics, oracle.mismatch_metrics(*rows_of(tensors)))
    magnitudes = sorted(
        abs(a - b) for a, b, m in zip(*(x.tolist() for x in tensors[:3]), strict=True) if m and math.isfinite(a - b)
    )
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        exact = magnitudes[math.ceil(share * len(magnitudes)) - 1]
        assert metrics[f"mis_abs_log_ratio_{name}"] == pytest.approx(exact, rel=2**-8)
    missing = sum(math.isnan(b) and m for b, m in zip(tensors[1].tolist(), tensors[2].tolist(), strict=True))
    assert metrics["mis_missing_logprob_count"] == missing
    assert metrics["mis_infinite_log_ratio_count"] == int(tensors[2].sum()) - missing - len(magnitudes)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", list(TisMode))
@pytest.mark.parametrize("level", list(Level))
def test_weight_and_rejection_metrics_match_the_loops(level, mode, normalize, odd):
    tensors = batch(1, odd)
    a, b, mask = rows_of(tensors)
    lower, upper = BOUNDS[level]
    rejections = [(), (Level.token,), (Level.sequence,), (Level.token, Level.geometric)]
    for reject, veto in itertools.product(rejections, [None, 0.3]):
        rules = [RejectRule.ratio(r, *BOUNDS[r]) for r in reject]
        done = correct(*tensors, weight=WeightRule(level, mode, lower, upper, normalize), reject=rules, veto=veto)
        weight, keep, factor = oracle.correction(
            a, b, mask, level=level.value, mode=mode.value, lower=lower, upper=upper, normalize=normalize,
            rules=[(r.value, *BOUNDS[r]) for r in reject], veto=veto,
        )  # fmt: skip
        raw, _, _ = oracle.correction(a, b, mask, level=level.value, mode="off")
        value, own = _log_ratios(a, b, mask, level), list(zip(weight, keep, mask, strict=True))
        final = [[w for w, m in zip(ws, ms, strict=True) if m] for ws, _, ms in own]
        kept = [[w for w, k in zip(ws, ks, strict=True) if k] for ws, ks, _ in own]
        unbounded = [[w for w, m in zip(ws, ms, strict=True) if m] for ws, ms in zip(raw, mask, strict=True)]
        rejected = sum(map(len, final)) - sum(map(len, kept))
        final, some = [row for row in final if row], [row for row in kept if row]
        high = _share(value, lambda v: oracle.exp(v) > upper) if mode not in (TisMode.off, TisMode.unbounded) else 0.0
        low = (
            _share(value, lambda v: oracle.exp(v) < lower)
            if mode in (TisMode.clip, TisMode.mask, TisMode.zero)
            else 0.0
        )
        tokens = sum(map(len, final))
        expected = {
            "mis_tis_weight_before_bound": oracle.mean([oracle.mean(row) for row in unbounded if row]),
            "mis_tis_weight_after_bound": factor * oracle.mean([oracle.mean(row) for row in final]),
            "mis_is_ratio_mean_after_tis_rs": factor * oracle.mean([oracle.mean(row) for row in some]),
            "mis_is_ratio_mean_final": oracle.mean([oracle.mean(row) for row in final]),
            "mis_is_ratio_min_final": oracle.mean([min(row) for row in final]),
            "mis_is_ratio_max_final": oracle.mean([max(row) for row in final]),
            "mis_batch_norm_factor": factor,
            "mis_kept_token_fraction": sum(map(len, kept)) / tokens,
            "mis_kept_seq_fraction": len(some) / len(final),
            "mis_ess": oracle.effective_share([w for row in kept for w in row] + [0.0] * rejected),
            "tis_clipfrac": high + low,
            "mis_clamped_log_ratio_count": _clamped(value, level),
        }
        match mode:
            case TisMode.off | TisMode.unbounded:
                pass
            case TisMode.truncate:
                expected["mis_tis_truncate_fraction"] = high
            case TisMode.clip | TisMode.mask | TisMode.zero:
                expected |= {f"mis_tis_{mode.value}_fraction_low": low, f"mis_tis_{mode.value}_fraction_high": high}
        if len(reject) == 1:
            r_lower, r_upper = BOUNDS[reject[0]]
            r_value = _log_ratios(a, b, mask, reject[0])
            expected["mis_rs_mask_fraction_low"] = _share(r_value, lambda v, bound=r_lower: oracle.exp(v) < bound)
            expected["mis_rs_mask_fraction_high"] = _share(r_value, lambda v, bound=r_upper: oracle.exp(v) > bound)
        if veto is not None:
            bad = [[math.isinf(v) or v < math.log(veto) for v in row] for row in _log_ratios(a, b, mask, Level.token)]
            expected["mis_rs_catastrophic_token_fraction"] = oracle.mean([oracle.mean(row) for row in bad if row])
            expected["mis_rs_catastrophic_seq_fraction"] = oracle.mean([any(row) for row in bad if row])
        metrics = measure(done).as_dict()
        close(metrics, expected)
        assert all(map(math.isfinite, metrics.values()))


def _log_ratios(a: list, b: list, mask: list, level: Level) -> list[list[float]]:
    """Per valid token, the log-ratio of its level."""
    d = [
        [oracle._difference(x, y) for x, y, m in zip(xs, ys, ms, strict=True) if m]
        for xs, ys, ms in zip(a, b, mask, strict=True)
    ]
    return d if level is Level.token else [[oracle._row_value(row, level.value)] * len(row) for row in d]


def _share(value: list[list[float]], outside) -> float:
    return oracle.mean([oracle.mean([outside(v) for v in row]) for row in value if row])


def _clamped(value: list[list[float]], level: Level) -> int:
    decisions = [v for row in value for v in (row if level is Level.token else row[:1])]
    return sum(abs(v) > oracle.CLAMP for v in decisions)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("level", list(Level))
def test_statistics_merge_exactly(level, odd):
    numerator, rollout, mask, length_B = batch(2, odd)
    weight = WeightRule(level, TisMode.mask, *BOUNDS[level])

    def part(i: int, j: int) -> CorrectionStats:
        at = slice(int(length_B[:i].sum()), int(length_B[:j].sum()))
        rules = [RejectRule.ratio(Level.geometric, 0.9, 1.1)]
        return measure(
            correct(numerator[at], rollout[at], mask[at], length_B[i:j], weight=weight, reject=rules, veto=0.1)
        )

    whole = part(0, len(LENGTHS))
    for cuts in ([5], [1, 4, 8], range(1, len(LENGTHS))):
        parts = [part(i, j) for i, j in itertools.pairwise([0, *cuts, len(LENGTHS)])]
        for ordered in (parts, parts[::-1]):
            merged = reduce(CorrectionStats.merge, ordered)
            assert merged.counts == whole.counts and torch.equal(merged.magnitude.bins, whole.magnitude.bins)
            assert merged.log_ratio == whole.log_ratio
            close(merged.as_dict(), whole.as_dict(), rel=1e-13)
            assert merged.as_dict().keys() == whole.as_dict().keys()


def test_the_merged_factor_is_that_of_the_whole_batch():
    tensors = batch(3)
    weight = WeightRule(Level.geometric, TisMode.mask, 0.98, 1.02, batch_normalize=True)
    whole = measure(correct(*tensors, weight=weight)).as_dict()
    pieces = [x.split(LENGTHS) for x in tensors[:3]]
    mass = reduce(
        lambda one, other: one.merge(other),
        (correct(*row, torch.tensor([len(row[0])]), weight=weight).mass for row in zip(*pieces, strict=True)),
    )
    parts = [
        measure(correct(*row, torch.tensor([len(row[0])]), weight=weight, factor=mass.value))
        for row in zip(*pieces, strict=True)
    ]
    close(reduce(CorrectionStats.merge, parts).as_dict(), whole, rel=1e-13)


@pytest.mark.parametrize("shift", [0.01, 0.1, 1.0, 10.0, 100.0, 700.0, 3e4])
def test_raw_metrics_show_a_gap_that_the_applied_ones_hide(shift):
    """Weights are bounded, raw quantiles and k3 are not; all stay finite."""
    zero, mask, length = torch.zeros(64), torch.ones(64, dtype=torch.bool), torch.tensor([32, 32])
    for sign in (1, -1):
        done = correct(zero + sign * shift, zero, mask, length, weight=WeightRule(Level.token, TisMode.clip, 0.5, 2.0))
        metrics = measure(done).as_dict()
        assert all(map(math.isfinite, metrics.values()))
        assert 0.5 <= metrics["mis_is_ratio_mean_final"] <= 2.0
        for name in ("p50", "p99", "max"):
            assert metrics[f"mis_abs_log_ratio_{name}"] == pytest.approx(shift, rel=2**-8)
        d = float(torch.tensor(sign * shift))
        assert metrics["mis_k3_kl"] == pytest.approx(math.expm1(min(d, 600)) - d, rel=1e-9)


def test_float32_metrics_are_summed_in_float64():
    tensors = batch(4, dtype=torch.float32)
    metrics = measure(correct(*tensors, weight=None)).as_dict()
    close(metrics, oracle.mismatch_metrics(*rows_of(tensors)), rel=1e-6)


@pytest.mark.parametrize(
    ("numerator", "rollout", "share"),
    [
        ([-math.inf, -math.inf, -math.inf, -math.inf], [-1.0] * 4, 0.0),
        ([-1.0, -1.0, -1.0, -1.0], [-math.inf] * 4, 0.0),
        ([-math.inf, -1.0, math.nan, -1.0], [-1.0, -math.inf, -1.0, -math.inf], 0.0),
        ([-1.0, -math.inf, -1.0, -1.0], [-1.0] * 4, 0.5),
        ([-1.0, -1.0, -1.0, -1.0], [-1.0, math.nan, -1.0, -1.0], 1.0),
    ],
)
def test_a_row_with_an_infinite_log_ratio_is_no_effective_sample(numerator, rollout, share):
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (numerator, rollout))
    done = correct(a, b, torch.ones(4, dtype=torch.bool), torch.tensor([2, 0, 2]), weight=None)
    assert measure(done).as_dict()["mis_ess_seq"] == share


@pytest.mark.parametrize("odd", [False, True])
def test_blocks_and_threads_change_nothing(odd, monkeypatch):
    threads, results = torch.get_num_threads(), []
    for block, workers in ((1 << 20, 1), (16, 1), (16, 2)):
        monkeypatch.setattr(rows, "BLOCK", block)
        monkeypatch.setattr(rows, "SHARE", 1)
        torch.set_num_threads(workers)
        done = correct(*batch(0, odd), weight=WeightRule(Level.token, TisMode.clip, 0.5, 2.0), veto=0.1)
        assert (len(done.given.rows.blocks) > 1) is (block == 16)
        results.append(measure(done).as_dict())
    torch.set_num_threads(threads)
    close(results[1], results[0], rel=1e-14)
    assert results[2] == results[1]


def test_every_metric_stands_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for mode, rules, veto in itertools.product(TisMode, [[], [RejectRule.ratio(Level.token, 0.5, 2.0)]], [None, 0.1]):
        done = correct(*batch(0), weight=WeightRule(Level.token, mode, 0.5, 2.0), reject=rules, veto=veto)
        for name in measure(done).as_dict():
            assert f"`{name}`" in page, name
