"""What a user should know of a config that is allowed: keys that nothing reads, bounds that can hardly be meant."""

from __future__ import annotations

from collections import Counter
from typing import Any, Mapping, Sequence

from trimtab.config.groups import choices
from trimtab.config.keys import options, value_of, with_values, written
from trimtab.config.methods import SECTIONS, composed
from trimtab.config.unread import STAGES
from trimtab.spec import Level, RunSpec, TisMode


def notes(given: RunSpec, resolved: RunSpec, overrides: Sequence[str] = ()) -> list[str]:
    """Everything worth a line before a run starts."""
    return [*ignored(given, overrides), *doubtful(resolved)]


def notes_of_many(runs: Sequence[tuple[RunSpec, RunSpec, Sequence[str]]]) -> list[str]:
    """The same for a sweep: each thing once, with how many combinations it concerns. Runs as ``notes`` takes them."""
    unread, others = Counter[tuple[str, str]](), Counter[str]()
    for given, resolved, overrides in runs:
        unread.update((reason, key) for reason, keys in _lost(given, overrides) for key in keys)
        others.update(doubtful(resolved))
    together: dict[tuple[str, int], list[str]] = {}  # keys that go for one reason in equally many combinations
    for (reason, key), times in unread.items():
        together.setdefault((reason, times), []).append(key)
    lines = [
        f"{', '.join(keys)} {_have(keys)} no effect in {_share(times, len(runs))}: {reason}"
        for (reason, times), keys in together.items()
    ]
    return lines + [f"in {_share(times, len(runs))}: {line}" for line, times in others.items()]


def _share(times: int, of: int) -> str:
    return f"{times} of {of} combinations" if times < of else f"all {of} combinations" if of > 1 else "the run"


def _have(keys: Sequence[str]) -> str:
    return "has" if len(keys) == 1 else "have"


def ignored(spec: RunSpec, overrides: Sequence[str] = ()) -> list[str]:
    """One line for each reason why keys that are set away from their default have no effect.

    What the preset among ``overrides`` sets is not the user's: a system's conventions may be of no use to its recipe.
    """
    return [
        f"{reason}: {', '.join(f'{key}={value}' for key, value in lost.items())} {_have([*lost])} no effect"
        for reason, lost in _lost(spec, overrides)
    ]


def _lost(spec: RunSpec, overrides: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """The reasons and, for each, the keys without effect with the values that they lose."""
    found, preset = list[tuple[str, dict[str, str]]](), _preset_values(overrides)
    for stage in STAGES:
        for unread in stage(spec):
            canonical = unread.canonical()
            lost = {
                key: written(value_of(spec, key))
                for key in unread.keys
                if value_of(spec, key) not in (options()[key].default, canonical[key], *preset.get(key, ()))
            }
            if lost and not unread.quiet:
                found.append((unread.reason, lost))
            spec = with_values(spec, canonical)
    return found


def doubtful(spec: RunSpec) -> list[str]:
    """One line for bounds in force that can hardly be meant, such as a token's at the geometric level.

    A geometric mean over a response stays within a few thousandths of 1, a token's ratio does not.
    """
    mis, lines = spec.mis, list[str]()
    weights = mis.tis_mode not in (TisMode.off, TisMode.unbounded)
    stages = (
        ("tis", weights, mis.tis_level, mis.tis_lower_bound, mis.tis_upper_bound),
        ("rs", mis.use_rs, mis.rs_level, mis.rs_lower_bound, mis.rs_upper_bound),
    )
    for stage, used, level, lower, upper in stages:
        if not used or upper is None:
            continue
        bounds = f"mis.{stage}_lower_bound={written(lower)} mis.{stage}_upper_bound={written(upper)}"
        if level is Level.geometric and upper > 1.1:
            lines.append(f"{bounds} at level={level.name} hardly ever bite: a mean over a response stays within a few "
                         f"thousandths of 1; empty them (null) for 0.999 to 1.001")  # fmt: skip
        if level is not Level.geometric and upper < 1.02:
            lines.append(f"{bounds} at level={level.name} concern nearly everything: they suit level=geometric; "
                         f"empty them (null) for 0.5 to 2")  # fmt: skip
    return lines


def _preset_values(overrides: Sequence[str]) -> Mapping[str, tuple[Any]]:
    """The values of algo, mis and loss that the chosen preset alone gives, each as a tuple of one."""
    chosen = [text.partition("=")[2] for text in overrides if text.startswith("preset=")]
    if not chosen or chosen[-1] not in choices("preset"):
        return {}
    config = composed(chosen[-1])
    return {f"{section}.{name}": (value,) for section in SECTIONS for name, value in config[section].items()}
