"""A sweep's folder, made before anything is submitted; the same command again finds it as it is.

Until the first submission everything in it is made anew. From then on the frozen configs and the copied code stay: runs
that wait in a queue use them, whatever is edited meanwhile.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.config import to_dict, to_yaml
from trimtab.errors import ConfigError, DataError
from trimtab.files import write_text
from trimtab.launch import snapshot
from trimtab.launch.files import SweepFolder
from trimtab.launch.frozen import digest
from trimtab.launch.model import PlannedRun, Sweep
from trimtab.spec import RunSpec, TaskName
from trimtab.spec.launch import SweepSpec

Say = Callable[[str], None]


@dataclass(frozen=True)
class Planned:
    """Distinct runs with their specs, and how many combinations they came from."""

    runs: tuple[PlannedRun, ...]
    specs: Mapping[str, RunSpec]  # by the run's dir
    combinations: int


def default_folder(name: str, planned: Planned) -> Path:
    """``multirun/<name>_<hash of what is run>``: one folder for one command, however often it is given."""
    made = hashlib.sha256()
    for run in sorted(planned.runs, key=lambda run: run.dir):
        plain = to_dict(replace(planned.specs[run.dir], run_dir="", resume="auto"))
        made.update(json.dumps([run.dir, plain], default=repr).encode())  # YAML takes 40 times as long
    return Path("multirun") / f"{name}_{made.hexdigest()[:10]}"


def prepare(path: Path, name: str, planned: Planned, spec: SweepSpec, say: Say) -> SweepFolder:
    """The sweep's folder with sweep.json, frozen/ and code/. ConfigError when it holds something else."""
    folder = SweepFolder(path.absolute())
    folder.path.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        known = _known(folder)
        if known is None or not folder.batches.exists() or not folder.all_batches():
            code = snapshot.take(folder.code, spec.launch.snapshot, modules(planned, spec))
            sweep = Sweep(name, planned.runs, planned.combinations, to_dict(spec), code, environment(spec), time.time())
            runs: Sequence[PlannedRun] = planned.runs
        else:
            sweep, runs = _with_more(folder, known, planned, spec, say)
        folder.frozen.mkdir(exist_ok=True)
        texts = {run.dir: frozen(folder, run, planned.specs[run.dir]) for run in runs}
        with ThreadPoolExecutor(8) as pool:  # what takes time is the disk
            list(pool.map(lambda name: write_text(folder.config(name), texts[name]), texts))
        digests = {**sweep.digests, **{name: digest(text) for name, text in texts.items()}}
        folder.write_sweep(replace(sweep, digests=digests))  # last: where it is, the rest is whole
    return folder


def frozen(folder: SweepFolder, run: PlannedRun, spec: RunSpec) -> str:
    """The text of the run's config as its jobs read it."""
    return to_yaml(replace(spec, run_dir=str(folder.run(run.dir)), resume="auto"))


def _known(folder: SweepFolder) -> Sweep | None:
    if not folder.sweep_json.exists():
        return None
    try:
        return folder.sweep()
    except DataError as error:
        raise ConfigError(f"hydra.sweep.dir={folder.path} holds a sweep of another launcher ({error}); "
                          "give another folder with hydra.sweep.dir=") from error  # fmt: skip


def _with_more(
    folder: SweepFolder, known: Sweep, planned: Planned, spec: SweepSpec, say: Say
) -> tuple[Sweep, Sequence[PlannedRun]]:
    """The sweep with the runs that it did not have, and those. Launcher and environment are those of this command."""
    if not folder.code.is_dir():
        raise ConfigError(f"{folder.code}, which its runs use, is gone; start another sweep with hydra.sweep.dir=")
    names = {run.dir for run in known.runs}
    more = [run for run in planned.runs if run.dir not in names]
    for run in planned.runs:
        if run.dir in names and folder.config(run.dir).read_text() != frozen(folder, run, planned.specs[run.dir]):
            say(f"note: {run.dir} stays as it was started; what differs now (tracker, shadow …) is not taken over")
    combinations = max(known.combinations, planned.combinations) if not more else known.combinations + len(more)
    return replace(
        known, runs=(*known.runs, *more), combinations=combinations, launch=to_dict(spec), environment=environment(spec)
    ), more


def note_code(folder: SweepFolder, spec: SweepSpec, say: Say) -> None:
    """Say that the runs of a sweep which was started before use other code than the checkout's, if they do."""
    if snapshot.changed(folder.code, spec.launch.snapshot, list(folder.sweep().code.get("modules") or ())):
        say(f"note: the code has changed since the sweep was started; its runs go on with the copy in {folder.code}. "
            f"For the code as it is now: hydra.sweep.dir=multirun/NAME")  # fmt: skip


def modules(planned: Planned, spec: SweepSpec) -> list[str]:
    """Modules that the runs import beside trimtab: those of custom tasks, and the program's."""
    tasks = [one.task for one in planned.specs.values() if one.task.name is TaskName.custom]
    paths = [*(task.path for task in tasks if task.path), spec.launch.program]
    return sorted({path.partition(":")[0] for path in paths} - {"trimtab.experiment"})


def environment(spec: SweepSpec) -> dict[str, str]:
    """The variables that runs get, of those that are set here."""
    return {name: os.environ[name] for name in spec.launch.environment if name in os.environ}


@contextmanager
def _alone(folder: SweepFolder) -> Iterator[None]:
    """The same command given twice at a time prepares once, and then once more finds it done."""
    handle = os.open(folder.path / ".prepare.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
