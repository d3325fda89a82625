"""Where runs come from: run folders, folders of sweeps, offline files of W&B, projects of W&B."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from trimtab.errors import DataError
from trimtab.report.model import Run
from trimtab.report.sources.folder import load_folder
from trimtab.report.sources.offline import load_offline
from trimtab.report.sources.project import SCHEME, load_project
from trimtab.report.sources.sweep import CONFIG, MARKS, Found, missing, search

Progress = Callable[[int, int, str], None]


def quiet(done: int, total: int, text: str) -> None:
    """Shows no progress."""


def load(paths: Sequence[str], progress: Progress = quiet) -> list[Run]:
    """Every run at ``paths``, each once: folders at any depth, ``.wandb`` files, ``wandb:ENTITY/PROJECT[/GROUP]``.

    Runs that a sweep.json expects and that are not there come as ``missing``. ``progress(done, total, name)`` is called
    as runs are read. Raises DataError when a path is not there or no run was found, ConfigError for a bad address.
    """
    found = _look([path for path in paths if not path.startswith(SCHEME)])
    runs: list[Run] = []
    with ThreadPoolExecutor(
        max_workers=min(8, os.cpu_count() or 1)
    ) as pool:  # Arrow reads without holding the others up
        names = [_name(folder, paths) for folder in found.folders]
        for run in pool.map(load_folder, found.folders, names):
            runs.append(run)
            progress(len(runs), len(found.folders), run.name)
    for manifest in found.manifests:
        absent, wrong = missing(manifest, runs)
        runs += [replace(run, name=_name(run.path, paths) if run.path else run.name) for run in absent]
        if wrong and runs:
            runs[0] = replace(runs[0], remarks=(*runs[0].remarks, *wrong))
    runs += load_offline(found.offline)
    for address in dict.fromkeys(path for path in paths if path.startswith(SCHEME)):
        runs += load_project(address, progress)
    if not runs:
        raise DataError(f"no run at {', '.join(paths)}: {'; '.join(_looked(found, paths))}")
    return runs


def _looked(found: Found, paths: Sequence[str]) -> list[str]:
    """What was looked for, and what to give instead."""
    told = []
    if any(not path.startswith(SCHEME) for path in paths):
        told.append(f"looked through {found.looked} folders for {' or '.join(MARKS)} (a run), sweep.json (a sweep) and "
                    "*.wandb (an offline run of W&B); give the folder of a run or of a sweep")  # fmt: skip
    if any(path.startswith(SCHEME) for path in paths):
        told.append("W&B knows no run there; mind entity, project and group as its address bar shows them")
    return told


def _look(paths: Sequence[str]) -> Found:
    """What lies at ``paths``, each folder and file once, however often the paths reach it."""
    total = Found()
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            here = search(path)
        elif path.is_file() and path.suffix == ".wandb":
            here = Found(offline=[path])
        elif path.is_file() and path.name in (*MARKS, CONFIG):
            here = Found(folders=[path.parent])
        elif path.exists():
            raise DataError(f"{given} is no run; give a run's folder, a sweep's folder, or a .wandb file")
        else:
            raise DataError(f"there is no {given}; give a run's folder, a sweep's folder, a .wandb file, or "
                            "wandb:ENTITY/PROJECT[/GROUP]")  # fmt: skip
        total.looked += here.looked
        add(total.folders, here.folders)
        add(total.offline, here.offline)
        add(total.manifests, here.manifests)
    return total


def add(places: list[Path], more: Sequence[Path]) -> None:
    """Append what is not there yet under any of its names."""
    known = {place.resolve() for place in places}
    places += [place for place in more if place.resolve() not in known]


def _name(folder: Path, paths: Sequence[str]) -> str:
    """A run's name: its path below the given one, with the given one's name where several were given."""
    for given in paths:
        top = Path(given).expanduser()
        if folder != top and folder.is_relative_to(top):
            below = folder.relative_to(top)
            return str(top.name / below) if len(paths) > 1 else str(below)
    return folder.name or str(folder.resolve().name)
