"""Dotted keys of a ``RunSpec``: listing, reading and replacing them. ``mis.tis_level`` is the longest kind."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Mapping, Union, get_args, get_origin, get_type_hints

from trimtab.spec import RunSpec
from trimtab.spec.launch import ClusterSpec, LaunchSpec, ResourceSpec, SweepSpec

NAMED: Mapping[str, type] = {"launch.clusters": ClusterSpec, "launch.classes": ResourceSpec}  # below: NAME.FIELD


@dataclass(frozen=True)
class Option:
    """One option: its dotted key, its type without ``Optional``, its default and its line of help."""

    key: str
    type: Any
    optional: bool
    default: Any
    help: str

    @property
    def choices(self) -> tuple[str, ...]:
        """Names of an enum's members, empty for other types."""
        return tuple(self.type.__members__) if isinstance(self.type, type) and issubclass(self.type, Enum) else ()


@cache
def options() -> Mapping[str, Option]:
    """Every option by its dotted key, in the order of ``trimtab.spec``."""
    return {option.key: option for option in _walk(RunSpec, RunSpec(), "")}


@cache
def sweep_options() -> Mapping[str, Option]:
    """Every option of a sweep: what is not a run's, and enters no hash."""
    return {option.key: option for option in _walk(SweepSpec, SweepSpec(), "")}


@cache
def all_options() -> Mapping[str, Option]:
    """What an override may set: the options of a run, and those of its sweep."""
    return {**options(), **sweep_options()}


def option_of(key: str) -> Option | None:
    """The option at a dotted key, fields of a named cluster or class included; None when there is none."""
    node, _, field = key.rpartition(".")
    kind = NAMED.get(node.rpartition(".")[0])
    if kind is None:
        return all_options().get(key)
    found = {option.key: option for option in fields_of(kind)}.get(field)
    return None if found is None else replace(found, key=key)


@cache
def fields_of(item: type) -> tuple[Option, ...]:
    """The options of one item of a list, such as a rule of ``mis.reject``; keys without the list's."""
    return tuple(_walk(item, item(), ""))


@cache
def sections() -> tuple[str, ...]:
    """Names of the nodes that hold options: ``algo``, ``mis``, …"""
    return tuple(f.name for f in fields(RunSpec) if is_dataclass(get_type_hints(RunSpec)[f.name]))


@cache
def all_sections() -> tuple[str, ...]:
    """The same with those of a sweep: ``launch``, ``launch.retries``."""
    nested = (f.name for f in fields(LaunchSpec) if is_dataclass(get_type_hints(LaunchSpec)[f.name]))
    return (*sections(), "launch", *(f"launch.{name}" for name in nested))


def _walk(owner: type, defaults: Any, prefix: str) -> list[Option]:
    hints = get_type_hints(owner)
    found: list[Option] = []
    for f in fields(owner):
        hint, default = hints[f.name], getattr(defaults, f.name)
        if is_dataclass(hint) and isinstance(hint, type):
            found += _walk(hint, default, f"{prefix}{f.name}.")
            continue
        optional = get_origin(hint) in (Union, UnionType)
        kind = next(a for a in get_args(hint) if a is not type(None)) if optional else hint
        found.append(Option(prefix + f.name, kind, optional, default, f.metadata["help"]))
    return found


def value_of(spec: RunSpec, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = spec
    for part in key.split("."):
        value = getattr(value, part)
    return value


def with_values(spec: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """A copy of ``spec`` with the values at the given dotted keys replaced."""
    changed: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if name:
            changed[section] = replace(changed.get(section, getattr(spec, section)), **{name: value})
        else:
            changed[section] = value
    return replace(spec, **changed)


def written(value: Any) -> str:
    """A value as a user types it in an override."""
    match value:
        case Enum():
            return value.name
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.12g}"
        case list() | tuple():
            return "[" + ",".join(written(v) for v in value) + "]"
        case _ if is_dataclass(value):
            given = {f.name: (getattr(value, f.name), f.default) for f in fields(value)}
            return written({name: one for name, (one, default) in given.items() if one != default})
        case dict():
            return "{" + ",".join(f"{k}:{written(v)}" for k, v in value.items()) + "}"
        case _:
            return str(value)
