"""``python -m run -m``, once its combinations are composed: plan, check, prepare, hand over, and what came of it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.errors import ConfigError
from trimtab.files import write_text
from trimtab.launch.check import faults, unfit
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import PlannedRun, Result, State
from trimtab.launch.plan import plan, told
from trimtab.launch.prepare import Planned, default_folder, note_code, prepare
from trimtab.spec import RunSpec
from trimtab.spec.launch import Backend, SweepSpec

Say = Callable[[str], None]
SHOWN = 20  # lines of a table of runs
OK, FAILED, PREEMPTED = 0, 1, 75


@dataclass(frozen=True)
class Order:
    """What is to be run. ``folder``: None for the one that the runs' hashes name; ``files``: texts to keep there."""

    name: str
    folder: Path | None
    specs: Sequence[RunSpec]
    overrides: Sequence[Sequence[str]]
    sweep: SweepSpec
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """``runs``: each combination's run; ``results``: of those that ended, by dir; ``detached``: it goes on."""

    runs: Sequence[PlannedRun]
    folder: Path
    results: dict[str, Result] = field(default_factory=dict)
    detached: bool = False

    def code(self) -> int:
        """0 when all are completed or on their way, 75 when some have to go on, else 1."""
        if self.detached:
            return OK
        states = {self.results[run.dir].state if run.dir in self.results else State.lost for run in self.runs}
        if states <= {State.completed}:
            return OK
        return PREEMPTED if states <= {State.completed, State.preempted} else FAILED


def start(order: Order, say: Say) -> Outcome:
    """Start the sweep, or go on with it. ConfigError before anything was submitted when something of it is wrong."""
    places_in_a_sweep(order.specs)
    runs, places = plan(order.specs, order.overrides, order.sweep)
    firsts = {runs[at].dir: spec for at, spec in zip(reversed(places), reversed(order.specs), strict=True)}
    planned = Planned(tuple(runs), firsts, len(places))
    path = order.folder if order.folder is not None else default_folder(order.name, planned)
    wrong = faults(order.sweep, runs)
    if not wrong and (bad := unfit(path, order.sweep.launch.backend)):
        wrong = [bad]
    if wrong:
        raise ConfigError("\n".join(wrong))
    folder = SweepFolder(path.absolute())
    missing = [run for run in runs if not _completed(folder, run)]
    name = order.name if order.folder is None and order.name != "sweep" else path.name
    say(f"{path}: {told(runs, len(places))}" + (f", {len(runs) - len(missing)} completed" if runs != missing else ""))
    if order.sweep.launch.backend is Backend.slurm and missing:
        _refuse_what_no_cluster_takes(folder, order.sweep, missing, say)
    if order.sweep.dry_run:
        _show(folder, missing, order.sweep, say)
        return Outcome([], path, detached=True)
    again = bool(folder.batches.exists() and folder.all_batches())
    folder = prepare(path, name, planned, order.sweep, say)
    for file, text in order.files.items():
        write_text(folder.path / file, text)
    combinations = [runs[at] for at in places]
    detached = _hand_over(folder, missing, order.sweep, say, again)
    if detached:
        return Outcome(combinations, path, detached=True)
    results = {run.dir: found for run in runs if (found := folder.result(run.dir)) is not None}
    return Outcome(combinations, path, results)


def places_in_a_sweep(specs: Sequence[RunSpec]) -> None:
    """ConfigError for options that would put a run elsewhere than into the sweep's folder."""
    given = next((spec.run_dir for spec in specs if spec.run_dir), "")
    if given:
        raise ConfigError(f"run_dir={given} is refused; allowed: none with -m, where each run has its own in the "
                          "sweep's; for example hydra.sweep.dir=multirun/mine")  # fmt: skip
    elsewhere = next((spec.resume for spec in specs if spec.resume not in ("no", "auto")), "")
    if elsewhere:
        raise ConfigError(f"resume={elsewhere} is refused; allowed: no, auto with -m, where each run goes on by "
                          "itself; for example resume=auto")  # fmt: skip


def _completed(folder: SweepFolder, run: PlannedRun) -> bool:
    found = folder.result(run.dir)
    return found is not None and found.state is State.completed


def _refuse_what_no_cluster_takes(folder: SweepFolder, spec: SweepSpec, runs: Sequence[PlannedRun], say: Say) -> None:
    from trimtab.launch.submit import preflight

    if wrong := preflight(folder, spec, runs, say):
        raise ConfigError("\n".join(wrong))


def _show(folder: SweepFolder, runs: Sequence[PlannedRun], spec: SweepSpec, say: Say) -> None:
    """The plan of a dry run; SLURM's scripts are kept in dry_run/."""
    for line in table(runs, most=len(runs)):
        say(line)
    if spec.launch.backend is Backend.slurm and runs:
        from trimtab.launch.submit import scripts

        for path in scripts(folder, spec, runs, say):
            say(f"kept: {path}")
    say("dry_run=true: nothing was started")


def _hand_over(folder: SweepFolder, runs: Sequence[PlannedRun], spec: SweepSpec, say: Say, again: bool) -> bool:
    """Whether the sweep goes on by itself. ``again``: it was started before."""
    match spec.launch.backend:
        case Backend.local:
            from trimtab.launch.local import carry_out

            if runs:
                if again:
                    note_code(folder, spec, say)
                carry_out(folder, runs, spec, say)
            return False
        case Backend.slurm:
            from trimtab.launch.submit import submit

            batches = submit(folder, spec, runs, say) if runs else []
            if again and batches:
                note_code(folder, spec, say)
            if spec.wait:
                from trimtab.launch.follow import Screen, follow

                sweep = folder.sweep()
                follow(folder, spec, Screen(sweep.sweep, sweep.combinations), say=say)
                return False
            for batch in batches:
                jobs = f"{len(batch.slots)} jobs" if len(batch.slots) > 1 else "1 job"
                say(f"{batch.cluster}: job {batch.job}, {jobs}, {sum(len(slot.runs) for slot in batch.slots)} runs")
            for line in table(runs, most=SHOWN):
                say(line)
            say(f"trimtab sweep status {shlex.quote(str(_shown(folder.path)))}")
            return True


def _shown(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def table(runs: Sequence[PlannedRun], most: int) -> list[str]:
    """A line for each run: its folder, its class, its overrides; the rest counted."""
    width = max((len(run.dir) for run in runs), default=0)
    kind = max((len(run.resources) for run in runs), default=0)
    lines = [f"{run.dir:{width}}  {run.resources:{kind}}  {_own(run)}".rstrip() for run in runs[:most]]
    return [*lines, f"… and {len(runs) - most} more"] if len(runs) > most else lines


def _own(run: PlannedRun) -> str:
    return " ".join(text for text in run.overrides if not text.startswith(("launcher=", "sweep=")))


def summary(outcome: Outcome) -> list[str]:
    """What became of the runs: counts, and a line for each that is not completed."""
    distinct = {run.dir: run for run in outcome.runs}
    ended = {name: outcome.results.get(name) for name in distinct}
    bad = {name: found for name, found in ended.items() if found is None or found.state is not State.completed}
    lines = [f"{outcome.folder}: {len(distinct) - len(bad)} ok, {len(bad)} not completed"]
    for name, found in bad.items():
        what = "no result" if found is None else f"{found.state.value}: {found.error.partition(chr(10))[0]}"
        lines.append(f"{name}: {what} ({_own(distinct[name])}; log: {outcome.folder / name / 'log.txt'})")
    nans = [name for name, found in ended.items() if found is not None and found.objective is not None
            and found.objective != found.objective]  # fmt: skip
    return [*lines, *(f"{name}: its objective is not a number" for name in nans)]
