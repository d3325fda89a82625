"""Composing conf/ with overrides into a resolved ``RunSpec``, outside of ``hydra.main``."""

from __future__ import annotations

from typing import Sequence

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from trimtab.config.convert import to_spec
from trimtab.config.explain import COMPOSE_ERRORS, explain, impossible, spelled
from trimtab.config.groups import CONF
from trimtab.config.resolve import resolve
from trimtab.config.rules import Rule, check
from trimtab.config.schema import register
from trimtab.errors import ConfigError
from trimtab.spec import RunSpec


def prepare(config: DictConfig, overrides: Sequence[str] = (), without: Sequence[Rule] = ()) -> RunSpec:
    """The resolved spec of a config composed with ``overrides`` that passed every rule but those; else ConfigError."""
    if found := impossible(overrides):
        raise ConfigError("\n".join(found))
    try:
        spec = to_spec(config)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from error
    check(spec, without)
    return resolve(spec)


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Hydra's config for ``overrides``; within ``hydra.main`` its config loader is used again."""
    register()
    try:
        if GlobalHydra.instance().is_initialized():
            return hydra.compose("config", spelled(overrides))
        with hydra.initialize_config_dir(str(CONF), version_base="1.3", job_name="run"):
            return hydra.compose("config", spelled(overrides))
    except COMPOSE_ERRORS as error:
        raise ConfigError(explain(error, overrides)) from error


def compose(overrides: Sequence[str] = (), without: Sequence[Rule] = ()) -> RunSpec:
    """The checked and resolved spec for command-line overrides such as ``level=geometric``.

    ``without``: rules that do not hold here; a tool that measures a fault must be able to set it up.
    """
    return prepare(compose_config(overrides), overrides, without)
