"""CSV, Markdown and JSON of comparisons, and the command that writes them."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report.synthetic import HOSTILE, Arm, run_in_memory, write_sweep

from trimtab.errors import ConfigError, DataError
from trimtab.report import command
from trimtab.report.compare import compare
from trimtab.report.model import Comparison, Interval, Run, RunState
from trimtab.report.sources import load
from trimtab.report.tables import as_json, cell, interval_text, markdown, md, narrow_text, runs_csv, settings_csv


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    arms = {"a": Arm({"algo.name": "standard"}), "b": Arm({"algo.name": "bypass"}, 0.1, failed=(1,), nan=(2,)),
            "c": Arm({"algo.name": "decoupled"}, 0.1)}  # fmt: skip
    write_sweep(tmp_path / "s", arms)
    return load([str(tmp_path / "s")])


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_the_csv_of_runs_has_a_line_for_each_also_for_those_that_do_not_count(runs: list[Run]) -> None:
    again = replace(runs[0], name="again", updated=9e9)
    found = compare([*runs, again])
    lines = table(runs_csv(found, [*runs, again]))
    assert len(lines) == 10
    by_name = {line["run"]: line for line in lines}
    assert (by_name["0"]["counts"], by_name["again"]["counts"]) == ("superseded", "yes")
    assert by_name["4"]["state"] == "failed" and by_name["4"]["score"] == ""
    assert "out of memory" in by_name["4"]["error"]
    assert by_name["5"]["score"] == "" and "non-finite" in by_name["5"]["problems"]
    row = next(row for row in found.rows if row.setting.label == "algo=decoupled")
    assert float(by_name["7"]["score"]) == row.scores[1]
    assert by_name["7"]["config.algo"] == "decoupled"


def test_the_csv_of_settings_has_the_numbers_of_the_comparison_in_full(runs: list[Run]) -> None:
    found = compare(runs)
    lines = {line["setting"]: line for line in table(settings_csv(found))}
    for row in found.rows:
        line = lines[row.setting.label]
        assert float(line["mean"]) == row.interval.mean
        assert int(line["seeds"]) == len(row.scores)
    assert lines["algo=standard"]["verdict"] == "baseline"
    assert lines["algo=bypass"]["verdict"] == "untested"
    assert lines["algo=bypass"]["difference_low"] == ""
    decoupled = next(row for row in found.rows if row.setting.label == "algo=decoupled")
    assert float(lines["algo=decoupled"]["p_corrected"]) == decoupled.difference.p_corrected


def test_json_is_strict_and_whole(runs: list[Run]) -> None:
    found = compare(runs)
    content = strict(json.dumps(as_json(found), allow_nan=False))
    assert content["baseline"] == "algo=standard"
    assert [s["label"] for s in content["settings"]] == [row.setting.label for row in found.rows]
    bypass = next(s for s in content["settings"] if s["label"] == "algo=bypass")
    assert (bypass["seeds"], bypass["seeds_expected"]) == (1, 3)
    assert bypass["difference"]["low"] is None and bypass["difference"]["why"]
    assert next(s for s in content["settings"] if s["is_baseline"])["difference"]["mean"] is None
    assert {p["kind"] for p in content["problems"]} >= {"failed", "non-finite", "incomplete"}


def test_markdown_tells_the_story(runs: list[Run]) -> None:
    text = markdown(compare(runs))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 4
    assert all(line.count("|") == rows[0].count("|") for line in rows)
    assert "| algo=bypass | 1 of 3 (1 of its 3 seeds failed, 1 diverged) |" in text
    assert "better" in next(line for line in rows if "algo=decoupled" in line)
    assert "no interval: one seed says nothing about the spread" in text
    assert "**failed** 4: failed at step 29 of 60: RuntimeError: out of memory" in text


def hostile() -> Comparison:
    runs = [run_in_memory({"algo.name": a, "evil": HOSTILE + a}, seed, [0.1, 0.2], name=f"=cmd|' /C calc'!A0{HOSTILE}")
            for a in ("standard", HOSTILE) for seed in (0, 1)]  # fmt: skip
    return compare([*runs, replace(runs[0], seed=7, state=RunState.failed, error=HOSTILE)])


def test_hostile_text_is_text_in_markdown() -> None:
    text = markdown(hostile())
    assert "<" not in text.replace("<0.001", "") and "\x00" not in text and "\u202e" not in text
    assert "\\[x\\]\\(javascript:alert\\(1\\)\\)" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 3, "a name's line end or bar makes no line and no cell"
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert md("a|b\n# c <d> @you https://x") == "a\\|b \\# c &lt;d&gt; &#64;you https&#8203;://x"


def test_hostile_text_is_text_in_csv_and_json() -> None:
    found = hostile()
    runs = [run for row in found.rows for run in row.setting.runs]
    lines = table(runs_csv(found, runs))
    assert len(lines) == len(runs)
    assert all(line["run"].startswith("'=cmd") for line in lines), "a spreadsheet would run it"
    assert len(table(settings_csv(found))) == 2
    content = strict(json.dumps(as_json(found), allow_nan=False))
    assert content["settings"][0]["runs"][0]["name"].startswith("=cmd")


def test_numbers_show_what_the_interval_allows() -> None:
    assert interval_text(Interval(0.51234, 0.48, 0.54468, 3)) == "0.512 [0.480, 0.545]"
    assert interval_text(Interval(0.1, -3.1, 3.3, 3), sign=True) == "+0.10 [-3.10, +3.30]"
    assert interval_text(Interval(0.5, None, None, 1, "one")) == "0.500"
    assert interval_text(Interval(math.nan, None, None, 0, "none")) == "–"
    assert narrow_text(Interval(-0.0067, -0.0111, -0.0023, 2), sign=True) == "-0.0067 ±0.0044"
    assert interval_text(Interval(2e-4, 1.8e-4, 2.2e-4, 3)) == "0.000200 [0.000180, 0.000220]"


# -- the command -----------------------------------------------------------------------------------------------------


def call(*arguments: str) -> int:
    top = argparse.ArgumentParser(prog="trimtab")
    command.add(top.add_subparsers(required=True))
    options = top.parse_args(["compare", *arguments])
    return int(options.call(options))


def test_the_command_writes_everything_and_shows_the_table(
    runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(str(tmp_path / "s")) == 0
    out = tmp_path / "s" / "comparison"
    assert {path.name for path in out.iterdir()} == {
        "page.html",
        "settings.csv",
        "runs.csv",
        "summary.md",
        "comparison.json",
    }
    assert strict((out / "comparison.json").read_text())["sources"] == [str(tmp_path / "s")]
    shown = capsys.readouterr().out
    assert "decoupled" in shown and "failed: 4: failed at step 29" in shown and str(out / "page.html") in shown
    assert call(str(tmp_path / "s"), "--json") == 0, "its own output is no run"
    assert len(strict(capsys.readouterr().out)["settings"]) == 3


def test_json_writes_no_files_unless_told_where(
    runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(str(tmp_path / "s"), "--json", "--by", "algo", "--last", "2", "--baseline", "algo=bypass") == 0
    content = strict(capsys.readouterr().out)
    assert (content["last"], content["baseline"], content["keys"]) == (2, "algo=bypass", ["algo"])
    assert not (tmp_path / "s" / "comparison").exists()
    assert call(str(tmp_path / "s"), "--json", "--out", str(tmp_path / "o")) == 0
    assert (tmp_path / "o" / "summary.md").exists()
    with pytest.raises(ConfigError, match="need --out"):
        call(str(tmp_path / "s"), "--json", "--png")


def test_markup_of_the_terminal_in_names_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = {"a": Arm({"k": "[red]x[/red]"}), "b": Arm({"k": "\\[bold]y[/]"})}
    write_sweep(tmp_path / "s", arms, steps=20)
    assert call(str(tmp_path / "s")) == 0
    shown = capsys.readouterr().out
    assert "[red]x[/red]" in shown and "\\[bold]y[/]" in shown


def test_wrong_calls_are_errors_with_what_is_allowed(runs: list[Run], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no run at"):
        call(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="closest: train/entropy"):
        call(str(tmp_path / "s"), "--metric", "train/entorpy")
    with pytest.raises(ConfigError, match="the settings are"):
        call(str(tmp_path / "s"), "--baseline", "algo=nothing")


@pytest.mark.parametrize("text", ["=1+1", "+cmd", "-x", "@SUM(A1)", "\t=1", "\r=1", "  =1", "\uff1d1", "-1-cmd|x"])
def test_text_that_a_spreadsheet_would_run_gets_a_quote_wherever_it_stands(text: str) -> None:
    assert cell(text).startswith("'")
    runs = [run_in_memory({"algo.name": a, "evil": text + a}, seed, [0.1, 0.2], name=text)
            for a in ("standard", "x") for seed in (0, 1)]  # fmt: skip
    found = compare([replace(run, error=text, run_id=text) for run in runs])
    for line in csv.reader(io.StringIO(settings_csv(found) + runs_csv(found, runs))):
        assert not any(c[:1] in ("=", "@", "\t", "\r") or (c[:1] in ("+", "-") and not number(c)) for c in line)


def number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def test_numbers_stay_numbers_in_csv() -> None:
    assert [cell(v) for v in (-0.5, -3, "-0.5", "+1e-3", "1e5", "-")] == ["-0.5", "-3", "-0.5", "+1e-3", "1e5", "'-"]


def test_what_reads_a_pipe_gets_one_line_for_each_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {f"{'long_key_' * 4}{i}": 0 for i in range(3)}
    arms = {str(i): Arm({key: i * (j + 1) for j, key in enumerate(keys)} | {"algo.name": "x" * 60 + str(i)})
            for i in range(2)}  # fmt: skip
    write_sweep(tmp_path / "s", arms, (0, 1, 2), steps=20)
    assert call(str(tmp_path / "s"), "--by", ",".join(["algo", *keys])) == 0
    lines = capsys.readouterr().out.splitlines()
    table_lines = [line for line in lines if line.startswith(("│", "┃", "|"))]
    assert len(table_lines) == 3, "a head and two settings"
    assert all(key in table_lines[0] for key in keys)


def test_the_terminal_says_which_seeds_were_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = {"a": Arm({"algo.name": "standard"}), "b": Arm({"algo.name": "bypass"}, 0.05, failed=(0, 2, 4))}
    write_sweep(tmp_path / "s", arms, tuple(range(6)))
    assert call(str(tmp_path / "s")) == 0
    assert "algo=bypass: undecided (3 of its 6 seeds failed; " in capsys.readouterr().out
