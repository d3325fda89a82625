"""Where a run's files go when ``run_dir`` is left empty."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from trimtab.config.resolve import config_hash
from trimtab.errors import ConfigError
from trimtab.spec import RunSpec


def with_run_dir(spec: RunSpec) -> RunSpec:
    """``run_dir`` as given; else the folder that Hydra made for this run of a sweep, else runs/<time>_<algo>_<hash>."""
    if spec.run_dir:
        return spec
    made = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode is RunMode.MULTIRUN or made != Path.cwd():
        return replace(spec, run_dir=str(made))
    if spec.resume == "auto":
        raise ConfigError("resume=auto needs a folder to go on in; give run_dir=, or the run's folder as resume=")
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return replace(spec, run_dir=f"runs/{now}_{spec.algo.name.name}_{config_hash(spec)}")
