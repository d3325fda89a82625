"""Presets as methods, composed without Hydra: a hundred of them take less time than two of its compositions.

The layers are merged in Hydra's order: the schema, the choice of each group (a preset's ``override`` entries change
it), then the preset's own defaults and values. tests/config/test_presets.py compares every preset with Hydra's.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, Sequence

from omegaconf import DictConfig, OmegaConf

from trimtab.config.convert import to_method
from trimtab.config.explain import closest
from trimtab.config.groups import defaults, recipes
from trimtab.config.layers import layer, with_included
from trimtab.config.resolve import resolve
from trimtab.config.schema import twin
from trimtab.errors import ConfigError
from trimtab.spec import MethodSpec, RolloutSpec, RunSpec

SECTIONS = [f.name for f in fields(MethodSpec)]
GROUPS = ("algo", "tis_mode", "level", "rs", "veto", "loss")  # what writes into them, in the order of conf/config.yaml


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
    found = list(with_included(layer("preset", preset)))
    chosen = dict(defaults())
    for one in found:
        chosen |= one.overrides
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for one in (*(layer(group, str(chosen[group])) for group in GROUPS), *found):
        for section, given in one.values.items():
            if section in values:
                values[section] |= given  # no section has sections of its own, and a list replaces a list
    merged = OmegaConf.merge(_schema(), values)
    assert isinstance(merged, DictConfig)
    return merged


@cache
def _schema() -> DictConfig:
    made: DictConfig = OmegaConf.structured(twin(MethodSpec))
    return made
