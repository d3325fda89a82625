"""Many combinations composed at once, without Hydra: a thousand of them take less time than fifty of its compositions.

The yaml layers of the chosen groups are put over the schema's values and the overrides over them, as plain
dictionaries; sections made of the same pieces are made once. Whatever is unusual (an interpolation, a deletion, a dict,
a group from elsewhere) goes to Hydra itself. tests/config/test_many.py compares the two on random combinations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Any, Mapping, Optional, Sequence, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from trimtab.config.compose import compose, compose_config, prepare
from trimtab.config.convert import OF_SWEEP, build, to_spec
from trimtab.config.explain import COMPOSE_ERRORS, explain, judge
from trimtab.config.groups import choices, group_names
from trimtab.config.keys import options, sections, sweep_options
from trimtab.config.layers import FOREIGN, Layer, chosen_layers
from trimtab.config.resolve import resolve
from trimtab.config.rules import check
from trimtab.config.schema import everything, twin
from trimtab.errors import ConfigError
from trimtab.spec import RunSpec

REFERENCE = re.compile(r"\$\{(\w+)\.(\w+)\}")
FREE = "task.options."  # names below it are the user's own, and are added with +


@dataclass(frozen=True)
class Piece:
    """A plain override: a group's choice, or values by (section, key); section "" for options at the top."""

    text: str
    key: str
    choice: str = ""
    section: str = ""
    name: str = ""
    value: Any = None
    added: bool = False


@dataclass(frozen=True)
class Composed:
    """A spec as it was given, and resolved: keys that nothing reads have lost their values there."""

    given: RunSpec
    resolved: RunSpec


def compose_many(runs: Sequence[Sequence[str]]) -> list[RunSpec | ConfigError]:
    """What ``compose`` returns or raises for each list of overrides, in the same words."""
    return [one.resolved if isinstance(one, Composed) else one for one in compose_all(runs)]


def compose_all(runs: Sequence[Sequence[str]]) -> list[Composed | ConfigError]:
    """The same, with each spec as it was given."""
    return [_compose_one(list(overrides)) for overrides in runs]


def _compose_one(overrides: list[str]) -> Composed | ConfigError:
    pieces = [_piece(text) for text in overrides]
    bad = [text for text, piece in zip(overrides, pieces, strict=True) if piece is None]
    try:
        if bad and all(_fails_alone(text) for text in bad):
            return ConfigError(explain(ValueError(), overrides))
        spec = None if bad else _spec([piece for piece in pieces if piece is not None])
        if spec is None:
            config = compose_config(overrides)
            resolved = prepare(config, overrides)
            return Composed(to_spec(config), resolved)
        check(spec)
        return Composed(spec, resolve(spec))
    except ConfigError as error:
        return error


def _spec(pieces: Sequence[Piece]) -> Optional[RunSpec]:
    """The spec of plain overrides; None when Hydra must be asked."""
    if len({piece.key for piece in pieces}) < len(pieces):
        return None
    found = _layers(tuple(sorted((piece.key, piece.choice) for piece in pieces if piece.choice)))
    if found is None:
        return None
    parts: dict[str, list[Piece]] = {}
    for piece in pieces:
        if not piece.choice:
            parts.setdefault(piece.section, []).append(piece)
    made = _section("", found, tuple(piece.text for piece in parts.get("", ())))
    for section in sections():
        values = _section(section, found, tuple(piece.text for piece in parts.get(section, ())))
        if values is None or made is None:
            return None
        made = made | {section: values}
    return None if made is None else RunSpec(**made)


@cache
def _layers(given: tuple[tuple[str, str], ...]) -> Optional[Mapping[str, tuple[str, ...]]]:
    """For each section the layers with values for it, in order, by the names that ``_values`` knows."""
    layers = chosen_layers(dict(given))
    if layers is None:
        return None
    found: dict[str, tuple[str, ...]] = {}
    for one in layers:
        values = _values(one.name, one)
        if values is None:
            return None
        for section in values:
            found[section] = (*found.get(section, ()), one.name)
    return found


LAYERS: dict[str, Optional[Mapping[str, Mapping[str, Any]]]] = {}


def _values(name: str, layer: Layer) -> Optional[Mapping[str, Mapping[str, Any]]]:
    """A layer's values as the schema takes them, by section; None when they are not plain."""
    if name not in LAYERS:
        LAYERS[name] = _typed({k: v for k, v in layer.values.items() if k not in (FOREIGN, *OF_SWEEP)})
    return LAYERS[name]


def _typed(values: Mapping[str, Any]) -> Optional[Mapping[str, Mapping[str, Any]]]:
    found: dict[str, dict[str, Any]] = {}
    for key, given in values.items():
        if key in sections():
            if not isinstance(given, dict) or not all(_may_stand(key, *item) for item in given.items()):
                return None
            found[key] = given
        elif key in options() and _may_stand("", key, given):
            found.setdefault("", {})[key] = given
        else:
            return None
    try:
        given = {section: values for section, values in found.items() if section} | found.get("", {})
        merged = OmegaConf.merge(_schema(), given)
    except COMPOSE_ERRORS:
        return None
    plain: Any = OmegaConf.to_container(merged, enum_to_str=False)
    return {
        section: {key: (plain[section] if section else plain)[key] for key in given} for section, given in found.items()
    }


def _may_stand(section: str, name: str, value: Any) -> bool:
    """Whether a file's value is plain: no dict, and no reference but to an option of one type in the same section."""
    if isinstance(value, str) and "${" in value:
        here, there = options().get(f"{section}.{name}"), options().get(f"{section}.{_referred(section, value)}")
        return here is not None and there is not None and here.type is there.type
    return not isinstance(value, dict) and "${" not in str(value)


def _referred(section: str, value: Any) -> Optional[str]:
    """``key`` of the text ``${section.key}``."""
    found = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return found[2] if found and found[1] == section else None


@cache
def _schema() -> DictConfig:
    made: DictConfig = OmegaConf.structured(everything())
    return made


@cache
def _defaults() -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(_schema(), enum_to_str=False)
    return {key: value for key, value in plain.items() if key not in OF_SWEEP}


MADE: dict[tuple[str, tuple[str, ...], tuple[str, ...]], Any] = {}


def _section(section: str, layers: Mapping[str, tuple[str, ...]], overrides: tuple[str, ...]) -> Any:
    """One section, frozen; for "" the options at the top. None when Hydra must be asked."""
    key = (section, layers.get(section, ()), overrides)
    if key not in MADE:
        MADE[key] = _make(*key)
    made = MADE[key]
    return dict(made) if isinstance(made, dict) else made


def _make(section: str, layers: Sequence[str], overrides: Sequence[str]) -> Any:
    values = dict(_defaults()[section]) if section else {k: v for k, v in _defaults().items() if k not in sections()}
    for name in layers:
        known = LAYERS[name]
        assert known is not None
        values.update(known[section])
    for text in overrides:
        piece = _piece(text)
        assert piece is not None
        if not piece.added:
            values[piece.name] = piece.value
        elif piece.name in values["options"]:
            return None  # Hydra's words for what is there already
        else:
            values["options"] = {**values["options"], piece.name: piece.value}
    if not section:
        return values
    for name in [name for name, value in values.items() if _referred(section, value)]:
        values[name] = values[str(_referred(section, values[name]))]
        if _referred(section, values[name]):
            return None  # a chain of references
    kind = get_type_hints(RunSpec)[section]
    assert is_dataclass(kind) and isinstance(kind, type)
    return build(kind, values, f"{section}.")


# -- overrides -------------------------------------------------------------------------------------------------------


@cache
def _piece(text: str) -> Optional[Piece]:
    """The override, taken apart; None for one that is not plain, or not right."""
    if _refers(text):
        return None
    override = _parsed(text)
    if override is None or override.package is not None or override.is_sweep_override():
        return None
    key, value = override.key_or_group, override.value()
    if override.is_delete() or override.is_force_add():
        return None
    if override.is_add():
        return _added(text, key, value)
    if key in group_names():
        return Piece(text, key, str(value)) if isinstance(value, str) and value in choices(key) else None
    section, _, name = key.rpartition(".")
    if key in sweep_options():
        return None if converted(key, value) is None else Piece(text, key, section="launch")
    if key not in options() or not _is_plain(value, key):
        return None
    found = converted(key, value)
    return None if found is None else Piece(text, key, section=section, name=name, value=found[0])


def _parsed(text: str) -> Optional[Override]:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def _added(text: str, key: str, value: Any) -> Optional[Piece]:
    name = key.removeprefix(FREE)
    if name == key or "." in name or not _is_plain(value, key):
        return None
    return Piece(text, key, section="task", name=name, value=value, added=True)


def _is_plain(value: Any, key: str) -> bool:
    """Scalars and lists of them; rules of ``mis.reject`` are dicts that the schema completes."""
    if isinstance(value, list):
        return all(_is_plain(one, "") or (key == "mis.reject" and isinstance(one, dict)) for one in value)
    if isinstance(value, str):
        return not _refers(value)  # a sweep hands its texts on escaped: the text itself may not show it
    return value is None or isinstance(value, (bool, int, float))


def _refers(text: str) -> bool:
    """Whether it looks up something else, or is OmegaConf's word for a missing value."""
    return "${" in text or "???" in text


def converted(key: str, value: Any) -> Optional[tuple[Any]]:
    """The value as the schema takes it, in a tuple; None when it doesn't."""
    section, _, name = key.rpartition(".")
    below = section in sections() or key in _top()  # a copy of that instead of everything takes a tenth of the time
    config = (_schema() if not below else _schema()[section] if section else _top()).copy()
    try:
        OmegaConf.update(config, name if below else key, value, merge=True)
    except COMPOSE_ERRORS:
        return None
    plain: Any = OmegaConf.to_container(config, enum_to_str=False)
    for part in [name] if below else key.split("."):
        plain = plain[part]
    return (plain,)


@cache
def _top() -> DictConfig:
    """The schema of a run's options that stand in no section."""
    found = [f for f in fields(twin(RunSpec)) if f.name not in sections()]
    kept: list[Any] = [(f.name, f.type, field(default=f.default, default_factory=f.default_factory)) for f in found]
    made: DictConfig = OmegaConf.structured(make_dataclass("Top", kept))
    return made


@cache
def _fails_alone(text: str) -> bool:
    """Whether Hydra refuses the override whatever stands beside it, for a reason that the override itself shows."""
    if not judge(text):
        return False
    override = _parsed(text)
    if override is not None and override.is_delete():
        return False
    try:
        compose([text])
    except ConfigError as error:
        return str(error) == "\n".join(judge(text))
    return False
