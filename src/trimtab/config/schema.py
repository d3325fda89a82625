"""Hydra's schema: a mutable twin of every frozen class of ``trimtab.spec``, so that each option has one home."""

from __future__ import annotations

from dataclasses import Field, field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Any, List, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore

from trimtab.spec import RunSpec


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
    copied: Any = field(default=source.default, default_factory=source.default_factory)
    return source.name, hint, copied


def item_of(hint: Any) -> type | None:
    """The frozen class that a list's items are of, if they are."""
    items = get_args(hint) if get_origin(hint) is list else ()
    return next((item for item in items if isinstance(item, type) and is_dataclass(item)), None)


def register() -> None:
    """Store the schema under the name ``schema``, the first entry of conf/config.yaml's defaults."""
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:  # storing takes 40 ms
        store.store(name="schema", node=twin(RunSpec))
