"""The groups of conf/ and their choices, read from the folders themselves."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Optional

from omegaconf import OmegaConf

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


NO_METHODS = ("none", "abeja")
"""Presets that say nothing of a method: the default, and set-ups to measure."""


@cache
def recipes() -> tuple[str, ...]:
    """The presets that are whole methods: neither ``NO_METHODS`` nor conventions, which lack a correction."""
    return tuple(name for name in choices("preset") if name not in NO_METHODS and not name.endswith("/conventions"))


@cache
def defaults() -> dict[str, Optional[str]]:
    """The choice that each group has when none is given, in the order of conf/config.yaml."""
    entries = OmegaConf.to_object(OmegaConf.select(OmegaConf.load(CONF / "config.yaml"), "defaults"))
    assert isinstance(entries, list)
    return {k: v for entry in entries if not isinstance(entry, str) for k, v in entry.items()}
