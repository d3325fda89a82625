"""Who a run is to a tracker that lives outside its folder: a stable id, the sweep it belongs to, a name to read.

The id is the config's hash (seed included) and a hash of the run's place, the names of its sweep and its folder: a run
that is requeued or synced later is the same run, and one setting in two sweeps is two. It is kept in the folder, as
``wandb.json``, so that a folder may be moved or renamed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trimtab.files import write_text

FILE = "wandb.json"
MANIFEST, HYDRA = "sweep.json", "multirun.yaml"  # either marks the folder of a sweep
DEPTH = 3  # folders between a run and its sweep's, hydra.sweep.subdir may have slashes
UNTOLD = ("tracker", "run_dir", "resume", "hydra", "sweep", "launcher")  # overrides that make no method


@dataclass(frozen=True)
class Identity:
    """``id`` of at most 64 characters without ``/``; ``group`` None outside of sweeps; ``name`` for people."""

    id: str
    group: str | None
    name: str


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when it is missing, torn or something else."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def sweep_folder(run_dir: Path) -> Path | None:
    """The folder of the sweep that a run's folder lies in."""
    above = list(run_dir.resolve().parents)[:DEPTH]
    return next((folder for folder in above if (folder / MANIFEST).is_file() or (folder / HYDRA).is_file()), None)


def sweep_of(run_dir: Path) -> str | None:
    """The sweep's name: what its sweep.json says, else its folder's; None outside of sweeps."""
    folder = sweep_folder(run_dir)
    return None if folder is None else str(read_object(folder / MANIFEST).get("sweep") or folder.name)


def read_yaml(path: Path) -> Any:
    """What a YAML file holds; None when it is missing or broken."""
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None


def shared_overrides(sweep: Path | None) -> set[str]:
    """Overrides that every run of a sweep has, as Hydra noted them; what is swept over stands there with its commas."""
    noted = None if sweep is None else read_yaml(sweep / HYDRA)
    hydra = noted.get("hydra") if isinstance(noted, dict) else None
    if not isinstance(hydra, dict):
        return set()
    typed, params = (hydra.get("overrides") or {}).get("task"), (hydra.get("sweeper") or {}).get("params")
    return {*map(str, typed or ()), *(f"{key}={value}" for key, value in (params or {}).items())}


def unescaped(override: str) -> str:
    """Without the backslashes that a sweep's launcher writes before ``:`` and others."""
    return override.replace("\\", "")


def name_of(run_dir: Path, otherwise: str) -> str:
    """The overrides that a person gave, less those that say only where and how and those that all of a sweep share.

    ``otherwise`` when none is left.
    """
    given = read_yaml(run_dir / "overrides.yaml")
    texts = [unescaped(str(item)) for item in given] if isinstance(given, list) else []
    told = [text for text in texts if text.lstrip("+").split("=")[0].split(".")[0] not in UNTOLD]
    shared = set(map(unescaped, shared_overrides(sweep_folder(run_dir))))
    own = [text for text in told if text not in shared] or told
    return " ".join(text.lstrip("+") for text in own) or otherwise


def identify(run_dir: Path, config_hash: str, otherwise: str, group: str | None) -> Identity:
    """Who the run in ``run_dir`` is; ``group``: as asked for, instead of the sweep's name."""
    sweep = sweep_of(run_dir)
    place = hashlib.sha256(f"{sweep or ''}/{run_dir.resolve().name}".encode()).hexdigest()[:6]
    known = recall(run_dir)
    kept = known.get("id") if known.get("config_hash") == config_hash else None
    return Identity(str(kept or f"{config_hash}-{place}"), group or sweep, name_of(run_dir, otherwise))


def recall(run_dir: Path) -> dict[str, Any]:
    """What ``remember`` kept."""
    return read_object(run_dir / FILE)


def remember(run_dir: Path, facts: Mapping[str, Any]) -> None:
    """Keep ``facts`` beside the run, over what was kept before."""
    write_text(run_dir / FILE, json.dumps({**recall(run_dir), **facts}, indent=1) + "\n")
