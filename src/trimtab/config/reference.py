"""docs/options.md, rendered from ``trimtab.spec``: ``python -m trimtab.config.reference > docs/options.md``."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any, Mapping

from trimtab.config.keys import Option, fields_of, options, sweep_options, written
from trimtab.config.ranges import RANGES
from trimtab.spec import RejectSpec
from trimtab.spec.launch import ClusterSpec, ResourceSpec, RuleSpec

HEAD = """\
# Options

Made from `src/trimtab/spec/` by `python -m trimtab.config.reference > docs/options.md`; don't edit.

Each is typed as `KEY=VALUE` behind `python -m run`. An empty default means: none, or resolved from other options
(`python -m run --cfg job` prints what was typed, `config.yaml` of a run what it resolved to). What an option means for
a method stands in [methods.md](methods.md), the choices of groups in `python -m run --help`.
"""
SWEEP = """\
# Options of a sweep

Read with `-m` alone; none of them changes what a run computes. A new cluster or class is added with `+`
(`+launch.clusters.mine.partition=gpu`). None may be swept; `launch.rules` say which runs take which class.
"""


def page() -> str:
    """The whole page: one table a section, one row an option."""
    tables = [*_tables(options(), "run"), _section("one rule of mis.reject", [*fields_of(RejectSpec)])]
    items = {"one cluster: launch.clusters.NAME": ClusterSpec, "one class: launch.classes.NAME": ResourceSpec,
             "one rule of launch.rules": RuleSpec}  # fmt: skip
    tables += [SWEEP, *_tables(sweep_options(), "sweep")]
    tables += [_section(name, [*fields_of(kind)]) for name, kind in items.items()]
    return "\n".join([HEAD, *tables])


def _tables(found: Mapping[str, Option], top: str) -> list[str]:
    sections = groupby(found.values(), key=lambda option: option.key.rpartition(".")[0])
    return [_section(name or top, list(group)) for name, group in sections]


def _section(name: str, found: list[Option]) -> str:
    head = [f"## {name}", "", "| option | default | takes | what it is |", "|---|---|---|---|"]
    return "\n".join([*head, *map(_row, found), ""])


def _row(option: Option) -> str:
    default = "" if option.default in (None, "") else f"`{written(option.default)}`"
    cells = (f"`{option.key}`", default, _takes(option), option.help.replace("<", "\\<"))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _takes(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    kinds = {bool: "true, false", int: "integer", float: "number", str: "text"}
    if option.type is Any:
        return "`all`, a preset, or a list of presets"
    kind = kinds.get(option.type, "list" if "List" in str(option.type) else "mapping")
    allowed = RANGES.get(option.key)
    return kind if allowed is None or math.isinf(allowed.low) else f"{kind} {allowed}"


if __name__ == "__main__":
    print(page(), end="")
