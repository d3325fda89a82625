"""Options of the peers by the names they are typed as."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from trimtab.errors import ConfigError

E = TypeVar("E", bound=Enum)


def member(kind: type[E], option: str, value: object) -> E:
    """The member whose value is ``value``; raises ConfigError for another, with the name of the option."""
    for one in kind:
        if one.value == value:
            return one
    allowed = ", ".join(str(one.value) for one in kind)
    raise ConfigError(f"{option}={value!r} is refused; allowed: {allowed}")
