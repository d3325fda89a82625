"""What a user set and nothing reads, said in a line each."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from trimtab.config.groups import choices
from trimtab.config.keys import options, value_of, with_values, written
from trimtab.config.methods import SECTIONS, composed
from trimtab.config.unread import STAGES
from trimtab.spec import RunSpec


def ignored(spec: RunSpec, overrides: Sequence[str] = ()) -> list[str]:
    """One line for each reason why keys that are set away from their default have no effect.

    What the preset among ``overrides`` sets is not the user's: a system's conventions may be of no use to its recipe.
    """
    lines, preset = list[str](), _preset_values(overrides)
    for stage in STAGES:
        for unread in stage(spec):
            canonical = unread.canonical()
            lost = [
                f"{key}={written(value_of(spec, key))}"
                for key in unread.keys
                if value_of(spec, key) not in (options()[key].default, canonical[key], *preset.get(key, ()))
            ]
            if lost and not unread.quiet:
                lines.append(f"{unread.reason}: {', '.join(lost)} {'has' if len(lost) == 1 else 'have'} no effect")
            spec = with_values(spec, canonical)
    return lines


def _preset_values(overrides: Sequence[str]) -> Mapping[str, tuple[Any]]:
    """The values of algo, mis and loss that the chosen preset alone gives, each as a tuple of one."""
    chosen = [text.partition("=")[2] for text in overrides if text.startswith("preset=")]
    if not chosen or chosen[-1] not in choices("preset"):
        return {}
    config = composed(chosen[-1])
    return {f"{section}.{name}": (value,) for section in SECTIONS for name, value in config[section].items()}
