"""How an option is declared: its default and its line of help."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def opt(default: Any, help: str) -> Any:
    """A dataclass field with its help line; a list or dict default is copied per instance."""
    meta = {"help": help}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    if isinstance(default, type):
        return field(default_factory=default, metadata=meta)
    return field(default=default, metadata=meta)
