"""Hydra's schema: a mutable twin of every frozen class of ``trimtab.spec``, so that each option has one home."""

from __future__ import annotations

from dataclasses import Field, field, fields, is_dataclass, make_dataclass
from functools import cache, partial
from typing import Any, Dict, List, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore

from trimtab.spec import RunSpec
from trimtab.spec.launch import SweepSpec


@cache
def twin(frozen: type) -> type:
    """A mutable dataclass with the fields, types and defaults of ``frozen``, nested classes included."""
    hints = get_type_hints(frozen)
    return make_dataclass(frozen.__name__, [_field(f, hints[f.name]) for f in fields(frozen)])


def _field(source: Field[Any], hint: Any) -> tuple[str, Any, Any]:
    if is_dataclass(hint) and isinstance(hint, type):
        mirrored = twin(hint)
        return source.name, mirrored, field(default_factory=mirrored)
    if item := item_of(hint):
        hint = List[twin(item)]  # type: ignore[misc]
    elif value := value_of(hint):
        return source.name, Dict[str, twin(value)], field(default_factory=partial(_mirrored, source, twin(value)))  # type: ignore[misc]
    copied: Any = field(default=source.default, default_factory=source.default_factory)
    return source.name, hint, copied


def _mirrored(source: Field[Any], mirrored: type) -> dict[str, Any]:
    """The default of a dict of flat classes, as their twins."""
    assert callable(source.default_factory)
    return {name: mirrored(**vars(value)) for name, value in source.default_factory().items()}


def item_of(hint: Any) -> type | None:
    """The frozen class that a list's items are of, if they are."""
    items = get_args(hint) if get_origin(hint) is list else ()
    return next((item for item in items if isinstance(item, type) and is_dataclass(item)), None)


def value_of(hint: Any) -> type | None:
    """The frozen class that a dict's values are of, if they are."""
    values = get_args(hint)[1:] if get_origin(hint) is dict else ()
    return next((value for value in values if isinstance(value, type) and is_dataclass(value)), None)


@cache
def everything() -> type:
    """What an override may set: the options of a run and those of its sweep, side by side."""
    return make_dataclass(
        "Options", [_field(f, get_type_hints(kind)[f.name]) for kind in (RunSpec, SweepSpec) for f in fields(kind)]
    )


def register() -> None:
    """Store the schema under the name ``schema``, the first entry of conf/config.yaml's defaults."""
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:  # storing takes 40 ms
        store.store(name="schema", node=everything())
