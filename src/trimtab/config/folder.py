"""Where a run's files go when ``run_dir`` is left empty."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trimtab.config.resolve import config_hash
from trimtab.errors import ConfigError
from trimtab.spec import RunSpec
from trimtab.spec.launch import Backend


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


def in_sweep() -> bool:
    """Whether the job that runs now is one of a sweep."""
    return HydraConfig.get().mode is RunMode.MULTIRUN


def refuse_launcher(config: DictConfig) -> None:
    """ConfigError for a run in this process that was meant for SLURM: without -m, or by another launcher of Hydra's."""
    if config.launch.backend is not Backend.slurm:
        return
    choices = HydraConfig.get().runtime.choices
    name = choices.get("launcher")
    if in_sweep():
        raise ConfigError(f"launcher={name} with hydra/launcher={choices.get('hydra/launcher')} would run here; "
                          "leave hydra/launcher out, or give launcher=local")  # fmt: skip
    raise ConfigError(f"launcher={name} is for sweeps, and without -m the run would start here; "
                      f"add -m (python -m run -m launcher={name} …), or leave launcher={name} out")  # fmt: skip
