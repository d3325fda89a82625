"""Combinations become distinct runs with a stable folder and a class of resources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab.config import config_hash
from trimtab.config.many import compose_many
from trimtab.errors import ConfigError
from trimtab.launch.plan import plan, told
from trimtab.spec import RunSpec
from trimtab.spec.launch import LaunchSpec, ResourceSpec, RuleSpec, SweepSpec

CLASSES = {"default": ResourceSpec(), "large": ResourceSpec(gpus=1), "huge": ResourceSpec(gpus=8)}


def specs(runs: list[list[str]]) -> list[RunSpec]:
    found = compose_many(runs)
    assert all(isinstance(one, RunSpec) for one in found)
    return [one for one in found if isinstance(one, RunSpec)]


def test_equal_effective_configs_are_one_run() -> None:
    runs = [["seed=0"], ["seed=1"], ["algo=decoupled", "seed=0"], ["seed=0", "tracker.tags=[a]"]]
    made = specs(runs)
    planned, places = plan(made, runs, SweepSpec())
    assert [run.dir for run in planned] == [f"decoupled_{config_hash(made[i])}_s{i}" for i in (0, 1)]
    assert [run.overrides for run in planned] == [("seed=0",), ("seed=1",)] and places == [0, 1, 0, 0]
    assert told(planned, len(places)) == "4 combinations, 2 distinct"


@pytest.mark.parametrize(
    ("overrides", "given", "expected"),
    [
        (["policy=tiny"], "", "default"),
        (["policy=smollm2"], "", "large"),
        (["policy=smollm2", "optim.lr=1e-3"], "", "huge"),
        (["policy=smollm2", "optim.lr=0.001"], "", "huge"),
        (["policy=smollm2"], "default", "default"),
    ],
)
def test_the_first_rule_that_fits_names_the_class(overrides: list[str], given: str, expected: str) -> None:
    rules = [
        RuleSpec({"policy.kind": "smollm2", "optim.lr": "1e-3"}, "huge"),
        RuleSpec({"policy.kind": "smollm2"}, "large"),
    ]
    launch = LaunchSpec(classes=CLASSES, rules=rules, resources=given)
    (run,), _ = plan(specs([overrides]), [overrides], replace(SweepSpec(), launch=launch))
    assert run.resources == expected
    (run,), _ = plan(specs([overrides]), [[*overrides, "launch.resources=large"]], replace(SweepSpec(), launch=launch))
    assert run.resources == "large" and run.overrides == tuple(overrides)


def test_a_class_makes_no_run_distinct() -> None:
    runs = [[f"seed={seed}", f"launch.resources={name}"] for seed in (0, 1, 2) for name in ("default", "large")][1:]
    launch = LaunchSpec(classes=CLASSES)
    told = (
        r"launch\.resources asks for 2 of 3 runs in more than one class \(default and large for seed=1\), and a class "
        r"makes no run distinct; .* for example launch\.resources=default$"
    )
    with pytest.raises(ConfigError, match=told):
        plan(specs([one[:1] for one in runs]), runs, replace(SweepSpec(), launch=launch))
    same = [["seed=0", "launch.resources=large"], ["algo=decoupled", "seed=0", "launch.resources=large"]]
    planned, places = plan(specs([["seed=0"], ["seed=0"]]), same, replace(SweepSpec(), launch=launch))
    assert [run.resources for run in planned] == ["large"] and places == [0, 0]
