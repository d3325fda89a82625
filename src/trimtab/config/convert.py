"""Between OmegaConf, the frozen ``RunSpec``, and the plain dict that ``config.yaml`` holds."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Mapping, TypeVar, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import OmegaConfBaseException

from trimtab.config.schema import item_of, twin, value_of
from trimtab.errors import ConfigError
from trimtab.spec import MethodSpec, RunSpec
from trimtab.spec.launch import SweepSpec

T = TypeVar("T")
OF_SWEEP = tuple(f.name for f in fields(SweepSpec))


def to_spec(config: DictConfig) -> RunSpec:
    """The frozen spec of a composed config, interpolations resolved; what belongs to its sweep is left out."""
    found: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=False)
    return build(RunSpec, {key: value for key, value in found.items() if key not in OF_SWEEP}, "")


def to_sweep_spec(config: DictConfig) -> SweepSpec:
    """What belongs to the sweep in a composed config: ``wait``, ``dry_run``, ``runs_per_job``, ``launch``."""
    found: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=False)
    return build(SweepSpec, {key: found[key] for key in OF_SWEEP}, "")


def to_method(config: DictConfig) -> MethodSpec:
    """The same of a config of the sections ``algo``, ``mis`` and ``loss`` alone."""
    return build(MethodSpec, OmegaConf.to_container(config, resolve=True, enum_to_str=False), "")


def build(frozen: type[T], values: Any, prefix: str) -> T:
    """The frozen class of plain values that has every field of it; ``prefix`` for the words of ConfigError."""
    hints = get_type_hints(frozen)
    names = [f.name for f in fields(frozen)]  # type: ignore[arg-type]
    for name in values:  # Hydra adds with + and deletes with ~ what the schema would refuse
        if name not in names:
            raise ConfigError(f"{prefix}{name} is no option (added with +?); allowed: {', '.join(names)}; leave it out")
    for name in names:
        if name not in values:
            raise ConfigError(f"{prefix}{name} is missing (deleted with ~?); every option has a value; leave ~ out")
    return frozen(**{name: _made(hints[name], values[name], f"{prefix}{name}") for name in names})


def _made(hint: Any, value: Any, key: str) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, f"{key}.")
    if item := item_of(hint):
        return [build(item, one, f"{key}[{i}].") for i, one in enumerate(value)]
    if kind := value_of(hint):
        return {name: build(kind, one, f"{key}.{name}.") for name, one in value.items()}
    return value


def to_dict(spec: RunSpec | SweepSpec) -> dict[str, Any]:
    """A plain dict (enums by name) that YAML and JSON can hold; ``from_dict`` is its inverse."""
    made: dict[str, Any] = _plain(spec)
    return made


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def from_dict(values: Mapping[str, Any]) -> RunSpec:
    """The spec of a plain dict, checked against the schema; keys left out take their defaults."""
    return to_spec(OmegaConf.merge(OmegaConf.structured(twin(RunSpec)), dict(values)))  # type: ignore[arg-type]


def sweep_from_dict(values: Mapping[str, Any]) -> SweepSpec:
    """The sweep's options of a plain dict, as sweep.json holds them; keys left out take their defaults."""
    return to_sweep_spec(OmegaConf.merge(OmegaConf.structured(twin(SweepSpec)), dict(values)))  # type: ignore[arg-type]


def to_yaml(spec: RunSpec) -> str:
    """Text of ``config.yaml``."""
    made = yaml.dump(to_dict(spec), Dumper=_dumper(), default_flow_style=False, allow_unicode=True, sort_keys=False)
    return str(made)


@cache
def _dumper() -> type[yaml.CSafeDumper]:
    """OmegaConf's own (strings that it would read as numbers get quotes), in C: nine times as fast."""
    own = get_omega_conf_dumper()
    made = {"yaml_representers": own.yaml_representers, "yaml_implicit_resolvers": own.yaml_implicit_resolvers}
    return type("Dumper", (yaml.CSafeDumper,), made)


def read_yaml(path: Path) -> RunSpec:
    """The spec that a ``config.yaml`` holds; ConfigError when it is missing or isn't one."""
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
        if not isinstance(loaded, dict):
            raise ConfigError(f"{path} holds a {type(loaded).__name__}; a run's config.yaml holds a mapping of options")
        return from_dict({str(k): v for k, v in loaded.items()})
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {path}; give the config.yaml of a run folder") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path} is no config of a run: {error}") from error
