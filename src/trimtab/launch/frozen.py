"""Reads a run's frozen config without OmegaConf and Hydra, whose imports take longer than the rest of a job's start.

The text is the one that was written when the sweep was started, by its digest; values have then been checked already.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from trimtab.spec import RunSpec


class _Unlike(Exception):
    """A value is not just what its option's type says."""


def digest(text: str) -> str:
    """What tells whether a frozen config is as it was written."""
    return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path, expected: str) -> RunSpec | None:
    """The spec that lies there; None when the text is another one, or needs the schema to be understood."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data).hexdigest() != expected:
        return None
    try:
        made: RunSpec = _made(RunSpec, yaml.load(data, yaml.CSafeLoader))
    except (_Unlike, yaml.YAMLError):
        return None
    return made


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _made(hint: Any, value: Any) -> Any:
    items = get_args(hint)
    match get_origin(hint):
        case origin if origin is Union or origin is UnionType:
            kinds = [item for item in items if item is not NoneType]
            if value is None and len(kinds) < len(items):
                return None
            if len(kinds) == 1:
                return _made(kinds[0], value)
        case origin if origin is list and isinstance(value, list):
            return [_made(items[0], one) for one in value]
        case origin if origin is dict and isinstance(value, dict):
            return {_made(items[0], key): _made(items[1], one) for key, one in value.items()}
        case None if hint is Any:
            return value
        case None if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
            if value.keys() == {field.name for field in fields(hint)}:
                return hint(**{name: _made(_hints(hint)[name], one) for name, one in value.items()})
        case None if isinstance(hint, type) and issubclass(hint, Enum):
            if isinstance(value, str) and value in hint.__members__:
                return hint[value]
        case None if type(value) is hint:
            return value
    raise _Unlike
