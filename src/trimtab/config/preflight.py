"""A sweep's combinations are all composed and checked before the first one runs."""

from __future__ import annotations

import sys
from typing import Any, Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from trimtab.config.compose import compose
from trimtab.config.explain import as_typed
from trimtab.errors import ConfigError

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def combinations(params: dict[str, Any], overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run that Hydra's basic sweeper would start, in its order."""
    texts = [f"{key}={value}" for key, value in params.items()] + list(overrides)
    return BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(texts), None)[0]


def violations(runs: Sequence[Sequence[str]]) -> list[str]:
    """One line for each run that cannot start: its overrides and why; two runs in one folder count too."""
    found, folders = [], dict[str, str]()
    for overrides in runs:
        name = " ".join(overrides)
        try:
            folder = compose(overrides).run_dir
        except ConfigError as error:
            found.append(f"{name}: " + "; ".join(str(error).splitlines()))
            continue
        if folder and folder in folders:
            found.append(f"{name}: run_dir={folder} is that of {folders[folder]} too; leave it out, or sweep over it")
        folders.setdefault(folder, name)
    return found


class Preflight(Callback):
    """Ends the process with code 2 before anything runs; Hydra turns a callback's exceptions into warnings."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check what the basic sweeper will run; other sweepers choose their combinations later."""
        sweeper = config.hydra.sweeper
        if sweeper._target_ != BASIC:
            return
        runs = combinations(dict(sweeper.params or {}), as_typed(config.hydra.overrides.task))
        found = violations(runs)
        if found:
            print(f"error: {len(found)} of {len(runs)} runs cannot start, so none was started", file=sys.stderr)
            print("\n".join(found), file=sys.stderr)
            raise SystemExit(2)
