"""Run folders below a folder, and the runs that its sweep.json expects but that are not there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.report.model import Run, RunState
from trimtab.report.sources.rows import injected_of, planned_of, seed_of

MANIFEST = "sweep.json"
MARKS = ("metrics.jsonl", "status.json")  # a folder that holds one of them is a run's
CONFIG = "config.yaml"  # one that holds this alone is that of a run that logged nothing, unless there are runs below


@dataclass
class Found:
    """What lies below a folder: run folders, offline files of W&B outside of them, manifests of sweeps."""

    folders: list[Path] = field(default_factory=list)
    offline: list[Path] = field(default_factory=list)
    manifests: list[Path] = field(default_factory=list)
    looked: int = 0


def search(below: Path) -> Found:
    """Walk through ``below``, in order of names with numbers as numbers; run folders are not entered."""
    found, bare = Found(), list[Path]()
    for place, folders, files in os.walk(below):
        found.looked += 1
        here = Path(place)
        if MANIFEST in files:
            found.manifests.append(here / MANIFEST)
        if any(mark in files for mark in MARKS):
            found.folders.append(here)
            folders.clear()  # its W&B files hold the same run again
            continue
        if CONFIG in files and _is_run(here / CONFIG):
            bare.append(here)
            found.folders.append(here)
        found.offline += [here / name for name in sorted(files) if name.endswith(".wandb")]
        folders.sort(key=natural)
    places = [*found.folders, *found.offline, *found.manifests]
    not_runs = {here for here in bare if any(place != here and here in place.parents for place in places)}
    found.folders = [folder for folder in found.folders if folder not in not_runs]
    return found


def _is_run(config: Path) -> bool:
    """Whether a config.yaml alone is that of a run: as a run writes it, with its seed or folder and without defaults.

    Hydra's and W&B's own copies lie in folders that are none.
    """
    if config.parent.name.startswith(".") or config.parent.name == "files":
        return False
    try:
        keys = {line.partition(":")[0] for line in config.read_text(errors="replace").splitlines()}
    except OSError:
        return False
    return bool(keys & {"seed", "run_dir"}) and not keys & {"defaults", "hydra"}


def natural(name: str) -> tuple[int, int, str]:
    """Sorts ``2`` before ``10``."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def missing(manifest: Path, runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs that ``manifest`` expects and that have no folder, and what is wrong with the manifest itself.

    A missing run gets the config of one that was started with the same overrides but for the seed; without such a one,
    the overrides are all that is known.
    """
    try:
        content = json.loads(manifest.read_bytes())
        entries = [entry for entry in content["runs"] if isinstance(entry["dir"], str)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [], [f"{manifest} cannot be read ({type(error).__name__}: {error}): missing runs are not known"]
    there = {run.path.resolve(): run for run in runs if run.path is not None}
    known: dict[tuple[str, ...], Run] = {}
    for entry in entries:
        run = there.get((manifest.parent / entry["dir"]).resolve())
        if run is not None:
            known.setdefault(_but_seed(entry), run)
    return [
        _absent(entry, manifest.parent / entry["dir"], known.get(_but_seed(entry)))
        for entry in entries
        if (manifest.parent / entry["dir"]).resolve() not in there
    ], []


def _but_seed(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(str(item) for item in entry.get("overrides", ()) if not str(item).startswith("seed=")))


def _absent(entry: Mapping[str, Any], path: Path, sibling: Run | None) -> Run:
    given = dict(str(item).lstrip("+").partition("=")[::2] for item in entry.get("overrides", ()))
    config: Mapping[str, Any] = given if sibling is None else sibling.config
    seed = entry.get("seed")
    seed = seed if isinstance(seed, int) else seed_of(given)
    config = dict(config) | {"seed": seed}
    run = Run(
        name=path.name,
        config=config,
        seed=seed,
        state=RunState.missing,
        step=np.zeros(0, dtype=np.int64),
        columns={},
        path=path,
        run_id=str(entry.get("config_hash") or ""),
        error=" ".join(str(item) for item in entry.get("overrides", ())),
        attempt=0,
    )
    return replace(run, injected=injected_of(config), planned=planned_of(config))
