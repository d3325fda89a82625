"""Curves against plain loops; fewer points that keep every peak and gap; looks that can be told apart."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report.synthetic import run_in_memory

from trimtab.report.colours import DASHES, MARKERS, PALETTE, looks
from trimtab.report.curves import Axis, Curve, curve, downsample, seeds_drawn, thin_curve
from trimtab.report.model import Setting
from trimtab.report.statistics import t_interval

NAN = math.nan


def setting(*columns: dict[str, list[float]]) -> Setting:
    return Setting("s", {}, tuple(run_in_memory({}, seed, column) for seed, column in enumerate(columns)))


def test_mean_and_band_are_those_of_the_table_at_each_step() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4, 30))
    found = curve(setting(*({"m": row.tolist()} for row in values)), "m")
    assert found.x.tolist() == list(range(1, 31))
    assert found.n.tolist() == [4] * 30
    for i in range(30):
        expected = t_interval(values[:, i].tolist())
        assert found.mean[i] == pytest.approx(expected.mean)
        assert (found.low[i], found.high[i]) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_a_run_counts_to_its_last_value_and_not_beyond() -> None:
    found = curve(setting({"m": [1, 2, 3, 4]}, {"m": [3, 4]}, {"m": [NAN, 3, NAN, NAN]}), "m")
    there = np.isfinite(found.mean)
    assert found.x.tolist() == [1, 1.5, 2, 2.5, 3, 4]
    assert there.tolist() == [True, False, True, False, True, True], "the line breaks where a run begins or ends"
    assert found.n[there].tolist() == [2, 3, 1, 1]
    assert found.mean[there].tolist() == [2, 3, 3, 4]
    assert np.isnan(found.low[3:]).all()
    assert np.isfinite(found.low[[0, 2]]).all()
    assert seeds_drawn(found) == "n = 2, 3, then 1"


def test_where_a_run_drops_out_midway_no_line_jumps() -> None:
    good, bad = [0.1 * k for k in range(1, 11)], [0.0] * 5
    found = curve(setting({"m": good}, {"m": good}, {"m": bad}), "m")
    assert np.isnan(found.mean).tolist() == [False] * 5 + [True] + [False] * 5
    assert found.x[5] == 5.5
    steps = np.abs(np.diff(found.mean))
    assert np.nanmax(steps) < 0.11, "0.33 to 0.6 is no step of the line"
    assert seeds_drawn(found) == "n = 3, then 2"
    thin = thin_curve(curve(setting({"m": [1.0] * 1000}, {"m": [0.0] * 500}), "m"), 60)
    assert np.isnan(thin.mean).sum() == 1, "a thinned curve is still parted"
    whole = curve(setting({"m": good}, {"m": good}), "m")
    assert np.isfinite(whole.mean).all() and seeds_drawn(whole) == "n = 2"


def test_against_tokens_a_run_that_drops_out_parts_the_line_and_beginnings_do_not() -> None:
    def run(first: float, count: int) -> dict[str, list[float]]:
        return {"m": [1.0] * count, "train/tokens": [first + 10.0 * k for k in range(count)]}

    found = curve(setting(run(10, 100), run(13, 100), run(12, 40)), "m", "tokens")
    gaps = np.flatnonzero(np.isnan(found.mean))
    assert found.x[gaps] == pytest.approx([402.5, 1001.5], abs=1)


def test_a_metric_that_comes_now_and_then_is_joined_by_straight_lines() -> None:
    found = curve(setting({"m": [0, NAN, NAN, 3]}, {"m": [NAN, 5, 7, NAN]}), "m")
    there = np.isfinite(found.mean)
    assert found.x[there].tolist() == [1, 2, 3, 4]
    assert found.mean[there].tolist() == [0, 3, 4.5, 3]
    assert found.n[there].tolist() == [1, 2, 2, 1]


def test_a_value_that_is_not_finite_leaves_a_gap() -> None:
    from dataclasses import replace

    run = replace(run_in_memory({}, 0, {"m": [1, NAN, 3, 4]}), broken={"m": (2,)})
    other = run_in_memory({}, 1, {"m": [1, 2, 3, 4]})
    found = curve(Setting("s", {}, (run, other)), "m")
    assert found.n.tolist() == [2, 1, 2, 2]
    alone = curve(Setting("s", {}, (run,)), "m")
    assert np.isnan(alone.mean).tolist() == [False, True, False, False]


def test_axes_are_cumulated() -> None:
    columns = {"m": [1.0, 2, 3], "train/tokens": [10.0, 30, 60], "time/step": [0.5, 0.25, 1]}
    assert curve(setting(columns), "m", Axis.tokens).x.tolist() == [10, 30, 60]
    assert curve(setting(columns), "m", "wall").x.tolist() == [0.5, 0.75, 1.75]
    assert len(curve(setting({"m": [1.0]}), "m", Axis.tokens).x) == 0
    assert len(curve(setting({"m": [1.0]}), "other").x) == 0
    foreign = {"m": [1.0, 2], "_runtime": [3.0, 5.0]}
    assert curve(setting(foreign), "m", Axis.wall).x.tolist() == [3, 5]


def test_runs_with_other_token_counts_meet_on_a_common_grid() -> None:
    lines = [{"m": [k * 2.0 for k in range(1, 1001)], "train/tokens": [k * 2.0 * (1 + 0.1 * s) for k in range(1, 1001)]}
             for s in range(3)]  # fmt: skip
    found = curve(setting(*lines), "m", "tokens")
    assert np.isfinite(found.mean).sum() == 400
    inside = (found.x >= 2.4) & (found.x <= 2000)
    assert (found.n[inside] == 3).all()
    assert found.n[-1] == 1
    expected = np.mean([found.x[inside] / (1 + 0.1 * s) for s in range(3)], axis=0)
    np.testing.assert_allclose(found.mean[inside], expected)


def test_runs_of_one_seed_are_averaged_first() -> None:
    runs = tuple(run_in_memory({"mis.tis_level": level}, seed, {"m": [value]})
                 for level, seed, value in (("a", 0, 1.0), ("b", 0, 3.0), ("a", 1, 5.0), ("b", 1, 7.0)))  # fmt: skip
    found = curve(Setting("s", {}, runs), "m")
    assert (found.n.tolist(), found.mean.tolist()) == ([2], [4.0])
    assert found.high[0] == pytest.approx(t_interval([2.0, 6.0]).high)


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(NAN)), min_size=1, max_size=400), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_fewer_points_keep_extremes_ends_and_gaps(values: list[float], width: int) -> None:
    x, y = np.arange(len(values), dtype=np.float64), np.asarray(values)
    a, b = downsample(x, y, width)
    assert (np.diff(a) > 0).all()
    np.testing.assert_array_equal(b, y[a.astype(int)])
    assert len(a) <= max(9 * width, 4 * width)
    if len(values) <= 4 * width:
        np.testing.assert_array_equal(a, x)
    finite = np.isfinite(y)
    if finite.any():
        assert np.nanmin(b) == np.nanmin(y) and np.nanmax(b) == np.nanmax(y)
        assert a[np.isfinite(b)][0] == x[finite][0] and a[np.isfinite(b)][-1] == x[finite][-1]
    # Points that a gap parts are still parted.
    kept = np.flatnonzero(np.isfinite(b))
    for left, right in pairwise(kept.tolist()):
        between = y[int(a[left]) + 1 : int(a[right])]
        if np.isnan(between).any():
            assert right - left > 1


def test_a_single_spike_among_a_hundred_thousand_points_is_kept() -> None:
    y = np.zeros(100_000)
    y[54_321], y[77_777] = 1.0, -1.0
    a, b = downsample(np.arange(100_000.0), y, 300)
    assert len(a) <= 1200
    assert b.max() == 1.0 and a[b.argmax()] == 54_321
    assert b.min() == -1.0 and a[b.argmin()] == 77_777
    with pytest.raises(ValueError, match="at least 1"):
        downsample(y, y, 0)


def test_a_thinned_curve_keeps_its_outermost_bounds() -> None:
    rng = np.random.default_rng(0)
    mean = rng.normal(size=5000)
    half = np.abs(rng.normal(size=5000))
    thin = thin_curve(Curve(np.arange(5000.0), mean, mean - half, mean + half, np.full(5000, 3)), 400)
    assert len(thin.x) <= 400
    assert thin.low.min() == (mean - half).min() and thin.high.max() == (mean + half).max()
    assert thin.mean.max() == mean.max()


# -- looks -----------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read_on_light_and_dark() -> None:
    for light, dark in PALETTE:
        assert contrast(light, "#ffffff") >= 4.5, light
        assert contrast(dark, "#15181d") >= 4.5, dark


def test_looks_differ_and_depend_on_the_set_of_labels_alone() -> None:
    labels = [f"setting {i:03}" for i in range(64)]
    found = looks(labels)
    assert len(set(found.values())) == 64
    assert looks(list(reversed(labels))) == found
    first = [found[label] for label in labels[:8]]
    assert len({look.light for look in first}) == len({look.marker for look in first}) == 8
    assert {look.marker for look in found.values()} == set(MARKERS)
    assert {look.dash for look in found.values()} <= set(DASHES)
