"""Which settings differ between runs, found from their configs; the groups of runs that differ only in their seed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from trimtab.errors import ConfigError
from trimtab.report.model import Run, RunState, Setting

# What says where a run writes, how it is watched or when it is saved: runs that differ in nothing else are equal.
IGNORED_PREFIXES = ("tracker.", "checkpoint.", "hydra.", "wandb.", "_wandb.", "logging.", "logger.", "slurm.",
                    "launcher.",
                    "debug.anomaly", "shadow")  # fmt: skip
IGNORED_NAMES = frozenset({
    "seed", "run_dir", "output_dir", "out_dir", "log_dir", "logging_dir", "logdir", "save_dir", "save",
    "default_local_dir", "work_dir", "cache_dir", "resume", "resume_path", "resume_mode", "record_every", "run_name",
    "run_id", "exp_name",
    "experiment_name", "project_name", "wandb_project", "wandb_group", "wandb_name", "wandb_run_id", "wandb_id",
    "wandb_run_name", "wandb_dir", "wandb_entity", "wandb_tags", "wandb_mode", "job_id", "host", "hostname", "pid",
    "timestamp", "notes", "save_interval", "save_freq", "preset",
})  # fmt: skip
# Short names of the groups' keys: what is typed on the command line, and the flat keys that W&B gets.
SHORT = {"algo.name": "algo", "mis.tis_mode": "tis_mode", "mis.tis_level": "level", "mis.rs_level": "rs",
         "mis.rs_veto_threshold": "veto", "loss.name": "loss", "rollout.engine": "rollout", "policy.kind": "policy",
         "task.name": "task", "mismatch.kind": "mismatch"}  # fmt: skip
FLAT = {short: full for full, short in SHORT.items()}
FIRST = ("preset", *SHORT)  # keys that a reader knows best, used before others where both tell the settings apart
ABSENT = "–"


@dataclass(frozen=True)
class Grouping:
    """Settings over ``keys`` (short names), the runs that do not count, and keys that differ but tell nothing more.

    ``variants[label][run]``: which of the settings that ``--by`` leaves out the run has; one and the same without.
    """

    settings: tuple[Setting, ...]
    keys: tuple[str, ...]
    superseded: tuple[tuple[Run, Run], ...] = ()  # (the run that doesn't count, the one that does)
    implied: tuple[str, ...] = ()
    pooled: tuple[str, ...] = ()
    variants: Mapping[str, Mapping[int, str]] = field(default_factory=dict)  # label -> id(run) -> variant


def group(runs: Sequence[Run], by: Sequence[str] = ()) -> Grouping:
    """Settings of ``runs``. ``by``: keys, short or dotted, that tell settings apart instead of all that differ.

    Raises ConfigError for a key that no config has, and for the seed.
    """
    configs = [{key: text(value) for key, value in canonical(run.config).items()} for run in runs]
    differing = differing_keys([{k: v for k, v in config.items() if not ignored(k)} for config in configs])
    asked = [resolve(key, configs) for key in dict.fromkeys(by)]
    keys = asked or minimal(configs, differing)
    names = short_names(keys, differing)
    rest = [key for key in differing if key not in asked] if asked else []
    pooled = [key for key in rest if refines(configs, asked, key)]
    cells: dict[tuple[str, ...], list[int]] = {}
    for i, config in enumerate(configs):
        cells.setdefault(cell(config, keys), []).append(i)
    labels = unique_labels([label_of(at, [names[k] for k in keys]) for at in cells])
    settings, superseded, variants = [], [], {}
    of_pooled = short_names(pooled, differing)
    for label, (at, members) in zip(labels, cells.items(), strict=True):
        tags = {i: cell(configs[i], pooled) for i in members}
        kept, dropped = latest([(runs[i], tags[i]) for i in members])
        superseded += dropped
        settings.append(Setting(label, dict(zip((names[k] for k in keys), at, strict=True)), tuple(kept)))
        variants[label] = {id(runs[i]): label_of(tags[i], [of_pooled[k] for k in pooled]) for i in members}
    return Grouping(
        settings=tuple(settings),
        keys=tuple(names[key] for key in keys),
        superseded=tuple(superseded),
        implied=tuple(key for key in differing if key not in keys and key not in pooled),
        pooled=tuple(of_pooled[key] for key in pooled),
        variants=variants,
    )


# -- keys and values -------------------------------------------------------------------------------------------------


def ignored(key: str) -> bool:
    """Whether ``key`` cannot make two runs two settings."""
    last = key.rpartition(".")[2]
    return key.startswith(IGNORED_PREFIXES) or last in IGNORED_NAMES or last.endswith("_seed")


def canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys under one name each: a flat copy (``level`` for ``mis.tis_level``) is that key."""
    found = {key: value for key, value in config.items() if key not in FLAT and not key.startswith("algo_")}
    nested = any(key.startswith("mis.") for key in config)
    for key, value in config.items():
        if key in FLAT and FLAT[key] not in config and not (nested and FLAT[key].startswith("mis.")):
            found[FLAT[key]] = value
        elif key.startswith("algo_") and f"algo.{key[5:]}" not in config:
            found[f"algo.{key[5:]}"] = value
    return found


def text(value: Any) -> str:
    """A value as it would be typed; numbers that are equal are equal texts."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        try:
            value = float(value) if any(c.isdigit() for c in value) else value
        except ValueError:
            return str(value)
    if isinstance(value, int | float):
        return f"{value:.12g}"
    return value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True, ensure_ascii=False)


def differing_keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Keys with more than one value, or that some configs lack; known ones first, then as the configs list them."""
    keys = dict.fromkeys(key for config in configs if config for key in config)
    told = [config for config in configs if config]  # one without a config tells nothing
    found = [key for key in keys if len({config.get(key, ABSENT) for config in told}) > 1]
    return sorted(found, key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))


def cell(config: Mapping[str, str], keys: Iterable[str]) -> tuple[str, ...]:
    """The config's values of ``keys``."""
    return tuple(config.get(key, ABSENT) for key in keys)


def refines(configs: Sequence[Mapping[str, str]], keys: Sequence[str], key: str) -> bool:
    """Whether ``key`` tells apart what ``keys`` do not."""
    return parts(configs, [*keys, key]) > parts(configs, keys)


def parts(configs: Sequence[Mapping[str, str]], keys: Sequence[str]) -> int:
    """How many groups ``keys`` make of the configs."""
    return len({cell(config, keys) for config in configs})


def minimal(configs: Sequence[Mapping[str, str]], differing: Sequence[str]) -> list[str]:
    """As few of the ``differing`` keys, known ones first, as make the same groups; a preset that makes them alone.

    With algo=standard a dozen other keys fall to their neutral values: naming the algorithm says it all.
    """
    full = parts(configs, differing)
    if full > 1 and parts(configs, ["preset"]) == full == parts(configs, ["preset", *differing]):
        return ["preset"]
    keys: list[str] = []
    for key in differing:
        if refines(configs, keys, key):
            keys.append(key)
        if parts(configs, keys) == full:
            break
    for key in reversed(keys):  # one that later ones made needless
        fewer = [other for other in keys if other != key]
        if parts(configs, fewer) == full and key not in FIRST:
            keys = fewer
    return keys


def short_names(keys: Iterable[str], among: Iterable[str]) -> dict[str, str]:
    """A short name for each dotted key: the group's, or the last part where no other differing key ends so."""
    ends = Counter(key.rpartition(".")[2] for key in {*among, *keys})
    taken = set(SHORT.values())
    names = {}
    for key in keys:
        end = key.rpartition(".")[2]
        names[key] = SHORT.get(key) or (end if ends[end] == 1 and end not in taken else key)
    return names


def resolve(key: str, configs: Sequence[Mapping[str, str]]) -> str:
    """The dotted key that ``key`` means: as it stands, a group's short name, or the only one that ends so."""
    known = dict.fromkeys(k for config in configs for k in config)
    if key.rpartition(".")[2] == "seed":
        raise ConfigError(
            f"--by {key}: runs of one setting differ in their seed and are averaged over it; leave it out"
        )
    full = FLAT.get(key, key)
    if full in known:
        return full
    ends = [k for k in known if k.endswith(f".{key}")]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise ConfigError(f"--by {key} could be {', '.join(ends)}; give one of them")
    near = get_close_matches(key, [*known, *(SHORT[k] for k in known if k in SHORT)], n=5, cutoff=0.5)
    raise ConfigError(f"--by {key}: no run has such a key in its config; closest: {', '.join(near) or 'none'}")


def label_of(values: Sequence[str], names: Sequence[str]) -> str:
    """``algo=decoupled level=token``."""
    return " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True)) or "all runs"


def unique_labels(labels: Sequence[str]) -> list[str]:
    """Labels with a number after those that would stand twice."""
    seen: Counter[str] = Counter()
    found = []
    for label in labels:
        seen[label] += 1
        found.append(label if seen[label] == 1 else f"{label} #{seen[label]}")
    return found


# -- attempts --------------------------------------------------------------------------------------------------------


def latest(runs: Sequence[tuple[Run, tuple[str, ...]]]) -> tuple[list[Run], list[tuple[Run, Run]]]:
    """(runs that count, pairs of one that doesn't and the one in its place): one of each seed and variant.

    The one with the most evidence (``evidence``), of several the last attempt. Without a seed each counts.
    """
    chosen: dict[object, Run] = {}
    dropped: list[tuple[Run, object]] = []
    for run, variant in runs:
        key: object = (run.seed, variant) if run.seed is not None else id(run)
        if key not in chosen:
            chosen[key] = run
        elif evidence(run) >= evidence(chosen[key]):
            dropped.append((chosen[key], key))
            chosen[key] = run
        else:
            dropped.append((run, key))
    return list(chosen.values()), [(run, chosen[key]) for run, key in dropped]


def evidence(run: Run) -> tuple[int, int, int, float]:
    """What orders runs of one seed: one that completed before any that did not, the longer of two, the last attempt.

    Never what the metric says: choosing by that would favour the setting.
    """
    length = int(run.step[-1]) if run.state is RunState.completed and len(run.step) else 0
    match run.state:
        case RunState.completed:
            rank = 3
        case RunState.unknown:
            rank = 2
        case RunState.failed | RunState.preempted | RunState.running:
            rank = 1
        case RunState.missing:
            rank = 0
    return rank, length, run.attempt, run.updated
