"""From combinations to distinct runs: one folder and one class of resources each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trimtab.config import config_hash
from trimtab.config.keys import options, value_of
from trimtab.config.many import converted
from trimtab.errors import ConfigError
from trimtab.launch.model import PlannedRun
from trimtab.spec import RunSpec
from trimtab.spec.launch import LaunchSpec, RuleSpec, SweepSpec

RESOURCES = "launch.resources="
DEFAULT = "default"


def plan(
    specs: Sequence[RunSpec], overrides: Sequence[Sequence[str]], sweep_spec: SweepSpec
) -> tuple[list[PlannedRun], list[int]]:
    """The distinct runs in order of their first combination, and for each combination the place of its run.

    ConfigError when a run is asked for in two classes of resources: they make no runs distinct.
    """
    runs, places, known = list[PlannedRun](), list[int](), dict[str, int]()
    clashes = dict[int, str]()
    for spec, given in zip(specs, overrides, strict=True):
        digest, asked = config_hash(spec), resources(spec, given, sweep_spec.launch)
        if digest in known and asked != runs[known[digest]].resources:
            clashes.setdefault(known[digest], asked)
        if digest not in known:
            known[digest] = len(runs)
            runs.append(PlannedRun(
                dir=f"{spec.algo.name.name}_{digest}_s{spec.seed}",
                config_hash=digest,
                seed=spec.seed,
                overrides=tuple(text for text in given if not text.startswith(RESOURCES)),
                resources=asked,
            ))  # fmt: skip
        places.append(known[digest])
    if clashes:
        raise ConfigError(_clash(runs, clashes))
    return runs, places


def _clash(runs: Sequence[PlannedRun], clashes: Mapping[int, str]) -> str:
    at, other = next(iter(clashes.items()))
    run = runs[at]
    return (f"launch.resources asks for {len(clashes)} of {len(runs)} runs in more than one class ({run.resources} and "
            f"{other} for {' '.join(run.overrides) or run.dir}), and a class makes no run distinct; allowed: one class "
            f"a run, by one value or by launch.rules; for example {RESOURCES}{run.resources}")  # fmt: skip


def resources(spec: RunSpec, overrides: Sequence[str], launch: LaunchSpec) -> str:
    """The run's class: of its own overrides, of the sweep's, of the first rule that fits, else ``default``."""
    own = [text.removeprefix(RESOURCES) for text in overrides if text.startswith(RESOURCES)]
    given = own[-1].strip("'\"") if own else launch.resources
    return given or next((rule.use for rule in launch.rules if fits(spec, rule)), DEFAULT)


def fits(spec: RunSpec, rule: RuleSpec) -> bool:
    """Whether all of the rule's options have its values."""
    return all(value_of(spec, key) == wanted for key, wanted in meant(rule.when).items())


def meant(when: Mapping[str, str]) -> dict[str, object]:
    """A rule's texts as the values that the options take; options or values that there are not are left out."""
    found = {key: converted(key, text) for key, text in when.items() if key in options()}
    return {key: value[0] for key, value in found.items() if value is not None}


def told(runs: Sequence[PlannedRun], combinations: int) -> str:
    """``12 combinations, 9 distinct``."""
    if combinations == len(runs):
        return f"{combinations} combinations, all distinct" if combinations > 1 else "1 run"
    return f"{combinations} combinations, {len(runs)} distinct"
