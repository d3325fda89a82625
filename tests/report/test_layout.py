"""Layout in a real Chromium: nothing runs over an edge, what scrolls says so, at widths from a phone to a desk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report.chromium import Browser, Tab, program
from report.synthetic import run_in_memory

from trimtab.report.compare import compare
from trimtab.report.model import Run
from trimtab.report.page import page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(program() is None, reason="needs Chromium: apt-get install chromium"),
]
TABS = ["result", "curves", "health", "choices", "samples", "method"]


def many(settings: int) -> list[Run]:
    rng, length = np.random.default_rng(0), 40
    steps, runs = np.arange(1, length + 1), list[Run]()
    for i in range(settings):
        name = (
            "standard"
            if i == 0
            else ("decoupled", "bypass")[i % 2] + "_with_a_long_name" + "x" * (300 if i == 1 else 9)
        )
        loss, level = "ppo\x1b[31m\x00" if i == 2 else "ppo_clip", ("token", "sequence", "geometric")[i % 3]
        overrides = {"algo.name": name, "loss.name": loss, "mis.rs_level": level, "mis.tis_upper_bound": 2.0 + i}
        for seed in range(3):
            noise = rng.normal(size=length)
            columns = {
                "eval/reward": np.where(steps % 5 == 0, 0.4 + 0.01 * i + 0.02 * noise, np.nan),
                "eval/reward_greedy": np.full(length, 0.5),
                "train/reward": 0.5 + 0.1 * noise,
                "train/reward_weighted": 0.5 + 0.1 * noise,
                "train/mis_k3_kl": 1e-3 * (1 + 0.1 * noise),
                "train/mis_ess": 0.95 + 1e-12 * noise,
                "train/grad_norm": -2e101 * (1 + 0.1 * noise),
                "train/tokens": steps * 1000.0,
                "time/step": np.full(length, 0.5),
            }
            runs.append(run_in_memory(overrides, seed, columns))
    return runs


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module", params=[3, 12, 40])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("layout"), many(request.param))


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("twelve"), many(12))


def write(folder: Path, runs: list[Run]) -> Path:
    path = folder / "page.html"
    path.write_text(page(compare(runs), runs), encoding="utf-8")
    return path


OUTSIDE = """[...document.querySelectorAll("main *, header *")].filter(e => {
  const box = e.getBoundingClientRect();
  if (!box.width || (box.right <= innerWidth + 1 && box.left >= -1)) return false;
  for (let up = e; up; up = up.parentElement)
    if (/auto|scroll|hidden/.test(getComputedStyle(up).overflowX) || up.tagName === "svg") return false;
  return true;
}).map(e => e.tagName + " " + e.className)"""
BOXES = """[...document.querySelectorAll(".scroll")].filter(box => box.offsetParent).map(box => ({
  name: box.getAttribute("aria-label"), more: box.scrollWidth > box.clientWidth + 1,
  right: box.getBoundingClientRect().right,
  hint: box.previousElementSibling.className === "hint" && !!box.previousElementSibling.offsetParent,
  shade: getComputedStyle(box).backgroundImage.includes("gradient")}))"""


def go(tab: Tab, name: str) -> None:
    tab.value(f'document.getElementById("tab-{name}").click()')
    tab.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")


@pytest.mark.parametrize("width", [390, 768, 1440])
def test_nothing_is_cut_off_unless_its_box_scrolls_and_says_so(browser: Browser, made: Path, width: int) -> None:
    tab = browser.open(made, width, dark=width == 768)
    for name in TABS:
        go(tab, name)
        assert tab.value("document.documentElement.scrollWidth") <= width, name
        assert tab.value(OUTSIDE) == [], name
        boxes: list[dict[str, Any]] = tab.value(BOXES)
        for box in boxes:
            assert box["hint"] == box["more"], box
            assert box["shade"]
            assert box["right"] <= width
    assert tab.complaints == []


@pytest.mark.parametrize("width", [1231, 1440, 1920])
def test_the_table_of_settings_fits_a_desk(browser: Browser, twelve: Path, width: int) -> None:
    tab = browser.open(twelve, width)
    cells = tab.value(
        '[...document.querySelectorAll(".settings th, .settings td")].map(c => c.getBoundingClientRect().right)'
    )
    assert max(cells) <= width - 20
    heights = tab.value(
        '[...document.querySelectorAll(".settings tbody tr")].map(r => r.getBoundingClientRect().height)'
    )
    assert max(heights) < 190


def test_parallel_coordinates_and_compute_fit_a_phone(browser: Browser, tmp_path: Path) -> None:
    runs = [run_in_memory({"algo.name": name, "mis.tis_upper_bound": bound}, seed,
                          {"eval/reward": [0.1, 0.5], "train/tokens": [1e3, 2e3], "time/step": [0.5, 0.5]})
            for name in ("standard", "decoupled") for bound in (2.0, 3.0) for seed in (0, 1)]  # fmt: skip
    tab = browser.open(write(tmp_path, runs), 390)
    go(tab, "choices")
    assert tab.value('document.querySelectorAll("#parallel svg.wide")[0].getBoundingClientRect().width') == 0
    for query in ("#parallel .slim text", "#parallel .slim .line", ".compute td", ".compute th.setting"):
        rights = tab.value(f"[...document.querySelectorAll({query!r})].map(e => e.getBoundingClientRect().right)")
        assert len(rights) > 2
        assert max(rights) <= 390, query
    tab = browser.open(tmp_path / "page.html", 1440)
    go(tab, "choices")
    assert tab.value('document.querySelectorAll("#parallel svg.slim")[0].getBoundingClientRect().width') == 0


def test_the_first_column_stays_when_a_table_scrolls(browser: Browser, twelve: Path) -> None:
    tab = browser.open(twelve, 390)
    go(tab, "choices")
    left = 'document.querySelector(".diff tbody th").getBoundingClientRect().left'
    before = tab.value(left)
    box = 'document.querySelector(".diff").closest(".scroll")'
    tab.value(f"{box}.focus()")
    tab.press("ArrowRight", "ArrowRight")
    tab.until(lambda: tab.value(f"{box}.scrollLeft") > 0)
    assert tab.value(left) == before


def test_marks_of_the_large_figure_differ(browser: Browser, twelve: Path) -> None:
    tab = browser.open(twelve, 1440)
    go(tab, "curves")
    for metric, log in (("train/mis_ess", False), ("train/mis_ess", True), ("train/grad_norm", False)):
        tab.value(f"""document.getElementById("log").checked = {str(log).lower()};
            document.getElementById("metric").value = {metric!r};
            document.getElementById("metric").dispatchEvent(new Event("change"));""")
        marks = tab.value('[...document.querySelectorAll("#explorer .tick.end")].map(t => t.textContent)')[:-1]
        assert len(set(marks)) == len(marks) >= 2, metric
        assert max(map(len, marks)) <= 9
        lefts = tab.value('[...document.querySelectorAll("#explorer .tick.end")].map(t => t.getBBox().x)')
        assert min(lefts) >= 0
    assert not tab.value(r'/e\d+[GMk]|e\+/.test(document.getElementById("explorer").textContent)')
    assert tab.complaints == []


def test_the_full_name_is_a_key_away(browser: Browser, twelve: Path) -> None:
    tab = browser.open(twelve, 390)
    tab.value('document.querySelector(".full summary").focus()')
    tab.press("Enter")
    assert tab.value('document.querySelector(".full bdi").getBoundingClientRect().height') > 0
    assert tab.value("document.documentElement.scrollWidth") <= 390


def test_on_paper_no_table_runs_over_the_edge(browser: Browser, twelve: Path) -> None:
    tab = browser.open(twelve, 1030)  # A4 landscape less its margins
    tab.call("Emulation.setEmulatedMedia", media="print", features=[])
    rights = tab.value('[...document.querySelectorAll("td, th, svg")].map(e => e.getBoundingClientRect().right)')
    assert max(rights) <= 1031
    assert tab.value('[...document.querySelectorAll(".hint")].every(hint => !hint.offsetParent)')
