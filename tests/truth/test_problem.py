"""Problem files: what is read back, and what each mistake is told."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from trimtab.errors import ConfigError, DataError
from trimtab.truth.generate import generate
from trimtab.truth.problem import as_json, parse_problem, read_problem
from trimtab.truth.recipe import Gap, Recipe

SMALL: dict[str, Any] = {
    "symbols": 2,
    "length": 2,
    "eos": 1,
    "prompts": [
        {
            "weight": 1.0,
            "rollout": {"": [0.5, "-inf"], "0": [0, 1]},
            "proximal": {"": [0.0, 0.0], "0": [0.0, 0.0]},
            "current": {"": [0.0, 0.0], "0": [0.0, 0.0]},
            "advantage": {"1": 1, "0 0": -1, "0 1": 0.5},
        }
    ],
}


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(SMALL))
    problem = read_problem(path)
    assert (problem.symbols, problem.length, problem.eos) == (2, 2, 1)
    assert problem.prompts[0].rollout == {"": (0.5, -math.inf), "0": (0.0, 1.0)}
    assert problem.prompts[0].advantage == {"1": 1.0, "0 0": -1.0, "0 1": 0.5}


@pytest.mark.parametrize("gap", list(Gap))
def test_what_is_written_is_read_back(gap: Gap) -> None:
    problem = generate(Recipe(mismatch=gap))
    assert parse_problem(json.loads(json.dumps(as_json(problem)))) == problem


def test_minus_infinity_may_be_written_as_json_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(SMALL).replace('"-inf"', "-Infinity"))
    assert read_problem(path).prompts[0].rollout[""] == (0.5, -math.inf)


def test_prefixes_that_no_sequence_passes_may_stand_in_a_table() -> None:
    given = copy.deepcopy(SMALL)
    given["prompts"][0]["current"]["1"] = [0.0, 0.0]
    assert set(parse_problem(given).prompts[0].current) == {"", "0", "1"}


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (("symbols",), 2.0, r"symbols is 2\.0; it must be an integer from 1 up"),
        (("symbols",), True, "symbols is true"),
        (("length",), 0, "length is 0; it must be an integer from 1 up"),
        (("length",), 10**12, "make length, symbols or the number of prompts smaller"),
        (("eos",), 2, r"eos is 2; it must be a symbol, 0 … 1, or null"),
        (("eos",), "end", "eos is \"end\"; it must be a symbol"),
        (("prompts",), [], r"prompts is \[\]; it must be a list of one prompt or more"),
        (("prompts",), [3], r"prompts\[0\] is 3; it must be an object with the keys 'weight', 'rollout'"),
        (("prompts", 0, "weight"), 10**400, r"prompts\[0\]\.weight is beyond what a float64 holds"),
        (("prompts", 0, "weight"), -1, r"prompts\[0\]\.weight is -1\.0; it must be a finite number above 0"),
        (("prompts", 0, "rollout"), {"": [0, 0]}, r"prompts\[0\]\.rollout lacks '0'; the prefixes needed are '', '0'"),
        (("prompts", 0, "rollout", ""), [0], r"prompts\[0\]\.rollout\[''\] is \[0\]; it must be a list of 2 logits"),
        (("prompts", 0, "rollout", ""), ["-inf", "-inf"], "is -inf for every symbol"),
        (("prompts", 0, "rollout", "0"), [0, "x"], r"rollout\['0'\]\[1\] is \"x\"; it must be a number"),
        (("prompts", 0, "current", ""), [0, "-inf"], r"current\[''\]\[1\] is -inf; a logit must be finite$"),
        (("prompts", 0, "proximal", "0"), [0, math.nan], "is nan; a logit must be finite"),
        (("prompts", 0, "proximal", "0,1"), [0, 0], r"'0,1' is no symbol; a prefix is symbols 0 … 1 joined"),
        (("prompts", 0, "proximal", "02"), [0, 0], "'02' is no symbol"),
        (("prompts", 0, "advantage", "0"), 1, r"advantage\['0'\] is no whole sequence"),
        (("prompts", 0, "advantage", "1"), math.inf, "an advantage must be finite"),
        (("prompts", 0, "advantage"), {"1": 1}, "advantage lacks '0 0', '0 1'"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(at: tuple[Any, ...], value: Any, message: str) -> None:
    given = copy.deepcopy(SMALL)
    place: Any = given
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value
    with pytest.raises(DataError, match=message):
        parse_problem(given)


def test_a_missing_key_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with pytest.raises(DataError, match="cannot be read"):
        read_problem(path)
    path.write_text("{")
    with pytest.raises(DataError, match="is no JSON"):
        read_problem(path)
    path.write_text(json.dumps({k: v for k, v in SMALL.items() if k != "eos"}))
    with pytest.raises(DataError, match=r"p\.json: the file lacks 'eos'; the keys needed are 'symbols', 'length'"):
        read_problem(path)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(symbols=1), "--symbols=1 must be 2 or more"),
        (Recipe(eos=3), "--eos=3 is no symbol; allowed: none, 0 … 2"),
        (Recipe(strength=-1.0), "--strength=-1.0 is out of range"),
        (Recipe(mismatch=Gap.truncation, strength=1.0), "below 1"),
    ],
)
def test_a_recipe_out_of_range_is_refused(recipe: Recipe, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(recipe)


def test_a_file_nested_too_deeply_is_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match="is no JSON"):
        read_problem(path)
