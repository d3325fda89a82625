"""Training steps a second with the engine in a process of its own, against the engine in the trainer's.

    OMP_NUM_THREADS=1 python benchmarks/async.py [overrides]

The same run, by turns, in both modes: ``rollout.mode=sync`` (sample, then train, in one process) and
``rollout.mode=async`` (the engine samples while the trainer trains, ``rollout.max_lag=1``). Both engines stay up, the
turns are short and repeated, so that what else the machine does meets both alike; each turn's first steps are left out.
The model is small and random, so responses are of very different lengths. The last line is one JSON object: tokens and
steps a second, the share of the step that hand-overs took, the lag that the speed is paid with, and ``ratio``, async
over sync in tokens a second.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from trimtab import build
from trimtab.config import compose
from trimtab.folder import RunFolder
from trimtab.spec import RunSpec
from trimtab.train.loop import Loop, Parts
from trimtab.train.seeds import seed_everything

ROUNDS, WARMUP, STEPS = 3, 5, 30
WORK = (
    "policy.warmup_accuracy=0", "rollout.batch_size=64", "rollout.group_size=4", "rollout.max_tokens=96",
    "rollout.max_num_seqs=128", "rollout.probe_every=0", "rollout.record_every=0", "evaluation.every=0",
    "checkpoint.every=0", "optim.lr=1e-6",
)  # fmt: skip
MODES = {"sync": ("rollout.mode=sync",), "async": ("rollout.mode=async", "rollout.max_lag=1")}


class Stopwatch:
    """A tracker that notes when each step was logged."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, Mapping[str, float]]] = []

    def start(self, config: Mapping[str, Any], run_id: str, name: str, run_dir: Path) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((time.perf_counter(), dict(metrics)))

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        pass

    def turn(self) -> list[tuple[float, Mapping[str, float]]]:
        """Seconds and metrics of the steps behind the warm-up; forgets them."""
        rows, self.rows = self.rows[WARMUP:], []
        return [(after[0] - before[0], after[1]) for before, after in pairwise(rows)]


def start(mode: str, place: str, stack: ExitStack) -> tuple[RunSpec, Parts, Stopwatch]:
    """A run of the mode, its engine started."""
    spec = compose([*WORK, *MODES[mode], *sys.argv[1:], f"steps={STEPS}", f"run_dir={place}/{mode}"])
    folder, watch = stack.enter_context(RunFolder(Path(spec.run_dir), spec.resume)), Stopwatch()
    seed_everything(spec.seed)
    return spec, build.make_parts(spec, folder, watch, stack), watch


def figures(steps: list[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Rates over the steps, by sums of seconds."""
    seconds = sum(wall for wall, _ in steps)
    tokens = sum(row["perf/tokens_per_second"] * row["time/step"] for _, row in steps)
    return {
        "tokens_per_second": round(tokens / seconds, 1),
        "steps_per_second": round(len(steps) / seconds, 2),
        "generate_share": round(sum(row.get("time/generate", 0.0) for _, row in steps) / seconds, 3),
        "hand_over_share": round(sum(row.get("time/hand_over", 0.0) for _, row in steps) / seconds, 3),
        "lag": round(sum(row["train/lag"] for _, row in steps) / len(steps), 3),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        runs = {mode: start(mode, place, stack) for mode in MODES}
        steps: dict[str, list[tuple[float, Mapping[str, float]]]] = {mode: [] for mode in MODES}
        for _ in range(ROUNDS):
            for mode, (spec, parts, watch) in runs.items():
                Loop(parts, spec, Path(spec.run_dir), "benchmark")()
                steps[mode] += watch.turn()
    result: dict[str, Any] = {"name": "async", "cores": len(os.sched_getaffinity(0)), "steps": len(steps["async"])}
    for mode, rows in steps.items():
        result |= {f"{mode}_{name}": value for name, value in figures(rows).items()}
    result["ratio"] = round(result["async_tokens_per_second"] / result["sync_tokens_per_second"], 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
