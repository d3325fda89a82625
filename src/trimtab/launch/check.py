"""Rules over a sweep's options: each violation names the value, what is allowed, and an override that mends it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trimtab.config.explain import closest
from trimtab.config.groups import CONF
from trimtab.config.keys import options
from trimtab.config.many import converted
from trimtab.config.places import is_importable
from trimtab.config.ranges import wrong
from trimtab.launch.model import PlannedRun
from trimtab.spec.launch import Backend, ClusterSpec, ResourceSpec, SweepSpec

PROGRAM = "trimtab.experiment:run"
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS(WORD|WD|PHRASE)|CREDENTIAL|COOKIE", re.IGNORECASE)
SETS = re.compile(r"(\w+)=")  # NAME=VALUE in a line of shell
WITH_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]+@")
VARIABLE = re.compile(r"[A-Za-z_]\w*")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
WORD = re.compile(r"[\w.,:+@&|*()\[\]/=-]*")  # what stands in a script behind #SBATCH --partition=
PROGRAM_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def faults(spec: SweepSpec, runs: Sequence[PlannedRun], environment: Mapping[str, str] = os.environ) -> list[str]:
    """One line for each violation; ``runs`` say which classes are in use."""
    found = [*_numbers(spec), *_program(spec), *_snapshot(spec), *_environment(spec, environment), *_rules(spec)]
    used = {run.resources for run in runs}
    for name in sorted(used - spec.launch.classes.keys()):
        close = closest(name, list(spec.launch.classes)) if spec.launch.classes else "default"
        allowed = (
            f"{', '.join(spec.launch.classes) or 'none is declared'}; declare it with +launch.classes.{name}.cpus=2"
        )
        found.append(wrong("launch.resources", name, allowed, f"launch.resources={close}"))
    for name in sorted(used & spec.launch.classes.keys()):
        found += _resources(spec, name, spec.launch.classes[name])
    if spec.launch.backend is Backend.slurm:
        if not spec.launch.clusters:
            found.append(wrong("launch.clusters", {}, "at least one cluster with SLURM",
                               "+launch.clusters.mine.partition=gpu (or launcher=slurm)"))  # fmt: skip
        for name, cluster in spec.launch.clusters.items():
            found += _cluster(name, cluster)
    return found


def _numbers(spec: SweepSpec) -> Iterator[str]:
    least = {"runs_per_job": spec.runs_per_job, "launch.at_once": spec.launch.at_once,
             "launch.signal_lead": spec.launch.signal_lead}  # fmt: skip
    for key, value in least.items():
        if value < 1:
            yield wrong(key, value, "a whole number >= 1", f"{key}=1")
    for cause, value in vars(spec.launch.retries).items():
        if value < 0:
            yield wrong(f"launch.retries.{cause}", value, "a whole number >= 0", f"launch.retries.{cause}=0")


def _program(spec: SweepSpec) -> Iterator[str]:
    given = spec.launch.program
    if not PROGRAM_PATH.fullmatch(given):
        yield wrong("launch.program", given, "package.module:function", f"launch.program={PROGRAM}")
    elif not is_importable(given):
        allowed = "package.module:function of a package that is here or installed"
        yield wrong("launch.program", given, allowed, f"launch.program={PROGRAM}")


def _snapshot(spec: SweepSpec) -> Iterator[str]:
    root, given = CONF.parent, spec.launch.snapshot
    there = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
    for name in given:
        place = Path(name)
        if place.is_absolute() or ".." in place.parts or not name.strip("./") or not (root / place).exists():
            yield wrong("launch.snapshot", given, f"names in the checkout ({', '.join(there)}), without {name!r}",
                        "launch.snapshot=[src,conf,sweeps,launchers]")  # fmt: skip
    if missing := {"src", "conf"} - set(given):
        yield wrong("launch.snapshot", given, f"a list with {' and '.join(sorted(missing))}, which every run needs",
                    "launch.snapshot=[src,conf,sweeps,launchers]")  # fmt: skip


def _environment(spec: SweepSpec, environment: Mapping[str, str]) -> Iterator[str]:
    good = "launch.environment=[PATH,HOME,USER,LANG]"
    for name in spec.launch.environment:
        if not VARIABLE.fullmatch(name):
            yield wrong("launch.environment", [name], "names of variables", good)
        elif SECRET.search(name):
            yield wrong("launch.environment", [name], "names of no key, token or password: sweep.json has the "
                        "values; runs find W&B's in ~/.netrc (wandb login), the hub's in HF_HOME", good)  # fmt: skip
        elif WITH_PASSWORD.search(environment.get(name, "")):
            yield wrong("launch.environment", [name], "variables without a password in their value", good)
    for key, lines in {f"launch.clusters.{name}.setup": c.setup for name, c in spec.launch.clusters.items()}.items():
        for line in lines:
            if any(SECRET.search(name) for name in SETS.findall(line)):
                yield (f"{key} sets {SETS.findall(line)[0]}; allowed: lines that set no key, token or password, as "
                       f"scripts keep them; for example {key}=[source ~/.my_keys]")  # fmt: skip


def _rules(spec: SweepSpec) -> Iterator[str]:
    for i, rule in enumerate(spec.launch.rules):
        key = f"launch.rules[{i}]"
        if rule.use not in spec.launch.classes:
            close = closest(rule.use, list(spec.launch.classes)) if spec.launch.classes else "default"
            yield wrong(f"{key}.use", rule.use, ", ".join(spec.launch.classes), f"use:{close}")
        for option, text in rule.when.items():
            if option not in options():
                close = closest(option, list(options()))
                yield wrong(
                    f"{key}.when", {option: text}, f"options of a run; did you mean {close}?", f"{close}:{text}"
                )
            elif converted(option, text) is None:
                yield wrong(f"{key}.when", {option: text}, f"values that {option} can have", option)


def _resources(spec: SweepSpec, name: str, given: ResourceSpec) -> Iterator[str]:
    at = f"launch.classes.{name}"
    for field in ("minutes", "cpus", "nodes", "tasks_per_node"):
        if (value := int(vars(given)[field])) < 1:
            yield wrong(f"{at}.{field}", value, "a whole number >= 1", f"{at}.{field}=1")
    if given.gpus < 0:
        yield wrong(f"{at}.gpus", given.gpus, "a whole number >= 0", f"{at}.gpus=0")
    if given.memory_gib is not None and not 0 < given.memory_gib < math.inf:
        yield wrong(f"{at}.memory_gib", given.memory_gib, "a number > 0, or null", f"{at}.memory_gib=8")
    if spec.launch.backend is not Backend.slurm:
        return
    if given.minutes >= 1 and spec.launch.signal_lead >= given.minutes * 60:
        allowed = f"less than the time limit, {given.minutes * 60} s with {at}.minutes={given.minutes}"
        mend = f"launch.signal_lead={given.minutes * 15} (or {at}.minutes={spec.launch.signal_lead // 60 + 3})"
        yield wrong("launch.signal_lead", spec.launch.signal_lead, allowed, mend)
    if given.nodes * given.tasks_per_node > 1 and spec.launch.program == PROGRAM:
        key = "nodes" if given.nodes > 1 else "tasks_per_node"
        yield wrong(f"{at}.{key}", vars(given)[key], f"1 with launch.program={PROGRAM}, which trains in one process",
                    f"{at}.{key}=1 (or launch.program=my_package.my_module:main)")  # fmt: skip


def _cluster(name: str, given: ClusterSpec) -> Iterator[str]:
    at = f"launch.clusters.{name}"
    if not NAME.fullmatch(name) or name == "local":
        yield f"{at}: {name!r} is refused; allowed: a name of letters, digits, _ . and -, other than local"
    for field in ("member", "partition", "account", "qos", "constraint"):
        value = str(vars(given)[field])
        if not WORD.fullmatch(value):
            yield wrong(
                f"{at}.{field}",
                repr(value),
                "a word as sbatch takes it, without spaces and quotes",
                f"{at}.{field}=main",
            )
    for field in ("conf", "python", "folder"):
        value = str(vars(given)[field])
        if value and (not value.startswith("/") or not value.isprintable() or ":" in value):
            yield wrong(f"{at}.{field}", repr(value), "an absolute path, or empty", f'{at}.{field}=""')
    if not all(word.strip() and word.isprintable() for word in given.via):
        yield wrong(f"{at}.via", given.via, "the words of a command", f"{at}.via=[ssh,login.example.org]")
    if given.max_jobs is not None and given.max_jobs < 1:
        yield wrong(f"{at}.max_jobs", given.max_jobs, "a whole number >= 1, or null", f"{at}.max_jobs=null")
    if not 0 <= given.weight < math.inf:
        yield wrong(f"{at}.weight", given.weight, "a number >= 0", f"{at}.weight=1")


def unfit(folder: Path, backend: Backend) -> str | None:
    """Why the folder cannot be a sweep's; None when it can. It is made if it is not there."""
    place = str(folder.absolute())
    bad = [c for c in place if not c.isprintable() or c in (":", "\\", "%")]
    if bad and (backend is Backend.slurm or bad[0] not in "\\%"):
        return wrong("hydra.sweep.dir", repr(place), f"a path without {bad[0]!r}", "hydra.sweep.dir=multirun/mine")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return wrong("hydra.sweep.dir", place, f"a folder that can be made ({error})", "hydra.sweep.dir=multirun/mine")
    if not os.access(folder, os.W_OK | os.X_OK):
        return wrong("hydra.sweep.dir", place, "a folder that can be written", "hydra.sweep.dir=multirun/mine")
    return None
