"""The groups of conf/ and their choices, read from the folders themselves."""

from __future__ import annotations

from functools import cache
from pathlib import Path

CONF = Path(__file__).resolve().parents[3] / "conf"


@cache
def group_names() -> tuple[str, ...]:
    """``algo``, ``tis_mode``, …: every folder of conf/ but Hydra's own."""
    return tuple(sorted(p.name for p in CONF.iterdir() if p.is_dir() and p.name != "hydra"))


@cache
def choices(group: str) -> tuple[str, ...]:
    """What ``group=`` takes, nested choices as ``miles/default``."""
    folder = CONF / group
    found = (p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yaml"))
    return tuple(sorted(found, key=lambda name: ("/" in name, name)))
