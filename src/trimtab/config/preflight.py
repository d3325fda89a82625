"""A sweep's combinations are all composed and checked before the first one runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Iterator, Mapping, Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from trimtab.config.convert import OF_SWEEP
from trimtab.config.many import compose_all
from trimtab.config.notes import notes_of_many
from trimtab.config.resolve import config_hash
from trimtab.errors import ConfigError
from trimtab.spec import RunSpec

RESOURCES = "launch.resources"  # an optimising sweeper may choose it by run; what it cannot do, the plan says
POINTS = "hydra.sweeper.points"
ONE = ("launcher", "sweep", *OF_SWEEP)


def combinations(
    params: Mapping[str, Any], overrides: Sequence[str], points: Mapping[str, Any] | None = None
) -> list[list[str]]:
    """The overrides of each run that Hydra's basic sweeper would start, in its order; with ``points`` (axis -> name ->

    overrides) each of those with every choice of a name from each axis. Raises ConfigError for points that are not such
    lists, or that set what is set already.
    """
    texts = [f"{key}={value}" for key, value in params.items()] + list(overrides)
    plain: list[list[str]] = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(texts), None)[0]
    axes = [[(f"{axis}.{name}", given) for name, given in named.items()] for axis, named in _axes(points or {})]
    return [[*_together(choice, one), *one] for one in plain for choice in product(*axes)]


def _axes(points: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Sequence[str]]]]:
    for axis, named in points.items():
        lists = isinstance(named, Mapping) and all(isinstance(given, list) for given in named.values())
        if not lists or not all(isinstance(text, str) for given in named.values() for text in given):
            raise ConfigError(
                f"{POINTS}.{axis} is refused; allowed: a name and a list of overrides for each point; for example "
                f"{POINTS}.{axis}={{off: [algo=standard], on: [algo=decoupled, level=token]}}"
            )
        if named:
            yield axis, named


def _together(choice: Sequence[tuple[str, Sequence[str]]], others: Sequence[str]) -> list[str]:
    """The overrides of the chosen points; each key may be set once."""
    found = {_key(text): f"the override {text}" for text in others}
    for name, given in choice:
        for text in given:
            key = _key(text)
            if key in found:
                raise ConfigError(
                    f"{text} of {POINTS}.{name} and {found[key]} are both given; leave one out, a point with "
                    f"~{POINTS}.{name}"
                )
            found[key] = f"{text} of {POINTS}.{name}"
    return [text for _, given in choice for text in given]


def misplaced(overrides: Sequence[str]) -> list[str]:
    """One line for each option that is swept over and belongs to the sweep as a whole."""
    found = []
    for text in overrides:
        key = _key(text)
        if key.partition(".")[0] not in ONE or key == RESOURCES:
            continue
        try:
            swept = OverridesParser.create().parse_override(text).is_sweep_override()
        except HydraException:
            continue  # told when it is composed
        if swept:
            found.append(f"{text}: a sweep has one {key}; give one value")
    return found


def of_run(overrides: Sequence[str], resources: bool = False) -> list[str]:
    """The overrides that make the run, without those of its sweep; ``resources``: but for the class it asks for."""
    return [
        text for text in overrides
        if _key(text).partition(".")[0] not in OF_SWEEP or (resources and _key(text) == RESOURCES)
    ]  # fmt: skip


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


@dataclass(frozen=True)
class Checked:
    """``specs`` of the runs that can start; a line of ``faults`` for each that cannot; ``notes`` on the others."""

    specs: list[RunSpec]
    faults: list[str]
    notes: list[str]


def composed(runs: Sequence[Sequence[str]], folders_given: bool = True) -> Checked:
    """Compose and check all runs. Two in one folder are a fault too, where ``folders_given`` by the user."""
    specs, found, folders = list[RunSpec](), list[str](), dict[str, str]()
    noted = list[tuple[RunSpec, RunSpec, Sequence[str]]]()
    for overrides, made in zip(runs, compose_all(runs), strict=True):
        name = " ".join(overrides)
        if isinstance(made, ConfigError):
            found.append(f"{name}: " + "; ".join(str(made).splitlines()))
            continue
        spec, folder = made.resolved, made.resolved.run_dir
        noted.append((made.given, spec, overrides))
        if folders_given and folder and folder in folders:
            found.append(f"{name}: run_dir={folder} is that of {folders[folder]} too; leave it out, or sweep over it")
        folders.setdefault(folder, name)
        specs.append(spec)
    return Checked(specs, found, [] if found else notes_of_many(noted))


def manifest(name: str, specs: Sequence[RunSpec], runs: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What the sweep is about to start, so that a run that never came to be is missed: ``trimtab compare`` reads it."""
    planned = [
        {"dir": spec.run_dir or str(i), "config_hash": config_hash(spec), "seed": spec.seed, "overrides": [*overrides]}
        for i, (spec, overrides) in enumerate(zip(specs, runs, strict=True))
    ]
    return {"sweep": name, "runs": planned}
