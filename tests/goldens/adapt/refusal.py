"""Whether two refusals are of one option."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from adapt.shared import Case

NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*")


def same_option(case: Case, reason: str) -> bool:
    """Whether trimtab's reason names an option that the case's message names, or if it names none, its config.

    A case may have a shorter name for an option than its system (``clip_min`` for
    ``vllm_importance_sampling_clip_min``).
    """
    options = set(_keys(case.config))
    message = str(case.outputs.get("message_contains") or "")
    meant = {option for option in options | _underscored(message) if option in message.split() or option in message}
    meant = {option for option in meant if "_" in option} or options
    named = set(NAME.findall(reason))
    return any(word == option or word.endswith(f"_{option}") for word in named for option in meant)


def _underscored(message: str) -> set[str]:
    return {word for word in NAME.findall(message) if "_" in word}


def _keys(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        yield key
        if isinstance(value, Mapping):
            yield from _keys(value)
