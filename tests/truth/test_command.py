"""``trimtab truth``: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from truth.independent import distance, finite_differences, moments
from truth.written_out import decoupled, reinforce, standard

from trimtab.cli import main
from trimtab.config import compose
from trimtab.config.groups import recipes
from trimtab.spec import Level, MethodSpec
from trimtab.truth.enumerate import enumerate_problem
from trimtab.truth.generate import generate
from trimtab.truth.measure import measure, state
from trimtab.truth.problem import as_json, parse_problem, read_problem
from trimtab.truth.recipe import Gap, Recipe

METHODS = ("--method", "seq=algo=reinforce level=sequence mis.tis_upper_bound=1.5",
           "--method", "tok=algo=decoupled level=token mis.tis_upper_bound=2",
           "--method", "plain=algo=standard")  # fmt: skip
PRESETS = list(recipes())


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["truth", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def problem_file(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(as_json(generate(Recipe(length=3, seed=5, mismatch=Gap.temperature)))))
    return path


def test_the_figures_of_a_file_are_those_of_the_recursion(
    problem_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(capsys, "--problem", str(problem_file), *METHODS)
    problem = read_problem(problem_file)
    assert (found["step"], found["later_steps"]) == (0, [])
    assert [tuple(at) for at in found["coordinates"]][:4] == [(0, "", 0), (0, "", 1), (0, "", 2), (0, "1", 0)]
    rules = {"seq": reinforce(Level.sequence, 1.5), "tok": decoupled(Level.token, 2.0), "plain": standard}
    assert set(found["methods"]) == set(rules)
    target = finite_differences(problem)
    for name, rule in rules.items():
        at, (mean, variance) = found["methods"][name], moments(problem, rule)
        assert at["expectation"] == pytest.approx(mean, rel=1e-11, abs=1e-14)
        assert at["target"] == pytest.approx(target, rel=1e-6, abs=1e-9)
        assert at["bias"] == pytest.approx(distance(mean, target), abs=1e-8)
        assert at["variance"] == pytest.approx(variance, rel=1e-11)
        assert at["mse"] == pytest.approx(at["bias"] ** 2 + at["variance"], rel=1e-14)


def test_overrides_reach_every_method_and_steps_come_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, *METHODS, "--steps", "4,0", "loss.clip_low=0.01", "loss.clip_high=0.01")
    plain = asked(capsys, *METHODS, "--steps", "0,4")
    assert (found["step"], [later["step"] for later in found["later_steps"]]) == (0, [4])
    assert found["methods"] == plain["methods"]  # at the first step nothing is clipped
    first, second = (d["later_steps"][0]["methods"] for d in (found, plain))
    assert first["plain"]["bias"] != second["plain"]["bias"] and first["seq"] == second["seq"]


class Reader(HTMLParser):
    """Collects tags, and addresses that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(v) for k, v in attrs if k in ("src", "href", "srcset", "action")]


def test_everything_is_written_and_the_page_needs_no_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "deep" / "truth"
    assert main(["truth", *METHODS, "--mismatch", "truncation", "--steps", "0,2,4", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].split() == ["method", *(f"{w}" for s in "024" for w in ("bias", s)),
                                *(w for s in "024" for w in ("sd", s)), "kept", "crossover"]  # fmt: skip
    assert [line.split()[0] for line in lines[1:4]] == ["seq", "tok", "plain"]
    document = json.loads((out / "truth.json").read_text())
    assert float(lines[1].split()[1]) == pytest.approx(document["methods"]["seq"]["bias"], rel=5e-3)
    assert (out / "truth.png").read_bytes().startswith(b"\x89PNG")
    reader = Reader()
    page = (out / "truth.html").read_text()
    reader.feed(page)
    assert (reader.tags.count("svg"), reader.tags.count("table"), reader.tags.count("section")) == (3, 3, 3)
    assert reader.fetched == [] and not re.search(r"https?:|@import|url\(", page)
    assert read_problem(out / "problem.json") == generate(Recipe(mismatch=Gap.truncation))


def test_json_alone_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked(capsys, *METHODS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--problem", "nowhere.json"), "--problem=nowhere.json cannot be read"),
        (("--problem", "p.json", "--seed", "1"), "--seed is for the built-in problem"),
        (("--steps", "1,x"), "--steps=1,x must be whole numbers from 0 to 1000 between commas"),
        (("--step-size", "nan"), "--step-size=nan must be a finite number"),
        (("--methods", "verl/tis"), "there is no preset 'verl/tis'; allowed: "),
        (("--methods", ","), "--methods names no method"),
        (("--method", "level=token"), "method level: "),
        (("--method", "x"), "--method='x' must be NAME=OVERRIDES"),
        (("--method", "a=loss.clip_low=-1"), "method a: "),
        (("--eos", "x"), "--eos=x is no symbol"),
        (("--length", "30"), "make length, symbols or the number of prompts smaller"),
        (("--strength", "-1"), "--strength=-1.0 is out of range"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["truth", *arguments, "--json"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and message in told.err


def test_help_tells_the_format_and_each_mismatch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["truth", "--help"])
    text = capsys.readouterr().out
    for word in ("symbols", "length", "eos", "prompts", "advantage", "expectation", *(g.value for g in Gap)):
        assert word in text


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_the_exact_gradient_without_a_mismatch_and_finite_with_one(name: str) -> None:
    spec = compose([f"preset={name}"])
    method = MethodSpec(spec.algo, spec.mis, spec.loss)
    equal = measure(method, state(enumerate_problem(generate(Recipe(mismatch=Gap.none))), 0, 2.0))
    assert equal.bias < 1e-12
    for gap in (Gap.logit_noise, Gap.truncation):
        for step in (0, 2):
            found = measure(method, state(enumerate_problem(generate(Recipe(mismatch=gap))), step, 2.0))
            assert found.expectation.isfinite().all()
            assert found.mse == found.bias**2 + found.variance and found.mse > 0
            assert 0 <= found.kept.tokens <= 1 + 1e-12


def test_what_is_written_is_a_problem_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, *METHODS, "--out", str(tmp_path), "--no-png", "--mismatch", "quantised")
    again = asked(capsys, *METHODS, "--problem", str(tmp_path / "problem.json"))
    assert again["methods"] == found["methods"]
    assert parse_problem(json.loads((tmp_path / "problem.json").read_text())).prompts[0].weight == 0.5
    assert not (tmp_path / "truth.png").exists()
