"""A run's config as trackers take it: plain values, and flat keys for what runs are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """``value`` with enums as their values and paths as text, all through."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The nested config, with the settings that runs are compared by as scalars on top: W&B cannot filter nested keys.

    ``algo tis_mode level rs veto seed``. The group ``algo`` gives its name to the scalar; its other options
    become ``algo_<option>``.
    """
    nested = plain(config)
    algo, mis = nested.get("algo", {}), nested.get("mis", {})
    veto = mis.get("rs_veto_threshold")
    flat = {
        **{f"algo_{key}": value for key, value in algo.items() if key != "name"},
        "algo": algo.get("name"),
        "tis_mode": mis.get("tis_mode"),
        "level": mis.get("tis_level"),
        "rs": mis.get("rs_level") if mis.get("use_rs") else "none",
        "veto": veto if veto is not None else "none",
        "seed": nested.get("seed"),
    }
    return {**nested, **flat}
