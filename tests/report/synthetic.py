"""Folders of made-up runs whose truth is known, and runs in memory; shared by the tests of the report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trimtab.report.model import Run, RunState

STEPS, EVERY = 60, 10

CONFIG: dict[str, Any] = {
    "seed": 0,
    "steps": STEPS,
    "run_dir": "",
    "resume": "no",
    "algo": {"name": "standard", "metrics_only": False},
    "mis": {"tis_mode": "truncate", "tis_level": "token", "tis_upper_bound": 2.0, "use_rs": False, "rs_level": "token",
            "rs_veto_threshold": None},
    "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
    "mismatch": {"kind": "none", "strength": 0.0},
    "rollout": {"engine": "transformers", "batch_size": 16, "record_every": 50},
    "optim": {"lr": 0.0003, "betas": [0.9, 0.99]},
    "evaluation": {"every": EVERY},
    "tracker": {"name": "file", "group": None, "tags": []},
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """A setting of a made-up sweep. ``effect``: added to the final reward of each of its runs."""

    overrides: Mapping[str, Any]  # dotted keys
    effect: float = 0.0
    collapsed: tuple[int, ...] = ()  # seeds whose reward falls to nothing in the last third
    failed: tuple[int, ...] = ()  # seeds that stop half-way
    missing: tuple[int, ...] = ()  # seeds without a folder
    nan: tuple[int, ...] = ()  # seeds whose last evaluation is NaN
    twice: tuple[int, ...] = ()  # seeds whose metrics.jsonl holds steps twice, wrong values first
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Truth:
    """``scores[arm][seed]``: mean of the run's last 3 evaluations, for runs that have one."""

    scores: Mapping[str, Mapping[int, float]]
    folders: Mapping[tuple[str, int], Path]


def config_with(overrides: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    """A nested config: ``CONFIG`` with dotted keys replaced."""
    made = json.loads(json.dumps(CONFIG)) | {"seed": seed}
    for key, value in overrides.items():
        *path, last = key.split(".")
        place = made
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return dict(made)


def write_run(
    folder: Path,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    state: str = "completed",
    error: str | None = None,
    attempt: int = 1,
    updated: float = 1000.0,
    overrides: Sequence[str] = (),
    tail: str = "",
) -> Path:
    """A run folder; ``rows`` of metrics.jsonl (NaN and infinities allowed); ``tail``: raw text at its end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(config) | {"run_dir": str(folder)}, sort_keys=False))
    (folder / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(line(row) for row in rows)
        file.write(tail)
    status = {"state": state, "error": error, "started": updated - 100.0, "updated": updated, "host": "elsewhere",
              "attempt": attempt, "run_id": folder.name, "name": folder.name, "steps": config.get("steps")}  # fmt: skip
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def line(row: Mapping[str, Any]) -> str:
    """A line of metrics.jsonl: non-finite values as null, their names in ``nonfinite``."""
    bad = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    plain = {name: None if name in bad else value for name, value in row.items()}
    return json.dumps(plain | ({"nonfinite": bad} if bad else {})) + "\n"


def rows_of(
    final: float,
    rng: np.random.Generator,
    steps: int = STEPS,
    every: int = EVERY,
    noise: float = 0.01,
    collapsed: bool = False,
    start: float = 0.1,
) -> list[dict[str, Any]]:
    """Metrics of a run that learns from ``start`` to ``final`` (an exponential), with noise of sd ``noise``."""
    rows: list[dict[str, Any]] = []
    tokens = 0
    for step in range(steps + 1):
        level = start + (final - start) * (1 - math.exp(-8.0 * step / steps))
        if collapsed and step > 0.6 * steps:
            level = 0.0
        row: dict[str, Any] = {"step": step}
        if step > 0:
            tokens += int(rng.integers(900, 1100))
            kl = 1e-3 * (1 + step / steps)
            row |= {
                "train/step": step,
                "train/reward": level + noise * float(rng.normal()),
                "train/reward_weighted": 0.9 * level + noise * float(rng.normal()),
                "train/reward_std": 0.4,
                "train/mis_k3_kl": kl * float(rng.uniform(0.8, 1.2)),
                "train/mis_kl": kl,
                "train/train_rollout_logprob_abs_diff": math.sqrt(kl),
                "train/mis_ess": 0.95 - 0.1 * step / steps,
                "train/mis_kept_token_fraction": 0.99,
                "train/mis_rs_catastrophic_seq_fraction": 0.001,
                "train/clip_fraction_low": 0.01,
                "train/clip_fraction_high": 0.02 * float(rng.uniform()),
                "train/entropy": 0.001 if collapsed and step > 0.6 * steps else 1.5 - step / steps,
                "train/response_length": 20.0 + float(rng.normal()),
                "train/grad_norm": 0.5 + 0.1 * float(rng.uniform()),
                "train/lr": 3e-4,
                "train/tokens": tokens,
                "time/step": 0.5 + 0.1 * float(rng.uniform()),
                "perf/tokens_per_second": 1800.0,
            }
        if step % every == 0:
            row["eval/reward"] = level + noise * float(rng.normal())
        rows.append(row)
    return rows


def score_of(rows: Iterable[Mapping[str, Any]], metric: str = "eval/reward", last: int = 3) -> float:
    """Mean of the last values after step 0, by a plain loop."""
    values = [row[metric] for row in rows if metric in row and row["step"] > 0]
    return math.fsum(values[-last:]) / len(values[-last:])


def write_sweep(
    folder: Path,
    arms: Mapping[str, Arm],
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = STEPS,
    every: int = EVERY,
    level: float = 0.5,
    shared: float = 0.1,
    noise: float = 0.01,
    random: int = 0,
    manifest: bool = True,
) -> Truth:
    """A sweep's folder. A run's final reward: level + shared·(effect of its seed) + the arm's effect, noise on top."""
    rng = np.random.default_rng(random)
    of_seed = {seed: shared * float(rng.normal()) for seed in seeds}
    scores: dict[str, dict[int, float]] = {name: {} for name in arms}
    folders: dict[tuple[str, int], Path] = {}
    expected = []
    for number, (name, seed) in enumerate((n, s) for n in arms for s in seeds):
        arm = arms[name]
        overrides = [*(f"{key}={value}" for key, value in arm.overrides.items()), f"seed={seed}"]
        expected.append({"dir": str(number), "config_hash": f"{number:016x}", "seed": seed, "overrides": overrides})
        if seed in arm.missing:
            continue
        rows = rows_of(level + of_seed[seed] + arm.effect, rng, steps, every, noise, seed in arm.collapsed)
        if seed in arm.failed:
            rows = rows[: steps // 2]
        elif seed in arm.nan:
            rows[-1]["eval/reward"] = math.nan
        else:
            scores[name][seed] = score_of(rows)
        if seed in arm.twice:
            wrong = [{key: -7.0 if isinstance(value, float) else value for key, value in row.items()} for row in rows]
            rows = wrong[: 2 * steps // 3] + rows
        config = config_with({"steps": steps} | dict(arm.overrides) | dict(arm.config), seed)
        failed = seed in arm.failed
        folders[name, seed] = write_run(
            folder / str(number), config, rows, "failed" if failed else "completed",
            "RuntimeError: out of memory" if failed else None, updated=1000.0 + number, overrides=overrides,
        )  # fmt: skip
    if manifest:
        (folder / "sweep.json").write_text(json.dumps({"sweep": folder.name, "runs": expected}))
    return Truth(scores, folders)


def run_in_memory(
    overrides: Mapping[str, Any],
    seed: int | None,
    values: Sequence[float] | Mapping[str, Sequence[float]],
    state: RunState = RunState.completed,
    name: str = "",
) -> Run:
    """A Run without files; a plain list is ``eval/reward`` at steps 1, 2, …"""
    columns = values if isinstance(values, Mapping) else {"eval/reward": values}
    length = max((len(column) for column in columns.values()), default=0)
    config = flat(config_with(overrides, seed if seed is not None else 0))
    if seed is None:
        del config["seed"]
    name = name or " ".join([*(f"{k}={v}" for k, v in overrides.items()), f"seed={seed}"])
    arrays = {key: np.asarray(column, dtype=np.float64) for key, column in columns.items()}
    return Run(name=name, config=config, seed=seed, state=state, step=np.arange(1, length + 1), columns=arrays)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


HOSTILE = "</script><img src=x onerror=alert(1)>\"'`&amp;{{7*7}}\u202e\x00|*_[x](javascript:alert(1))\n# \ud800".encode(
    "utf-8", "replace"
).decode()


def write_samples(folder: Path, step: int, count: int = 4, text: str = HOSTILE, random: int = 0) -> Path:
    """A recorded step in ``folder``/rollouts; prompts and completions hold ``text``."""
    from trimtab.batch import Finish, Problem, Prompt, Sample
    from trimtab.recording import write_rollouts

    rng = np.random.default_rng(random + step)
    prompts = [Prompt(Problem(f"p{i}", f"prompt {i} {text}", "42"), (1, 2, 3)) for i in range((count + 1) // 2)]
    samples, proximal = [], []
    for i in range(count):
        length = int(rng.integers(2, 12))
        logps = -rng.exponential(1.0, length)
        proximal.append(tuple(float(v) for v in np.minimum(logps + 0.3 * rng.normal(size=length), 0.0)))
        samples.append(
            Sample(
                prompt=prompts[i // 2],
                ids=tuple(int(v) for v in rng.integers(0, 100, length)),
                logps=tuple(float(v) for v in logps),
                versions=(step,) * length,
                finish=Finish.stop,
            )
        )
    path = folder / "rollouts" / f"step_{step:06d}.parquet"
    rewards = [float(i % 2) for i in range(count)]
    write_rollouts(path, step, samples, rewards, [r - 0.5 for r in rewards], proximal,
                   [i // 2 for i in range(count)], [f"answer {i} {text}" for i in range(count)], 1.0)  # fmt: skip
    return path
