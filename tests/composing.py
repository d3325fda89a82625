"""``compose`` in a tenth of its time, for tests not about composing; tests/config/test_many.py has them equal."""

from __future__ import annotations

from functools import cache

from trimtab.config import compose_many
from trimtab.errors import ConfigError
from trimtab.spec import RunSpec


@cache
def composed(*overrides: str) -> RunSpec:
    """The spec of these overrides; a ConfigError where they are refused."""
    (spec,) = compose_many([overrides])
    if isinstance(spec, ConfigError):
        raise spec
    return spec
