"""A sweep's combinations are all composed and checked before the first one runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from trimtab.config.compose import compose
from trimtab.config.explain import as_typed
from trimtab.config.resolve import config_hash
from trimtab.errors import ConfigError
from trimtab.files import write_text
from trimtab.spec import RunSpec

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def combinations(params: dict[str, Any], overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run that Hydra's basic sweeper would start, in its order."""
    texts = [f"{key}={value}" for key, value in params.items()] + list(overrides)
    return BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(texts), None)[0]


def composed(runs: Sequence[Sequence[str]]) -> tuple[list[RunSpec], list[str]]:
    """The specs of all runs, and one line for each that cannot start: its overrides and why.

    Two runs in one folder count too.
    """
    specs, found, folders = list[RunSpec](), list[str](), dict[str, str]()
    for overrides in runs:
        name = " ".join(overrides)
        try:
            spec = compose(overrides)
        except ConfigError as error:
            found.append(f"{name}: " + "; ".join(str(error).splitlines()))
            continue
        folder = spec.run_dir
        if folder and folder in folders:
            found.append(f"{name}: run_dir={folder} is that of {folders[folder]} too; leave it out, or sweep over it")
        folders.setdefault(folder, name)
        specs.append(spec)
    return specs, found


def manifest(name: str, specs: Sequence[RunSpec], runs: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What the sweep is about to start, so that a run that never came to be is missed: ``trimtab compare`` reads it."""
    planned = [
        {"dir": spec.run_dir or str(i), "config_hash": config_hash(spec), "seed": spec.seed, "overrides": [*overrides]}
        for i, (spec, overrides) in enumerate(zip(specs, runs, strict=True))
    ]
    return {"sweep": name, "runs": planned}


class Preflight(Callback):
    """Ends the process with code 2 before anything runs; Hydra turns a callback's exceptions into warnings."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check what the basic sweeper will run; other sweepers choose their combinations later."""
        sweeper = config.hydra.sweeper
        if sweeper._target_ != BASIC:
            return
        runs = combinations(dict(sweeper.params or {}), as_typed(config.hydra.overrides.task))
        specs, found = composed(runs)
        if found:
            print(f"error: {len(found)} of {len(runs)} runs cannot start, so none was started", file=sys.stderr)
            print("\n".join(found), file=sys.stderr)
            raise SystemExit(2)
        folder = Path(config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "sweep.json", json.dumps(manifest(folder.name, specs, runs), indent=1) + "\n")
