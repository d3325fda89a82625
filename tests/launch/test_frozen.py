"""Frozen configs are read as the schema reads them, or not at all."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import trimtab
from trimtab.config import compose_many, read_yaml, recipes, to_dict, to_yaml
from trimtab.launch.frozen import digest, read
from trimtab.spec import RunSpec

NASTY = ["1e-3", "on", "null", "~", "2020-01-01", "0x1F", "1_000", "a: b", "#", " x ", "ü\n\t'\"", "$(id)", "", "12:30"]


def specs() -> list[RunSpec]:
    runs = [[f"preset={name}"] for name in recipes()]
    runs += [["optim.lr=1e-7"], ["task=arithmetic_chat", "policy=smollm2"], ["mis.reject=[{statistic:max,upper:3}]"]]
    found = [one for one in compose_many(runs) if isinstance(one, RunSpec)]
    assert len(found) > 20
    odd = RunSpec()
    found += [replace(odd, task=replace(odd.task, system=text, options={"a": text, "b": [1, 2.5]})) for text in NASTY]
    found += [replace(odd, shadow="all"), replace(odd, tracker=replace(odd.tracker, tags=NASTY))]
    found += [replace(odd, optim=replace(odd.optim, lr=value)) for value in (1e20, 1e-300, math.inf, 3.0)]
    return found


def test_it_reads_what_the_schema_reads(tmp_path: Path) -> None:
    fast, all_of_them = 0, specs()
    for spec in all_of_them:
        text = to_yaml(spec)
        assert text == OmegaConf.to_yaml(OmegaConf.create(to_dict(spec)))
        path = tmp_path / "a.yaml"
        path.write_text(text)
        found = read(path, digest(text))
        assert read_yaml(path) == spec and found in (spec, None)
        fast += found is not None
    assert fast >= len(all_of_them) - 1  # a text that looks like a date


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 0", "seed: '0'"),
        ("seed: 0", "seed: 0.0"),
        ("seed: 0", "seed: true"),
        ("seed: 0", "sead: 0"),
        ("seed: 0", "seed: null"),
        ("name: decoupled", "name: nosuch"),
        ("seed: 0", "seed: ["),
    ],
)
def test_what_is_not_as_its_type_says_is_left_to_the_schema(tmp_path: Path, old: str, new: str) -> None:
    text = to_yaml(RunSpec())
    assert old in text
    path = tmp_path / "a.yaml"
    path.write_text(text.replace(old, new, 1))
    assert read(path, digest(path.read_text())) is None


def test_a_text_that_was_changed_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    assert read(path, digest("")) is None
    text = to_yaml(RunSpec())
    path.write_text(text.replace("seed: 0", "seed: 1"))
    assert read(path, digest(text)) is None


def test_a_job_starts_without_the_slow_imports() -> None:
    code = "import trimtab.launch.job, sys; print({'hydra', 'omegaconf', 'torch', 'submitit'} & sys.modules.keys())"
    source = str(Path(trimtab.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env={"PYTHONPATH": source}, capture_output=True, text=True
    )
    assert done.stdout == "set()\n", done.stderr
