"""The page as text: what it says, that nothing in a name can break it, and that thinning keeps what matters."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report.synthetic import HOSTILE, Arm, run_in_memory, write_samples, write_sweep

from trimtab.report.compare import compare
from trimtab.report.model import Comparison, Difference, Interval, Problem, Row, Run, Setting, Verdict
from trimtab.report.page import page
from trimtab.report.page.samples import Shown, Token, choose, level
from trimtab.report.page.svg import Scale, area, powers, span, ticks
from trimtab.report.page.text import aligned, big, duration, embed, esc, fixed, number, p_value, places, short, visible
from trimtab.report.page.verdict import headline, sentence
from trimtab.report.page.view import view
from trimtab.report.sources import load

ARMS = {
    "standard": Arm({"algo.name": "standard"}),
    "better": Arm({"algo.name": "decoupled"}, effect=0.3),
    "same": Arm({"algo.name": "bypass"}, collapsed=(1,), failed=(2,), missing=(3,)),
}


class Found(HTMLParser):
    """Tags with their attributes, the text outside scripts and styles, and every tag that isn't closed."""

    VOID = frozenset({"meta", "link", "input", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def embedded(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    return dict(json.loads(found.group(1)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, list[Run], str]:
    folder = tmp_path_factory.mktemp("sweep") / "sweep"
    truth = write_sweep(folder, ARMS, seeds=(0, 1, 2, 3, 4))
    write_samples(truth.folders["better", 0], 50, text="plain")
    runs = load([str(folder)])
    comparison = compare(runs)
    return comparison, runs, page(comparison, runs)


# -- what it says ----------------------------------------------------------------------------------------------------


def test_the_verdict_comes_first_and_says_how_much_and_how_surely(made: tuple[Comparison, list[Run], str]) -> None:
    comparison, runs, text = made
    found = Found(text)
    assert found.open == []
    row = next(row for row in comparison.rows if row.setting.label == "algo=decoupled")
    assert row.difference.verdict is Verdict.better
    assert f"{row.setting.label} is better than algo=standard" in found.text
    told = html.unescape(re.sub("<[^>]*>", "", sentence(view(comparison, runs), row)))
    size, low, high = re.findall(r"[+−]\d+\.\d+", told)
    interval = row.difference.interval
    for shown, value in ((size, interval.mean), (low, interval.low), (high, interval.high)):
        assert float(shown.replace("−", "-")) == pytest.approx(value, abs=6e-3 * abs(interval.mean))
    assert "5 pairs of seeds" in told
    order = ["Verdict", "Problems", "Curves", "Reward against mismatch", "Health of the training", "Settings to score",
             "Compute", "What differs", "Samples", "How it was computed"]  # fmt: skip
    places_ = [text.index(f">{heading}</h2>") for heading in order]
    assert places_ == sorted(places_)


def test_every_problem_stands_on_the_page(made: tuple[Comparison, list[Run], str]) -> None:
    comparison, _, text = made
    found = Found(text).text
    kinds = {problem.kind for problem in comparison.problems}
    assert {"failed", "missing", "collapsed"} <= kinds
    for problem in comparison.problems:
        assert " ".join(visible(problem.text).split()) in found
    assert f"{len(comparison.problems)} problems" in found


def test_the_table_has_every_seed(made: tuple[Comparison, list[Run], str]) -> None:
    comparison, _, text = made
    tips = [str(attributes.get("data-tip")) for _, attributes in Found(text).tags if "data-tip" in attributes]
    for row in comparison.rows:
        for seed, score in row.scores.items():
            assert f"seed {seed}: {fixed(score, 4)}" in tips


def test_the_data_are_the_curves(made: tuple[Comparison, list[Run], str]) -> None:
    comparison, _, text = made
    data = embedded(text)
    assert [axis for axis, _ in data["axes"]] == ["step", "tokens", "wall"]
    assert data["metrics"][0][0] == "eval/reward"
    index = data["settings"].index("algo=decoupled")
    (entry,) = [e for e in data["curves"]["eval/reward"]["step"] if e[0] == index]
    setting = next(row.setting for row in comparison.rows if row.setting.label == "algo=decoupled")
    last = np.mean([run.columns["eval/reward"][-1] for run in setting.runs])
    assert (entry[1][-1], entry[2][-1]) == (60, pytest.approx(last, rel=1e-4))
    assert entry[3][-1] < entry[2][-1] < entry[4][-1]
    assert len(data["runs"]) == sum(bool(len(run.step)) for row in comparison.rows for run in row.setting.runs)


def test_one_run_and_no_run_make_a_page() -> None:
    run = run_in_memory({"algo.name": "standard"}, 0, [0.1, 0.2, 0.3])
    for runs in ([run], []):
        found = Found(page(compare(runs), runs))
        assert found.open == []
        assert "nothing to compare" in found.text


def row_of(label: str, mean: float, low: float | None, high: float | None, verdict: Verdict, p: float | None) -> Row:
    run = run_in_memory({"algo.name": label}, 0, [0.5])
    interval = Interval(mean, low, high, 3)
    pairs = ((0, mean), (1, mean), (2, mean)) if verdict is not Verdict.untested else ()
    return Row(Setting(label, {"algo": label}, (run,)), {0: 0.5}, Interval(0.5, 0.4, 0.6, 3),
               Difference(interval, p, p, verdict, pairs), 1, {}, {})  # fmt: skip


BASE = row_of("base", 0.0, None, None, Verdict.untested, None)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row_of("a", 0.1, 0.05, 0.15, Verdict.better, 0.01)], "a is better than base"),
        ([row_of("a", -0.1, -0.2, -0.05, Verdict.worse, 0.01)], "base is better than 1 other setting"),
        ([row_of("a", 0.1, -0.1, 0.3, Verdict.undecided, 0.3)],
         "Undecided: no setting is shown to be better than base"),
        ([row_of("a", 0.1, None, None, Verdict.untested, None)], "Too few seeds to test anything against base"),
        ([row_of("a", 0.1, 0.05, 0.15, Verdict.better, 0.01), row_of("b", 0.1, 0.05, 0.15, Verdict.better, 0.01),
          row_of("c", 0.1, -0.1, 0.3, Verdict.undecided, 0.3)], "2 of 3 settings are better than base"),
    ],
)  # fmt: skip
def test_headlines(rows: list[Row], expected: str) -> None:
    comparison = Comparison("eval/reward", 3, "base", ("algo",), (BASE, *rows), ())
    v = view(comparison, [row.setting.runs[0] for row in comparison.rows])
    assert re.sub("<[^>]*>", "", headline(v)) == expected


def test_undecided_says_why() -> None:
    rows = (
        BASE,
        row_of("a", 0.1, -0.1, 0.3, Verdict.undecided, 0.3),
        row_of("b", 0.1, 0.01, 0.2, Verdict.undecided, 0.06),
    )
    v = view(Comparison("eval/reward", 3, "base", ("algo",), rows, ()), [row.setting.runs[0] for row in rows])
    assert "the interval holds 0" in sentence(v, rows[1])
    assert "leaves out 0 (p = 0.06" in sentence(v, rows[2])
    assert "not after the correction" in sentence(v, rows[2])


# -- nothing gets out ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hostile") / "sweep"
    arms = {
        "a": Arm({"algo.name": "standard", "loss.name": HOSTILE}),
        "b": Arm({"algo.name": "decoupled", "loss.name": "ppo_clip"}, config={"mismatch.kind": HOSTILE}, failed=(0,)),
    }
    truth = write_sweep(folder, arms)
    for at in truth.folders.values():
        write_samples(at, 50)
    runs = load([str(folder)])
    comparison = compare(runs)
    problem = Problem("failed " + HOSTILE, HOSTILE, HOSTILE)
    loaded = Comparison(comparison.metric, comparison.last, comparison.baseline, comparison.keys, comparison.rows,
                        (*comparison.problems, problem), (HOSTILE,), (HOSTILE,))  # fmt: skip
    return page(loaded, runs, title=HOSTILE)


def test_hostile_text_stays_text(hostile: str) -> None:
    found = Found(hostile)
    assert found.open == []
    tags = {tag for tag, _ in found.tags}
    assert not tags & {"img", "iframe", "object", "embed", "base", "form"}
    for _, attributes in found.tags:
        assert not [key for key in attributes if key.startswith("on")]
    links = [a.get("href") for tag, a in found.tags if tag in ("a", "link")]
    assert all(str(link).startswith(("#", "data:,")) for link in links)
    assert sum(tag == "script" for tag, _ in found.tags) == 2
    assert visible("</script><img src=x onerror=alert(1)>") in found.text
    assert not re.search("[\x00\x1b\u202e\ud800-\udfff]", hostile)
    hostile.encode("utf-8")
    embedded(hostile)


def test_the_policy_lets_only_the_pages_own_script_and_style_run(hostile: str) -> None:
    policy = next(a["content"] for tag, a in Found(hostile).tags if a.get("http-equiv") == "Content-Security-Policy")
    style, script = (re.findall(rf"<{tag}>(.*?)</{tag}>", hostile, re.S) for tag in ("style", "script"))
    for (text,), kind in ((style, "style"), (script, "script")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in str(policy)
    assert str(policy).startswith("default-src 'none'")
    assert not re.search(
        r"""(src|href|action)=["']?(https?:)?//|@import|url\((?!#)""", hostile.replace("www.w3.org", "")
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x00b", "a⟨NUL⟩b"), ("\x1b[31mred", "⟨ESC⟩[31mred"), ("a\u202eb", "a⟨U+202E⟩b"),
        ("\u2066x\u2069", "⟨U+2066⟩x⟨U+2069⟩"),
        ("\ud800", "⟨U+D800⟩"), ("a\u200bb\ufeff", "a⟨U+200B⟩b⟨U+FEFF⟩"), ("\x9b", "⟨U+009B⟩"),
        ("é\n\tありがと", "é\n\tありがと"),
        ("\U000e0041", "⟨U+E0041⟩"), ("\u2028", "⟨U+2028⟩"), ("\x7f\r", "⟨DEL⟩⟨CR⟩"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_escaping() -> None:
    assert esc("<a href=\"x\" b='y'>&amp;") == "&lt;a href=&quot;x&quot; b=&#x27;y&#x27;&gt;&amp;amp;"
    assert esc("z" + "\u0301" * 40) == "z" + "\u0301" * 4
    text = embed({"a": "</script><!--", "b": "\u2028&"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!--", "b": "\u2028&"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        embed(math.nan)


# -- numbers and drawing ---------------------------------------------------------------------------------------------


def test_numbers() -> None:
    assert [number(v) for v in (0.0, 1.23456, -0.000123456, 1234.5, 1.5e-7, 2.5e9, math.nan, math.inf, None)] == [
        "0.00", "1.23", "−0.000123", "1234", "1.50e−7", "2.50e9", "–", "∞", "–"]  # fmt: skip
    assert (fixed(0.5, 3, sign=True), fixed(-0.5, 1), fixed(math.nan, 2)) == ("+0.500", "−0.5", "–")
    assert [places(v) for v in ([0.1, 0.2], [10.0, 30.0], [5.0, 5.0], [], [math.nan], [0.0, 1e4])] == [3, 1, 2, 2, 2, 0]
    assert [p_value(p) for p in (1e-5, 0.0042, 0.2, None)] == ["p < 0.001", "p = 0.0042", "p = 0.20", "–"]
    assert [duration(s) for s in (3.5, 600, 7500, 86400 * 5)] == ["3.50\u202fs", "10\u202fmin", "2\u202fh 05\u202fmin",
                                                                    "5.00\u202fd"]  # fmt: skip
    assert [big(v) for v in (12, 1500, 2.5e6, 0.25)] == ["12", "1.50\u202fk", "2.50\u202fM", "0.250"]
    assert aligned([0.0, 0.05, 0.1]) == ["0.00", "0.05", "0.10"]
    assert aligned([0, 50_000, 100_000]) == ["0", "50k", "100k"]
    assert short("a" * 50, 10) == "aaaaaa…aaa"


def test_scales_and_ticks() -> None:
    assert ticks(0.0, 1.0, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert len(ticks(0.5411, 0.5589, 3)) >= 2
    assert powers(0.001, 10) == pytest.approx([0.001, 0.01, 0.1, 1, 10])
    assert Scale(0, 10, 100, 200)(2.5) == 125
    assert Scale(0.01, 1, 0, 100, log=True)(0.1) == pytest.approx(50)
    assert span([2.0, math.nan, 4.0]) == pytest.approx((1.9, 4.1))
    low, high = span([3.0, 3.0])
    assert low < 3.0 < high
    x = np.arange(5.0)
    gap = np.array([0.0, 0.0, math.nan, 1.0, 1.0])
    assert area(x, gap, gap + 1, Scale(0, 4, 0, 40), Scale(0, 2, 20, 0)).count("Z") == 2


def test_a_spike_of_one_step_survives_in_a_long_run() -> None:
    runs = []
    for seed in range(3):
        values = np.full(2000, 0.5)
        values[777] = 9.0 + seed
        runs.append(run_in_memory({"algo.name": "standard"}, seed, {"eval/reward": list(values)}))
    many = [run_in_memory({"algo.name": f"x{i}"}, s, [0.5, 0.6] * 1000) for i in range(60) for s in (0, 1)]
    everything = [*runs, *many]
    data = embedded(page(compare(everything), everything))
    index = data["settings"].index("algo=standard")
    (entry,) = [e for e in data["curves"]["eval/reward"]["step"] if e[0] == index]
    assert (max(entry[2]), entry[1][entry[2].index(max(entry[2]))]) == (10.0, 778)
    assert min(entry[2]) == 0.5
    assert [max(run["m"]["eval/reward"][1]) for run in data["runs"] if run["s"] == index] == [9.0, 10.0, 11.0]


# -- samples ---------------------------------------------------------------------------------------------------------


def shown_with(row: int, *ratios: float) -> Shown:
    tokens = tuple(Token("x", i, -1.0, -1.0 + ratio, True) for i, ratio in enumerate(ratios))
    return Shown("p", "r", 1.0, 0.0, "stop", 1, row, tokens, True)


def test_the_worst_samples_come_first_then_random_ones() -> None:
    found = [shown_with(i, 0.1 * i, -0.05) for i in range(20)]
    chosen = choose(found)
    assert [s.row for s, _ in chosen[:3]] == [19, 18, 17]
    assert len(chosen) == 5
    assert len({s.row for s, _ in chosen}) == 5
    assert chosen == choose(found)
    assert choose(found[:2]) == [(found[1], "largest |log-ratio|"), (found[0], "largest |log-ratio|")]


def test_log_ratio_is_trainer_minus_engine() -> None:
    assert Token("x", 1, -2.0, -0.5, True).log_ratio == 1.5
    assert Token("x", 1, math.nan, -0.5, True).log_ratio is None
    assert Token("x", 1, -1.0, None, True).log_ratio is None
    assert Token("x", 1, -1.0, -3.0, False).log_ratio is None
    assert Token("x", 1, -math.inf, -math.inf, True).log_ratio == 0.0
    assert [level(r) for r in (0.0, -0.03, 0.2, -0.5, 2.0, -math.inf)] == [0, 1, 2, 3, 4, 5]


def test_tokens_are_coloured_and_say_their_numbers(tmp_path: Path) -> None:
    from trimtab.batch import Finish, Problem, Prompt, Sample
    from trimtab.recording import write_rollouts

    run = run_in_memory({"algo.name": "standard"}, 0, [0.5, 0.6])
    run = Run(run.name, run.config, 0, run.state, run.step, run.columns, path=tmp_path)
    sample = Sample(Prompt(Problem("p", "ask", "42"), (1,)), (7, 8, 9), (-1.0, -0.5, math.nan), (0,) * 3, Finish.stop)
    file = tmp_path / "rollouts" / "step_00000001.parquet"
    write_rollouts(
        file, 1, [sample], [1.0], [0.5], [(-3.0, -0.25, -1.0)], [0], ["a b</pre>"], 1.0, [(" a", "", "</pre>")]
    )
    tags = [a for tag, a in Found(page(compare([run]), [run])).tags if tag == "span" and "data-tip" in a]
    told = [(a["class"], a["data-tip"]) for a in tags]
    assert told == [
        ("tok n4", "log-ratio −2.000 nats; trainer −3.00, engine −1.00; token 7"),
        ("tok p2", "log-ratio +0.250 nats; trainer −0.250, engine −0.500; token 8"),
        ("tok unknown", "log-ratio unknown; trainer −1.00, engine –; token 9"),
    ]
    file.write_bytes(b"broken")
    assert "Cannot be read" in page(compare([run]), [run])


# -- pictures --------------------------------------------------------------------------------------------------------


def test_figures_are_the_same_each_time_and_hold_text(made: tuple[Comparison, list[Run], str], tmp_path: Path) -> None:
    from trimtab.errors import ConfigError
    from trimtab.report.png import figures

    comparison, runs, _ = made
    first = figures(comparison, runs, tmp_path / "a", ("png", "pdf", "svg"))
    again = figures(comparison, runs, tmp_path / "b", ("png", "pdf", "svg"))
    assert [path.name for path in first] == [f"{n}.{f}" for n in ("settings", "curves", "mismatch") for f in
                                             ("png", "pdf", "svg")]  # fmt: skip
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    pdf = (tmp_path / "a" / "settings.pdf").read_bytes()
    assert b"/TrueType" in pdf or b"/CIDFontType2" in pdf
    assert b"CreationDate" not in pdf
    assert "algo=decoupled" in (tmp_path / "a" / "settings.svg").read_text()
    with pytest.raises(ConfigError, match="allowed: png, pdf, svg"):
        figures(comparison, runs, tmp_path, ("gif",))


def test_figures_of_hostile_names_and_of_nothing(tmp_path: Path) -> None:
    from trimtab.report.png import figures

    runs = [run_in_memory({"algo.name": name}, s, [0.1, 0.5]) for name in ("standard", HOSTILE, "$x^$") for s in (0, 1)]
    assert len(figures(compare(runs), runs, tmp_path, ("png",))) == 2  # no run logs the mismatch
    assert figures(compare([]), [], tmp_path) == []
