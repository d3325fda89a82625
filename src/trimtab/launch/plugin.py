"""What Hydra calls for ``-m``: a sweeper that checks every combination before the first one is started, and a launcher
that hands them to this machine's processes or to SLURM. conf/hydra/sweeper and conf/hydra/launcher name them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from trimtab.config import to_sweep_spec
from trimtab.config.many import compose_many
from trimtab.config.preflight import POINTS, combinations, composed, manifest, misplaced, of_run
from trimtab.errors import ConfigError, Preempted, TrimtabError
from trimtab.files import write_text
from trimtab.launch.start import Order, Outcome, start, summary
from trimtab.spec import RunSpec
from trimtab.spec.launch import Backend, SweepSpec

REFUSED, PREEMPTED = 2, 75
NOTES = 12  # lines of them at most
BY_TIME = "${now:"  # in hydra.sweep.dir: the user gave no folder of their own


def say(text: str) -> None:
    """Print a line at once: sweeps are followed through pipes."""
    print(text, flush=True)


class TrimtabSweeper(BasicSweeper):
    """Hydra's basic sweeper, with one preflight of everything; a wrong combination ends the process with 2."""

    __module__ = "hydra_plugins.trimtab"  # Hydra takes plugins of that package only; src/hydra_plugins names them

    def __init__(
        self,
        max_batch_size: int | None,
        params: dict[str, str] | None = None,
        points: Any = None,
    ) -> None:
        """``points``: axes whose values are named lists of overrides."""
        super().__init__(max_batch_size=max_batch_size, params=params)
        self._points: Any = OmegaConf.to_container(OmegaConf.create(points or {}))

    def sweep(self, arguments: list[str]) -> Any:
        """Check all, then start all."""
        assert self.config is not None
        try:
            runs = combinations(dict(self.params or {}), arguments, self._points)
        except HydraException as error:
            raise ConfigError(f"{error}; sweep=optuna_bounds shows how such ranges are searched") from error
        faults = misplaced([*(f"{key}={value}" for key, value in (self.params or {}).items()), *arguments])
        if faults:
            raise ConfigError("\n".join(faults))
        ours = isinstance(self.launcher, TrimtabLauncher)
        checked = composed([of_run(overrides) for overrides in runs], folders_given=not ours)
        if found := checked.faults:
            print(f"error: {len(found)} of {len(runs)} runs cannot start, so none was started", file=sys.stderr)
            print("\n".join(found), file=sys.stderr)
            raise SystemExit(REFUSED)
        if not isinstance(self.launcher, TrimtabLauncher):
            return self._by_another(arguments, checked.specs, runs)  # each run tells its own notes
        for line in checked.notes[:NOTES]:
            print(f"note: {line}", file=sys.stderr)
        if len(checked.notes) > NOTES:
            print(f"note: … and {len(checked.notes) - NOTES} more like these", file=sys.stderr)
        try:
            outcome = self.launcher.start(checked.specs, runs)
        except Preempted as stop:
            say(str(stop))
            raise SystemExit(PREEMPTED) from stop
        if outcome.detached:
            return []
        say("\n".join(summary(outcome)))
        if code := outcome.code():
            raise SystemExit(code)
        return [self.launcher.returned(outcome)]

    def _by_another(self, arguments: list[str], specs: Sequence[RunSpec], runs: Sequence[Sequence[str]]) -> Any:
        """hydra/launcher=basic and the like: one run after the other in this process, folders by number."""
        assert self.config is not None
        if self._points:
            raise ConfigError(f"this launcher knows no {POINTS}; leave hydra/launcher out, or give launcher=local")
        if self.config.launch.backend is Backend.slurm:
            raise ConfigError("this launcher reaches no SLURM, its runs would start here; leave hydra/launcher out, or "
                              "give launcher=local")  # fmt: skip
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "sweep.json", json.dumps(manifest(folder.name, specs, runs), indent=1) + "\n")
        return super().sweep(arguments)


class TrimtabLauncher(Launcher):
    """``launch.backend`` decides where; a sweep's folder is named by what is in it: a command finds it again."""

    __module__ = "hydra_plugins.trimtab"

    def __init__(self) -> None:
        self._config: DictConfig | None = None
        self._folder: Path | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the config; sweepers that choose their runs later get a folder named by what they are asked."""
        self._config = config
        hydra: Any = OmegaConf.to_container(config.hydra, resolve=False)
        if BY_TIME not in hydra["sweep"]["dir"]:
            self._folder = Path(config.hydra.sweep.dir)
        elif hydra["sweeper"]["_target_"] != f"{TrimtabSweeper.__module__}.{TrimtabSweeper.__name__}":
            asked = json.dumps([hydra["sweeper"], of_run(hydra["overrides"]["task"])], sort_keys=True, default=str)
            self._folder = Path("multirun") / f"{self._name()}_{hashlib.sha256(asked.encode()).hexdigest()[:10]}"
            with open_dict(config.hydra.sweep):
                config.hydra.sweep.dir = str(self._folder)  # where the sweeper writes what it found

    def start(self, specs: Sequence[RunSpec], runs: Sequence[Sequence[str]]) -> Outcome:
        """Start checked combinations; ``runs``: their overrides as the sweeper made them."""
        assert self._config is not None
        order = Order(self._name(), self._folder, specs, [of_run(overrides, True) for overrides in runs], self.spec(),
                      {"multirun.yaml": OmegaConf.to_yaml(self._config)})  # fmt: skip
        return start(order, say)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """For sweepers that choose the next runs by the results of the last; a wrong combination is a failed run."""
        spec = self.spec()
        if spec.dry_run or (spec.launch.backend is Backend.slurm and not spec.wait):
            mend = "leave dry_run out" if spec.dry_run else "add wait=true"
            raise ConfigError(f"this sweeper chooses its runs by the results of earlier ones, so it must wait: {mend}")
        made = compose_many([of_run(overrides) for overrides in job_overrides])
        good = [(one, given) for one, given in zip(made, job_overrides, strict=True) if isinstance(one, RunSpec)]
        outcome = self.start([one for one, _ in good], [given for _, given in good]) if good else None
        found = iter(self.returned(outcome)) if outcome is not None else iter(())
        return [
            next(found) if isinstance(one, RunSpec) else _return(given, one)
            for one, given in zip(made, job_overrides, strict=True)
        ]

    def returned(self, outcome: Outcome) -> list[JobReturn]:
        """What each combination's run returned: its objective, or the first line of its error."""
        returns = []
        for run in outcome.runs:
            found = outcome.results.get(run.dir)
            if found is None:
                returns.append(_return(run.overrides, TrimtabError(f"{run.dir} has no result")))
            elif found.state.value != "completed":
                returns.append(_return(run.overrides, TrimtabError(f"{run.dir}: {found.state.value}: {found.error}")))
            else:
                returns.append(_return(run.overrides, found.objective))
        return returns

    def spec(self) -> SweepSpec:
        """The sweep's options."""
        assert self._config is not None
        task = self._config.copy()
        with open_dict(task):
            del task["hydra"]
        return to_sweep_spec(task)

    def _name(self) -> str:
        assert self._config is not None
        return str(self._config.hydra.runtime.choices.get("sweep") or "sweep").replace("/", "_")


def _return(overrides: Sequence[str], value: Any) -> JobReturn:
    status = JobStatus.FAILED if isinstance(value, Exception) else JobStatus.COMPLETED
    made = JobReturn(overrides=list(overrides), status=status)
    made.return_value = value
    return made
