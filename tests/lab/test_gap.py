"""Every figure of a gap against float64 loops over plain lists."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from trimtab.errors import DataError
from trimtab.lab.bootstrap import Resamples, interval
from trimtab.lab.gap import APART, QUANTILES, Pairs, measure

NAN, INF = math.nan, math.inf
Row = list[tuple[float, float]]  # (rollout, trainer)


def pairs_of(rows: list[Row], masked: set[tuple[int, int]] = frozenset(), entropy: list[float] | None = None) -> Pairs:  # type: ignore[assignment]
    flat = [pair for row in rows for pair in row]
    return Pairs(
        rollout_N=torch.tensor([e for e, _ in flat], dtype=torch.float64),
        trainer_N=torch.tensor([t for _, t in flat], dtype=torch.float64),
        length_B=torch.tensor([len(row) for row in rows], dtype=torch.int64),
        mask_N=torch.tensor([(r, i) not in masked for r, row in enumerate(rows) for i in range(len(row))],
                            dtype=torch.bool),
        entropy_N=None if entropy is None else torch.tensor(entropy, dtype=torch.float64),
    )  # fmt: skip


def ragged(seed: int, rows: int = 9, spread: float = 0.3) -> list[Row]:
    draw = random.Random(seed)
    found = []
    for length in (draw.randrange(0, 7) for _ in range(rows)):
        rollout = [-draw.expovariate(1.0) for _ in range(length)]
        found.append([(e, min(0.0, e + draw.gauss(0.0, spread))) for e in rollout])
    return found


def level_figures(logs: list[float]) -> dict[str, float]:
    n, w = len(logs), [math.exp(x) for x in logs]
    return {
        "k1": -math.fsum(logs) / n,
        "k3": math.fsum(r - 1 - x for r, x in zip(w, logs, strict=True)) / n,
        "chi2": math.fsum(r * r for r in w) / n - 1,
        "ess": math.fsum(w) ** 2 / (n * math.fsum(r * r for r in w)),
        "weight_mean": math.fsum(w) / n,
        "abs_mean": math.fsum(abs(x) for x in logs) / n,
    }


def oracle(rows: list[Row]) -> dict[str, float]:
    dp = [math.exp(t) - math.exp(e) for row in rows for e, t in row]
    d = [t - e for row in rows for e, t in row]
    n, mean = len(d), math.fsum(d) / len(d)
    found = {
        "dp_below_0.001": sum(abs(x) < 0.001 for x in dp) / n,
        **{f"dp_from_{b}": sum(abs(x) >= b for x in dp) / n for b in APART},
        "dp_mean": math.fsum(dp) / n,
        "dp_abs_mean": math.fsum(map(abs, dp)) / n,
        "dp_max": max(map(abs, dp)),
        "log_ratio_mean": mean,
        "log_ratio_std": math.sqrt(math.fsum((x - mean) ** 2 for x in d) / n),
        "log_ratio_abs_mean": math.fsum(map(abs, d)) / n,
        "log_ratio_min": min(d),
        "log_ratio_max": max(d),
        **{f"log_ratio_{k}": float(np.quantile(d, q, method="inverted_cdf")) for k, q in QUANTILES.items()},
    }
    sums = [math.fsum(t - e for e, t in row) for row in rows if row]
    means = [math.fsum(t - e for e, t in row) / len(row) for row in rows if row]
    for name, logs in (("token", d), ("sequence", sums), ("geometric", means)):
        found |= {f"{name}_{key}": value for key, value in level_figures(logs).items()}
    return found


@pytest.mark.parametrize("seed", range(5))
def test_figures_equal_float64_loops(seed: int) -> None:
    rows = ragged(seed)
    gap = measure(pairs_of(rows), draws=10)
    expected = oracle(rows)
    assert set(gap.figures) == set(expected)
    assert {name: figure.value for name, figure in gap.figures.items()} == pytest.approx(expected, rel=1e-11, abs=1e-14)


def test_std_survives_a_large_offset() -> None:
    rows = [[(-1.0, -1.0 - 1e6 + x) for x in (0.0, 0.1, 0.2)]]
    assert measure(pairs_of(rows))["log_ratio_std"].value == pytest.approx(math.sqrt(0.02 / 3), rel=1e-6)


def test_equal_sides_have_no_gap() -> None:
    rows = [[(e, e) for e, _ in row] for row in ragged(1)]
    gap = measure(pairs_of(rows))
    for name, figure in gap.figures.items():
        good = 1.0 if name.endswith(("_ess", "_weight_mean")) or name == "dp_below_0.001" else 0.0
        assert figure.value == good, name


def test_missing_and_masked_tokens_are_left_out_and_counted() -> None:
    clean = [[(-1.0, -1.5), (-0.2, -0.1)], [(-3.0, -2.0)], []]
    dirty = [[(-1.0, -1.5), (NAN, -0.5), (-0.2, -0.1), (-9.0, -0.1)], [(-3.0, -2.0), (-1.0, NAN), (INF, -1.0)], []]
    gap = measure(pairs_of(dirty, masked={(0, 3)}))
    assert {k: f.value for k, f in gap.figures.items()} == pytest.approx(oracle(clean), rel=1e-12)
    counts = gap.counts
    assert (counts.responses, counts.empty, counts.tokens, counts.scored, counts.masked) == (3, 1, 7, 3, 1)
    assert (counts.missing_rollout, counts.missing_trainer, counts.infinite) == (2, 1, 0)


def test_a_probability_of_zero_counts_in_dp_and_not_in_d() -> None:
    rows = [[(-1.0, -INF), (-1.0, -1.1)], [(-INF, -2.0)], [(-INF, -INF), (-0.5, -0.4)]]
    gap = measure(pairs_of(rows))
    assert gap.counts.infinite == 2 and gap.counts.scored == 5
    assert gap["dp_max"].value == pytest.approx(math.exp(-1.0))
    assert gap["log_ratio_mean"].value == pytest.approx((-0.1 + 0.0 + 0.1) / 3)
    # Of the responses only the third has log-ratios that are all finite: 0 (zero on both sides) and 0.1.
    assert gap["sequence_k1"].value == pytest.approx(-0.1)
    assert gap["geometric_k1"].value == pytest.approx(-0.05)


def test_nothing_scored_is_nan_everywhere() -> None:
    for rows in ([], [[]], [[(NAN, -1.0)], []]):
        gap = measure(pairs_of(rows))
        assert all(math.isnan(figure.value) and not figure.bounded for figure in gap.figures.values())


def test_weights_too_large_for_a_float_are_infinite_and_the_ess_is_not() -> None:
    gap = measure(pairs_of([[(-800.0, 0.0)], [(-1.0, -1.0)], [(-1.0, -1.0)], [(-1.0, -1.0)]]))
    assert gap["token_chi2"].value == INF and gap["token_k3"].value == INF
    assert gap["token_chi2"].low == pytest.approx(0.0)  # a resample may miss the one token
    assert gap["token_ess"].value == pytest.approx(0.25)
    assert gap["token_k1"].value == pytest.approx(-200.0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="trainer_N has shape"):
        Pairs(torch.zeros(2), torch.zeros(3), torch.tensor([2]), torch.ones(2, dtype=torch.bool))


# -- intervals -------------------------------------------------------------------------------------------------------


def test_resamples_are_of_whole_responses_and_by_seed() -> None:
    counts = Resamples.of(7, seed=3, draws=50).counts_RB
    assert counts.shape == (50, 7) and bool((counts.sum(1) == 7).all())
    assert torch.equal(counts, Resamples.of(7, seed=3, draws=50).counts_RB)
    assert not torch.equal(counts, Resamples.of(7, seed=4, draws=50).counts_RB)


def test_intervals_equal_those_of_resampled_data() -> None:
    rows = ragged(2)
    pairs = pairs_of(rows)
    counts = Resamples.of(len(rows), seed=5, draws=80).counts_RB
    gap = measure(pairs, seed=5, draws=80)
    again = [oracle([row for row, n in zip(rows, draw, strict=True) for _ in range(int(n))]) for draw in counts]
    for name in ("dp_from_0.01", "log_ratio_mean", "log_ratio_std", "log_ratio_p95", "token_ess", "sequence_chi2",
                 "geometric_k3"):  # fmt: skip
        drawn = sorted(figures[name] for figures in again)
        low, high = drawn[math.floor(0.025 * 79)], drawn[math.ceil(0.975 * 79)]
        assert (gap[name].low, gap[name].high) == pytest.approx((low, high), rel=1e-9, abs=1e-12), name


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    held = 0
    for seed in range(200):
        draw = torch.Generator().manual_seed(seed)
        # Tokens of a response share an offset: resampling tokens would give intervals that are far too narrow.
        offset_B = torch.randn(40, generator=draw, dtype=torch.float64)
        d_N = 0.3 + offset_B.repeat_interleave(8) + 0.1 * torch.randn(320, generator=draw, dtype=torch.float64)
        pairs = Pairs(-20 - d_N, torch.full((320,), -20.0, dtype=torch.float64), torch.full((40,), 8),
                      torch.ones(320, dtype=torch.bool))  # fmt: skip
        figure = measure(pairs, seed=seed, draws=200)["log_ratio_mean"]
        held += figure.low <= 0.3 <= figure.high
    assert 0.88 <= held / 200 <= 0.99


def test_one_response_has_no_interval_and_extremes_never_have() -> None:
    one = measure(pairs_of([[(-1.0, -1.2), (-1.0, -0.9)]]))
    assert not any(figure.bounded for figure in one.figures.values())
    many = measure(pairs_of(ragged(3)))
    assert not many["dp_max"].bounded and many["dp_mean"].bounded


def test_interval_passes_over_what_a_resample_could_not_give() -> None:
    assert interval(torch.tensor([NAN, 1.0, 2.0, NAN, INF])) == (1.0, INF)
    assert all(math.isnan(x) for x in interval(torch.tensor([NAN, 1.0])))
