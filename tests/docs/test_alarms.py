"""docs/alarms.md against the code's table."""

from __future__ import annotations

import re
from pathlib import Path

from trimtab.config import reference
from trimtab.train import thresholds as at
from trimtab.train.alarms import Kind, tool

PAGE = (Path(reference.__file__).parents[3] / "docs" / "alarms.md").read_text()


def test_every_alarm_is_on_the_page_with_the_tool_to_run() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| `trimtab (\w+)` \|$", PAGE, re.MULTILINE)
    assert rows == [(kind.value, tool(kind)) for kind in Kind]


def test_the_levels_are_those_of_the_code() -> None:
    table = {"float32": at.FLOAT32, "float16": at.FLOAT16, "bfloat16": at.BFLOAT16, "moved": at.MOVED}
    for name, bounds in table.items():
        assert f"| {name} | {bounds.kl:g} | {bounds.abs_diff:g} | {bounds.far:g} |" in PAGE


def test_the_rules_are_those_of_the_code() -> None:
    assert f"in {at.NEEDED} of the last\n{at.WINDOW} steps" in PAGE
    for text in (
        f"|Δp\\| > {at.FAR_APART:g}", f"more than {at.SIGMAS:g} standard errors", f"three times {at.TREND // 3} steps",
        f"to {at.GROWTH_KL:g} times the first", f"to {at.GROWTH_ABS:g} times", f"below {at.ESS_LEVEL:g} often",
        f"over the {at.ESS_MEMORY} steps before (once there are {at.ESS_LEAST})", f"in {at.LATE} of the last",
    ):  # fmt: skip
        assert text in PAGE, text
    assert (at.FLOOR, at.FLOOR_MOVED, at.ESS_DROP, at.STUCK) == (0.1, 0.5, 0.5, 0.1)
