"""The yaml files of conf/ as layers, in the order in which Hydra would merge them; read once, without Hydra.

The files chosen are those of the overrides, of the ``override`` entries of chosen files, and of conf/config.yaml, in
that order. What a file includes comes before its own values. A file that does anything else is not ``plain``: Hydra
must be asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Iterator, Mapping, Optional

import yaml
from yaml import CSafeLoader

from trimtab.config.groups import CONF, choices, defaults, group_names

PACKAGE = "# @package"
GLOBAL = "_global_"
FOREIGN = "hydra"  # values and groups of Hydra's own, which no option reads


@dataclass(frozen=True)
class Layer:
    """One yaml file: what it includes, which groups' choices it overrides, and its values under their sections."""

    name: str
    includes: tuple[str, ...]
    overrides: Mapping[str, str]
    values: Mapping[str, Any]
    plain: bool = True


@cache
def layer(group: str, name: str) -> Layer:
    """A choice's file: its ``defaults`` taken apart, its values put under its package."""
    text = (CONF / group / f"{name}.yaml").read_text()
    head, _, _ = text.partition("\n")
    package = head.removeprefix(PACKAGE).strip() if head.startswith(PACKAGE) else group
    loaded = yaml.load(text, CSafeLoader) or {}  # OmegaConf's own loader is ten times slower
    entries = loaded.pop("defaults", [])
    chosen = {key: value for entry in entries if isinstance(entry, dict) for key, value in entry.items()}
    includes = tuple(entry for entry in entries if isinstance(entry, str))
    plain = (
        all(key.startswith("override /") and "@" not in key and isinstance(value, str) for key, value in chosen.items())
        and all(_is_choice(path) for path in includes)
        and "." not in package
        and "???" not in text
    )
    return Layer(
        name=f"{group}/{name}",
        includes=includes,
        overrides={key.removeprefix("override /"): str(value) for key, value in chosen.items()},
        values=loaded if package == GLOBAL else {package: loaded},
        plain=plain,
    )


def _is_choice(path: str) -> bool:
    """``/preset/verl/conventions``, of a file that says itself where its values go."""
    group, _, name = path.removeprefix("/").partition("/")
    known = path.startswith("/") and group in defaults() and name in choices(group)
    return known and (CONF / group / f"{name}.yaml").read_text().startswith(f"{PACKAGE} {GLOBAL}\n")


def with_included(one: Layer) -> Iterator[Layer]:
    """What the file includes, and then itself."""
    for path in one.includes:
        group, _, name = path.removeprefix("/").partition("/")
        yield from with_included(layer(group, name))
    yield one


def chosen_layers(given: Mapping[str, str]) -> Optional[list[Layer]]:
    """All layers over the schema for the choices on a command line, None when one of them is not plain."""
    if not _config_is_plain():
        return None
    wanted, found = dict(given), list[list[Layer]]()
    passed = set[str]()
    for group in reversed(
        [group for group in defaults() if group in group_names()]
    ):  # as Hydra does: who comes later chooses for those before
        passed.add(group)
        name = wanted.get(group, defaults()[group])
        if name is None:
            continue
        mine = list(with_included(layer(group, name)))
        for one in reversed(mine):
            if not one.plain or passed & one.overrides.keys():
                return None
            wanted = {**one.overrides, **wanted}
        found.append(mine)
    return [one for mine in reversed(found) for one in mine]


@cache
def _config_is_plain() -> bool:
    """Whether conf/config.yaml itself sets no option: groups and what is Hydra's."""
    text = (CONF / "config.yaml").read_text()
    return set(yaml.load(text, CSafeLoader)) <= {"defaults", FOREIGN}
