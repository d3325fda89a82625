"""The page in a real Chromium: at two widths, by keyboard alone, in light and dark, on paper, with hostile text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from report.chromium import Browser, Tab, program
from report.synthetic import HOSTILE, Arm, run_in_memory, write_samples, write_sweep

from trimtab.report.compare import compare
from trimtab.report.model import Comparison, Problem
from trimtab.report.page import page
from trimtab.report.sources import load

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(program() is None, reason="needs Chromium: apt-get install chromium"),
]
TABS = ["result", "curves", "health", "choices", "samples", "method"]
PHONE, DESKTOP = 390, 1440


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    arms = {
        "a": Arm({"algo.name": "standard"}),
        "b": Arm({"algo.name": "decoupled"}, effect=0.3),
        "c": Arm({"algo.name": "bypass"}, failed=(0,)),
    }
    truth = write_sweep(folder / "sweep", arms)
    for at in truth.folders.values():
        write_samples(at, 50, text="What is 17 + 25?")
    runs = load([str(folder / "sweep")])
    path = folder / "page.html"
    path.write_text(page(compare(runs), runs), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    arms = {
        "a": Arm({"algo.name": "standard", "loss.name": HOSTILE}),
        "b": Arm({"algo.name": HOSTILE + "x" * 400, "loss.name": "l" * 300}, failed=(0,)),
    }
    truth = write_sweep(folder / "sweep", arms)
    for at in truth.folders.values():
        write_samples(at, 50)
    runs = load([str(folder / "sweep")])
    c = compare(runs)
    problems = (*c.problems, Problem(HOSTILE, HOSTILE, HOSTILE))
    c = Comparison(c.metric, c.last, c.baseline, c.keys, c.rows, problems, (HOSTILE,), (HOSTILE,))
    path = folder / "page.html"
    path.write_text(page(c, runs, title=HOSTILE), encoding="utf-8")
    return path


def shown(tab: Tab) -> list[str]:
    return list(tab.value('[...document.querySelectorAll(".panel")].filter(p => p.offsetParent).map(p => p.id)'))


def focus(tab: Tab) -> str:
    return str(tab.value("(e => e.id || e.className || e.tagName)(document.activeElement)"))


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("which", ["plain", "hostile"])
def test_no_tab_complains_or_runs_over_the_edge(
    browser: Browser, request: pytest.FixtureRequest, which: str, width: int, dark: bool
) -> None:
    tab = browser.open(request.getfixturevalue(which), width, dark=dark)
    for name in TABS:
        tab.value(f'document.getElementById("tab-{name}").click()')
        assert shown(tab) == [name]
        assert tab.value("document.documentElement.scrollWidth") <= width, name
    assert tab.value("document.images.length") == 0
    assert tab.complaints == []


def test_by_keyboard_alone(browser: Browser, plain: Path) -> None:
    tab = browser.open(plain)
    tab.press("Tab")
    assert focus(tab) == "skip"
    assert tab.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert tab.value("document.activeElement.getBoundingClientRect().left") > 0
    tab.press("Enter")
    assert tab.value("location.hash") == "#main"
    tab = browser.open(plain)
    tab.press("Tab", "Tab", "Tab")
    assert focus(tab) == "theme"
    tab.press("Tab")
    assert focus(tab) == "tab-result"
    tab.press("ArrowRight")
    assert (focus(tab), shown(tab)) == ("tab-curves", ["curves"])
    tab.press("End")
    assert shown(tab) == ["method"]
    tab.press("ArrowRight")
    assert shown(tab) == ["result"]
    tab.press("ArrowLeft", "Home", "ArrowRight")
    assert shown(tab) == ["curves"]
    tab.press("Tab")
    assert tab.value('document.activeElement.getAttribute("aria-pressed")') == "true"
    lines = int(tab.value('document.querySelectorAll("#explorer .line").length'))
    tab.press(" ")
    assert tab.value('document.activeElement.getAttribute("aria-pressed")') == "false"
    assert tab.value('document.querySelectorAll("#explorer .line").length') == lines - 1
    tab.press(" ")
    tab.value('document.querySelector("#explorer svg").focus()')
    tab.press("End")
    told = str(tab.value('document.getElementById("tip").textContent'))
    assert told.startswith("at 60\n")
    assert "n = 3: algo=decoupled" in told
    assert tab.value('document.getElementById("say").textContent') == told
    tab.press("Escape")
    assert tab.value('document.getElementById("tip").hidden') is True
    assert tab.complaints == []


def test_points_of_a_figure_and_tokens_are_reached_by_arrow_keys(browser: Browser, plain: Path) -> None:
    tab = browser.open(plain)
    for id_, figure, told in (
        ("result", ".strip", r"^seed 0: 0\.\d{4}$"),
        ("health", "#scatter svg", r"seed \d: KL .*, score 0\.\d{4}$"),
        ("choices", "#parallel svg", r"^algo=\w+: 0\.\d{4}$"),
        ("samples", ".tokens", r"^log-ratio [+−]\d\.\d{3} nats; trainer .*, engine .*; token \d+$"),
    ):
        tab.value(f'document.getElementById("tab-{id_}").click()')
        tab.value(f'document.querySelector("{figure}").focus()')
        tab.press("ArrowRight")
        assert re.search(told, str(tab.value('document.getElementById("tip").textContent'))), id_
        first = tab.value('document.getElementById("say").textContent')
        tab.press("ArrowRight")
        assert tab.value('document.querySelectorAll(".now").length') == 1
        tab.press("ArrowLeft")
        assert tab.value('document.getElementById("say").textContent') == first


def test_every_control_has_a_name_and_every_scrolling_box_takes_the_focus(browser: Browser, plain: Path) -> None:
    tab = browser.open(plain)
    roles = {"button", "tab", "link", "combobox", "checkbox", "image", "table", "tabpanel", "region"}
    for name in TABS:
        tab.value(f'document.getElementById("tab-{name}").click()')
        nodes = [node for node in tab.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
        found = [node for node in nodes if node.get("role", {}).get("value") in roles]
        assert len(found) > len(TABS)
        assert [node["role"]["value"] for node in found if not node.get("name", {}).get("value")] == [], name
    assert tab.value('[...document.querySelectorAll(".scroll")].every(box => box.tabIndex === 0)')


def test_metric_axis_single_runs_and_log_scale(browser: Browser, plain: Path) -> None:
    tab = browser.open(plain)
    tab.value('document.getElementById("tab-curves").click()')

    def pick(id_: str, expression: str) -> None:
        tab.value(f'(e => {{ {expression}; e.dispatchEvent(new Event("change")); }})(document.getElementById("{id_}"))')

    texts = '[...document.querySelectorAll("#explorer text, #explorer .yname")].map(t => t.textContent)'
    assert tab.value('document.querySelectorAll("#explorer .single").length') == 0
    pick("single", "e.checked = true")
    assert tab.value('document.querySelectorAll("#explorer .single").length') == 9
    pick("axis", 'e.value = "tokens"')
    assert "response tokens" in tab.value(texts)
    assert tab.value('document.querySelectorAll("#explorer .single").length') == 9
    pick("metric", 'e.value = "train/mis_k3_kl"')
    pick("log", "e.checked = true")
    assert "Mismatch KL (k3), nats, log scale" in tab.value(texts)
    assert tab.value('document.querySelectorAll("#explorer .band").length') == 3
    pick("bands", "e.checked = false")
    assert tab.value('document.querySelectorAll("#explorer .band").length') == 0
    assert not tab.value('/NaN|Infinity/.test(document.getElementById("explorer").innerHTML)')
    tab.value('document.getElementById("tab-health").click()')
    tab.value('document.querySelector("[data-open=\\"train/entropy\\"]").click()')
    assert shown(tab) == ["curves"]
    assert tab.value('document.getElementById("metric").value') == "train/entropy"
    assert tab.complaints == []


def contrast(tab: Tab, query: str) -> float:
    """Of a text and the ground of the page, after WCAG."""
    found = tab.value(f'(e => [getComputedStyle(e).color, getComputedStyle(document.body).backgroundColor])'
                      f'(document.querySelector({json.dumps(query)}))')  # fmt: skip
    light = []
    for colour in found:
        parts = np.array([float(part) for part in re.findall(r"[\d.]+", colour)[:3]]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        light.append(float(linear @ [0.2126, 0.7152, 0.0722]))
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_light_and_dark_by_the_system_and_by_the_button(browser: Browser, plain: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    for dark in (False, True):
        tab = browser.open(plain, dark=dark)
        system = tab.value(ground)
        for query in ("h1", ".standing", ".note", ".alarm", "thead th", ".better", "a[href='#problems']"):
            assert contrast(tab, query) >= 4.5, (query, dark)
        seen = []
        for _ in range(3):
            tab.value('document.getElementById("theme").click()')
            seen.append((tab.value('document.getElementById("theme").textContent'), tab.value(ground)))
        assert [text for text, _ in seen] == ["Theme: light", "Theme: dark", "Theme: system"]
        light, black, again = (colour for _, colour in seen)
        assert light != black
        assert again == system == (black if dark else light)


def test_on_paper_all_tabs_stand_in_black_on_white(browser: Browser, plain: Path, tmp_path: Path) -> None:
    tab = browser.open(plain, dark=True)
    tab.value('document.getElementById("theme").click(); document.getElementById("theme").click()')
    tab.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert shown(tab) == TABS
    assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.value("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert tab.value('getComputedStyle(document.querySelector(".tabs")).display') == "none"
    pdf = tab.pdf(tmp_path / "page.pdf").read_bytes()
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 4
    assert tab.complaints == []


def test_without_scripts_everything_is_there(browser: Browser, plain: Path) -> None:
    tab = browser.open(plain, script=False)
    tab.call("DOM.enable")
    document = tab.call("DOM.getDocument")["root"]["nodeId"]
    for name in TABS:
        node = tab.call("DOM.querySelector", nodeId=document, selector=f"#{name}")["nodeId"]
        assert tab.call("DOM.getBoxModel", nodeId=node)["model"]["height"] > 50


def test_nothing_in_a_name_runs_or_loads(browser: Browser, hostile: Path) -> None:
    tab = browser.open(hostile)
    tab.value('document.querySelectorAll("details").forEach(d => { d.open = true; })')
    assert tab.value('document.querySelectorAll("script").length') == 2
    assert tab.value('document.querySelectorAll("img, iframe, object, embed, base, form").length') == 0
    assert "</script><img src=x onerror=alert(1)>" in tab.value("document.body.textContent")
    # Even a script that got in could not run, nor send anything.
    blocked = tab.value(
        'new Promise(done => { document.addEventListener("securitypolicyviolation", e => done(e.violatedDirective));'
        'fetch("https://example.com/").catch(() => 0); setTimeout(() => done("not blocked"), 3000); })'
    )
    assert blocked == "connect-src"
    assert tab.value('(() => { const s = document.createElement("script"); s.textContent = "window.bad = 1"; '
                     'document.body.append(s); return window.bad === undefined; })()')  # fmt: skip


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_two_hundred_runs_of_two_thousand_steps_open_within_two_seconds(
    browser: Browser, large: Path, width: int
) -> None:
    browser.open(large, width)  # the browser's own first start
    tab = browser.open(large, width)
    load_, paint = tab.value('[performance.getEntriesByType("navigation")[0].loadEventEnd, '
                             'performance.getEntriesByName("first-contentful-paint")[0].startTime]')  # fmt: skip
    print(f"{width} px, {large.stat().st_size / 1e6:.1f} MB: load event {load_:.0f} ms, first paint {paint:.0f} ms, "
          f"first frame after it {1000 * tab.opened:.0f} ms")  # fmt: skip
    assert 0 < load_ < 2000
    assert tab.opened < 2.0
    assert tab.complaints == []


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, steps, runs = np.random.default_rng(0), 2000, []
    names = ("train/reward", "train/mis_k3_kl", "train/mis_ess", "train/mis_kept_token_fraction", "train/entropy",
             "train/clip_fraction_high", "train/clip_fraction_low", "train/tis_clipfrac", "train/response_length",
             "train/grad_norm", "train/mis_rs_catastrophic_seq_fraction", "train/train_rollout_logprob_abs_diff",
             "train/mis_kl", "train/ppo_kl", "train/truncated_fraction")  # fmt: skip
    for i in range(40):
        for seed in range(5):
            columns = {name: rng.normal(1.0, 0.1, steps).cumsum() / np.arange(1, steps + 1) for name in names}
            columns["eval/reward"] = np.where(
                np.arange(1, steps + 1) % 50 == 0, 0.5 + rng.normal(0, 0.02, steps), np.nan
            )
            columns["train/tokens"] = np.arange(1, steps + 1) * 1000.0
            columns["time/step"] = rng.uniform(0.4, 0.6, steps)
            overrides = {"algo.name": "standard" if i == 0 else "decoupled", "mis.tis_upper_bound": 2.0 + i}
            runs.append(run_in_memory(overrides, seed, columns))
    path = tmp_path_factory.mktemp("large") / "page.html"
    path.write_text(page(compare(runs), runs), encoding="utf-8")
    return path


def test_a_piece_of_a_curve_of_one_point_has_a_dot_and_its_interval(browser: Browser, tmp_path: Path) -> None:
    runs = [run_in_memory({"algo.name": name}, seed, [0.1, 0.3, 0.5, 0.5 + 0.1 * seed, 0.55 + 0.1 * seed][:steps])
            for name in ("standard", "bypass") for seed, steps in enumerate((5, 5, 4))]  # fmt: skip
    path = tmp_path / "page.html"
    path.write_text(page(compare(runs), runs), encoding="utf-8")
    tab = browser.open(path, DESKTOP)
    tab.value('document.getElementById("tab-curves").click()')
    for shape in ("circle", "line"):
        drawn = tab.value(f'[...document.querySelectorAll("#explorer {shape}.lone")].map(e => e.getBBox().height)')
        assert len(drawn) == 2 and min(drawn) > 1, shape
