"""Specs from a few values."""

from __future__ import annotations

from typing import Any

from trimtab.config.keys import with_values
from trimtab.spec import (
    RunSpec,
)


def spec_of(**values: Any) -> RunSpec:
    """A spec with ``section__name=value`` set."""
    return with_values(RunSpec(), {key.replace("__", "."): value for key, value in values.items()})
