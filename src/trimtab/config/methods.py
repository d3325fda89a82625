"""Presets as methods, composed without Hydra: a hundred of them take less time than two of its compositions.

The layers are merged in Hydra's order: the schema, the choice of each group (a preset's ``override`` entries change
it), then the preset's own defaults and values. tests/config/test_presets.py compares every preset with Hydra's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Iterator, Mapping, Sequence

import yaml
from omegaconf import DictConfig, OmegaConf
from yaml import CSafeLoader

from trimtab.config.convert import to_method
from trimtab.config.explain import closest
from trimtab.config.groups import CONF, defaults, recipes
from trimtab.config.resolve import resolve
from trimtab.config.schema import twin
from trimtab.errors import ConfigError
from trimtab.spec import MethodSpec, RolloutSpec, RunSpec

SECTIONS = [f.name for f in fields(MethodSpec)]
PACKAGE = "# @package"
GROUPS = ("algo", "tis_mode", "level", "rs", "veto", "loss")  # what writes into them, in the order of conf/config.yaml


@dataclass(frozen=True)
class Layer:
    """One yaml file: what it includes, which groups' choices it overrides, and its values under their sections."""

    includes: tuple[str, ...]
    overrides: Mapping[str, str]
    values: Mapping[str, Mapping[str, Any]]


def methods(names: Sequence[str], spec: RunSpec) -> dict[str, MethodSpec]:
    """The resolved method of each preset; of the run only rollout.max_tokens matters, which sum_constant falls back to.

    Raises ConfigError for a name that is no preset.
    """
    made, rollout = dict[str, MethodSpec](), RolloutSpec(max_tokens=spec.rollout.max_tokens)
    for name in names:
        if name not in recipes():
            close = closest(name, recipes())
            raise ConfigError(f"there is no preset {name}; did you mean {close}? (python -m run --help names them all)")
        one = to_method(composed(name))
        resolved = resolve(RunSpec(algo=one.algo, mis=one.mis, loss=one.loss, rollout=rollout))
        made[name] = MethodSpec(resolved.algo, resolved.mis, resolved.loss)
    return made


def composed(preset: str) -> DictConfig:
    """The algo, mis and loss that Hydra composes for ``preset=`` alone."""
    found = list(_with_included(_layer("preset", preset)))
    chosen = dict(defaults())
    for layer in found:
        chosen |= layer.overrides
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for layer in (*(_layer(group, str(chosen[group])) for group in GROUPS), *found):
        for section, given in layer.values.items():
            values[section] |= given  # no section has sections of its own, and a list replaces a list
    merged = OmegaConf.merge(_schema(), values)
    assert isinstance(merged, DictConfig)
    return merged


@cache
def _schema() -> DictConfig:
    made: DictConfig = OmegaConf.structured(twin(MethodSpec))
    return made


def _with_included(layer: Layer) -> Iterator[Layer]:
    for path in layer.includes:
        group, _, name = path.removeprefix("/").partition("/")
        yield from _with_included(_layer(group, name))
    yield layer


@cache
def _layer(group: str, name: str) -> Layer:
    """A choice's file, read once: its ``defaults`` taken apart, its values put under its package."""
    path = CONF / group / f"{name}.yaml"
    text = path.read_text()
    head, _, _ = text.partition("\n")
    package = head.removeprefix(PACKAGE).strip() if head.startswith(PACKAGE) else group
    loaded = yaml.load(text, CSafeLoader)  # OmegaConf's own loader is ten times slower
    entries = loaded.pop("defaults", [])
    chosen = [entry for entry in entries if isinstance(entry, dict)]
    values = loaded if package == "_global_" else {package: loaded}
    return Layer(
        includes=tuple(entry for entry in entries if isinstance(entry, str)),
        overrides={key.removeprefix("override /"): str(v) for entry in chosen for key, v in entry.items()},
        values={key: values[key] for key in SECTIONS if key in values},
    )
