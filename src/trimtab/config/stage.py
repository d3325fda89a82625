"""What it says that options have no effect: the keys, why, and what they become."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping

from trimtab.config.keys import options
from trimtab.spec import RunSpec


@dataclass(frozen=True)
class Unread:
    """Keys without effect and the reason; each becomes its schema default unless ``values`` says otherwise."""

    reason: str
    keys: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    quiet: bool = False  # not worth a note: the value was read before it was dropped

    def canonical(self) -> dict[str, Any]:
        """The value each key takes."""
        return {key: self.values.get(key, options()[key].default) for key in self.keys}


Stage = Callable[[RunSpec], list[Unread]]


def under(section: str, *names: str) -> tuple[str, ...]:
    """The keys of a section."""
    return tuple(f"{section}.{name}" for name in names)
