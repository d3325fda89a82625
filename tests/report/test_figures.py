"""Axes that mislead no one: ranges of constants, marks that differ, huge numbers, names that are long or unseen."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from report.synthetic import run_in_memory

from trimtab.report.colours import looks
from trimtab.report.compare import compare
from trimtab.report.curves import lonely
from trimtab.report.model import Run
from trimtab.report.page import page
from trimtab.report.page.svg import Scale, powers, room, span, ticks
from trimtab.report.page.text import aligned, big, plain, shorts
from trimtab.report.png import STYLE, drawable, figures, names, settings


def runs_of(values: Sequence[float], names: Sequence[str] = ("standard", "decoupled"), **more: float) -> list[Run]:
    columns = {"eval/reward": list(values)} | {key: [value] * len(values) for key, value in more.items()}
    return [run_in_memory({"algo.name": name}, seed, columns) for name in names for seed in (0, 1)]


@pytest.mark.parametrize("value", [0.95, 1.0, 20.0, -0.6931471805, 1e-3, -2e101, 3.0e12])
def test_a_constant_up_to_rounding_is_drawn_as_a_constant(value: float) -> None:
    noisy = value * (1 + 1e-7 * np.sin(np.arange(50)))
    for values in ([value] * 3, list(noisy)):
        low, high = span(values)
        assert (high - low) / abs(value) == pytest.approx(0.2, rel=1e-3)
        assert low < min(values)
        assert max(values) < high


def test_a_small_change_shows_small_and_a_large_one_fills_the_figure() -> None:
    low, high = span([1.0, 1.0001])
    assert (high - low) == pytest.approx(1e-3, rel=1e-3)
    assert span([2.0, 4.0]) == pytest.approx((1.9, 4.1))
    assert span([0.0, 0.0]) == (-0.5, 0.5)
    assert span([0.0, 0.0], floor=0.0) == (0.0, 0.5)
    assert span([-math.inf, math.nan]) == pytest.approx((-0.05, 1.05))


@pytest.mark.parametrize("values", [[1.7e308, -1.7e308], [5e-324, 1e-323], [1e-300, 2e-300], [-2e101, -4e101], [1e15]])
def test_no_size_of_numbers_breaks_an_axis(values: list[float]) -> None:
    scale = Scale(*span(values), 0.0, 100.0)
    assert math.isfinite(scale.high - scale.low)
    marks = scale.ticks(4)
    assert len(marks) >= 2
    assert all(math.isfinite(scale(mark)) for mark in marks)
    assert len(set(aligned(marks))) == len(marks)


@pytest.mark.parametrize(
    ("marks", "told"),
    [
        ([0.0, 0.05, 0.1], ["0.00", "0.05", "0.10"]),
        ([0.0, 50_000.0, 100_000.0], ["0", "50k", "100k"]),
        ([12_345.0, 12_345.5, 12_346.0], ["12.3450k", "12.3455k", "12.3460k"]),
        ([0.99999995, 1.0, 1.00000005], ["0.99999995", "1.00000000", "1.00000005"]),
        ([2.5e12, 3e12], ["2.5T", "3.0T"]),
        ([-2.5e101, -2e101, 0.0], ["−2.5e101", "−2.0e101", "0"]),
        ([1e15, 2e15], ["1e15", "2e15"]),
        ([2e-7, 4e-7], ["2e−7", "4e−7"]),
        ([0.5], ["0.5"]),
        ([], []),
    ],
)
def test_marks_of_an_axis(marks: list[float], told: list[str]) -> None:
    assert aligned(marks) == told


def test_marks_never_repeat_themselves() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        middle = float(10 ** rng.uniform(-12, 120) * rng.choice([-1, 1]))
        values = [middle, middle * (1 + 10 ** rng.uniform(-16, 1))]
        scale = Scale(*span(values), 0.0, 1.0)
        for most in (3, 6):
            marks = scale.ticks(most)
            assert 2 <= len(set(aligned(marks))) == len(marks)


def test_numbers_of_a_log_scale() -> None:
    assert [plain(mark) for mark in (0.05, 200.0, 1e6, 1e-7, 1e101)] == ["0.05", "200", "1e6", "1e−7", "1e101"]
    assert len(powers(1e-300, 1e101)) <= 10
    assert len(Scale(0.60, 0.79, 0.0, 1.0, log=True).ticks()) >= 2  # no power of ten is within
    assert big(-2e101) == "−2.00e101"
    assert big(2e12) == "2.00\u202fT"
    assert room(Scale(-4e101, -2e101, 0.0, 1.0), 46.0) > 46.0
    assert ticks(0.0, 1.0, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_no_panel_of_the_page_shows_rounding_noise() -> None:
    noise = 1 + 1e-12 * np.random.default_rng(0).normal(size=40)
    columns = {
        "eval/reward": [0.5, 0.6] * 20,
        "train/mis_ess": list(0.95 * noise),
        "train/grad_norm": list(-2e101 * noise),
    }
    runs = [run_in_memory({"algo.name": name}, s, columns) for name in ("standard", "bypass") for s in (0, 1)]
    text = page(compare(runs), runs)
    panels = re.findall(r"<figure>.*?</figure>", text, re.S)
    assert len(panels) == 2
    for panel in panels:
        marks = re.findall(r'class="tick end">([^<]*)<', panel)
        assert len(set(marks)) == len(marks) >= 2
        assert all(len(mark) <= 9 for mark in marks), marks
    assert not re.search(r"e\d+[GMk]\b", text.split("<script")[0])


# -- names -----------------------------------------------------------------------------------------------------------


def test_long_names_are_shortened_and_stay_apart() -> None:
    one, two = "a" * 100 + "1" + "b" * 100, "a" * 100 + "2" + "b" * 100
    made = shorts([one, two, "c"], 40)
    assert len(set(made.values())) == 3
    assert made["c"] == "c"
    assert max(map(len, made.values())) <= 44


def test_the_whole_of_a_long_name_can_be_read() -> None:
    long = "decoupled_" + "x" * 300
    runs = runs_of([0.1, 0.5], ("standard", long))
    text = page(compare(runs), runs)
    assert f'title="algo={long}"' in text
    assert f'<details class="full"><summary>full name</summary><bdi>algo={long}</bdi></details>' in text


# -- pictures --------------------------------------------------------------------------------------------------------


def words(tmp_path: Path, runs: list[Run], name: str) -> list[str]:
    figures(compare(runs), runs, tmp_path, ("png", "svg"))
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / f"{name}.svg").read_text())]


@pytest.mark.parametrize("value", [0.95, -2e101, 12345.678, 1e-9])
def test_pictures_of_a_constant_have_marks_that_differ(tmp_path: Path, value: float) -> None:
    values = [value * (1 + 1e-12 * i) for i in range(4)]
    for name in ("settings", "curves"):
        found = words(tmp_path, runs_of(values), name)
        numbers = [text for text in found if re.fullmatch(r"−?[\d.]+(e−?\d+)?[kMGT]?", text)]
        assert len(numbers) >= 4
        assert not [text for text in found if re.search(r"1e\+?\d+$|^\+|e\d+[GMk]", text) and text not in numbers]
    assert max(map(len, numbers)) <= 9


def test_pictures_spell_out_what_their_font_lacks(tmp_path: Path) -> None:
    assert drawable("a中\n") == "a⟨U+4E2D⟩⟨LF⟩"
    found = words(tmp_path, runs_of([0.1, 0.5], ("standard", "x\x1b[31m\x00中")), "settings")
    assert any("x⟨ESC⟩[31m⟨NUL⟩⟨U+4E2D⟩" in text for text in found)


def test_pictures_of_numbers_at_the_end_of_the_scale(tmp_path: Path) -> None:
    runs = runs_of([1e300, -1e300, 1e300, 2e300], **{"train/mis_k3_kl": 1e-300})
    assert len(figures(compare(runs), runs, tmp_path, ("png",))) == 3


def injected_runs() -> list[Run]:
    """Two settings of which one has an injected mismatch; of the other one seed goes on by one step."""
    made = []
    for name, mark in (("standard", ""), ("bypass", "logit_noise 0.3")):
        for seed in range(3):
            steps = 5 if name == "standard" and seed < 2 else 4
            run = run_in_memory({"algo.name": name}, seed, [0.1, 0.3, 0.5, 0.5 + 0.1 * seed, 0.55][:steps])
            made.append(replace(run, injected=mark))
    return made


def test_a_piece_of_a_curve_of_one_point_is_a_dot(tmp_path: Path) -> None:
    assert lonely(np.asarray([1.0, np.nan, 2.0, np.nan, 3.0, 4.0, np.nan, 5.0])) == [0, 2, 7]
    assert lonely(np.asarray([])) == []
    runs = [replace(run, columns=dict(run.columns) | {"train/mis_ess": run.columns["eval/reward"]})
            for run in injected_runs()]  # fmt: skip
    text = page(compare(runs), runs)
    panel = text.split("Effective sample size", 1)[1].split("</figure>")[0] if "Effective" in text else ""
    figure = next(f for f in re.findall(r"<figure>.*?</figure>", text, re.S) if 'data-open="train/mis_ess"' in f)
    assert panel and len(re.findall(r'class="dot"', figure)) == 1


def test_an_injected_mismatch_is_told_in_every_figure(tmp_path: Path) -> None:
    runs = injected_runs()
    for name in ("settings", "curves"):
        found = words(tmp_path, runs, name)
        assert any("algo=bypass (injected)" in text for text in found), name
        assert not any("algo=standard (injected)" in text for text in found)
    keys = page(compare(runs), runs).split('class="keys"')[1].split("</div>")[0]
    assert keys.count('class="badge injected"') == 1
    everywhere = [replace(run, injected="logit_noise 0.3") for run in runs]
    assert not any("(injected)" in text for text in words(tmp_path, everywhere, "settings"))


def test_names_in_pictures_leave_out_what_all_have_alike(tmp_path: Path) -> None:
    long = "x" * 40
    runs = [
        run_in_memory({"algo.name": name, "optim.lr": lr, "mis.tis_level": f"{long}{level}{long}"}, seed, [0.1, v])
        for name, lr, level in (("a", 1e-3, 1), ("b", 1e-3, 2), ("b", 1e-2, 2))
        for seed, v in ((0, 0.5), (1, 0.6))
    ]
    found = compare(runs)
    every = names(found, found.rows)
    assert len(set(every.values())) == 3
    same = [row for row in found.rows if row.setting.values["algo"] == "b"]
    assert sorted(names(found, same).values()) == ["lr=0.001", "lr=0.01"]
    assert next(iter(names(found, same[:1]).values())).startswith("algo=b"), "one alone keeps its name"


def test_of_long_names_what_most_have_is_left_out_first() -> None:
    long = {"mis.tis_mode": "m" * 20, "mis.tis_level": "token", "loss.name": "l" * 20, "optim.lr": 0.1}
    kinds: list[dict[str, object]] = [{}, {"mis.tis_level": "sequence"}, {"optim.lr": 0.2},
                                      {"mis.tis_mode": "clip"}, {"loss.name": "other"}]  # fmt: skip
    runs = [run_in_memory({"algo.name": algo} | long | kind, 0, [0.1, 0.5])
            for algo in ("standard", "decoupled") for kind in kinds]  # fmt: skip
    found = compare(runs)
    assert sorted(names(found, found.rows).values()) == sorted(
        f"algo={algo}{more}" for algo in ("standard", "decoupled")
        for more in ("", " level=sequence", " lr=0.2", " tis_mode=clip", " loss=other")
    )  # fmt: skip


@pytest.mark.parametrize("count", [2, 14])
@pytest.mark.parametrize("size", [1.0, 12345.678])
def test_numbers_and_titles_of_the_axes_do_not_run_into_each_other(count: int, size: float) -> None:
    rng = np.random.default_rng(count)
    runs = [run_in_memory({"algo.name": f"a{i}"}, seed, [0.0, size * (0.5 + 0.05 * float(rng.normal()))])
            for i in range(count) for seed in range(3)]  # fmt: skip
    found = compare(runs)
    with matplotlib.rc_context(STYLE):
        figure = settings(found, looks([row.setting.label for row in found.rows]), set())
        figure.canvas.draw()
        renderer = figure.canvas.get_renderer()
        titles = [axes.xaxis.label.get_window_extent(renderer) for axes in figure.axes]
        marks = [label.get_window_extent(renderer) for axes in figure.axes for label in axes.get_xticklabels()
                 if axes.get_xlim()[0] <= label.get_position()[0] <= axes.get_xlim()[1]]  # fmt: skip
    for boxes in (titles, marks):
        boxes = sorted(boxes, key=lambda box: box.x0)
        assert len(boxes) >= 2
        assert all(one.x1 + 1 < other.x0 for one, other in pairwise(boxes))
