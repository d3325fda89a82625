"""Share of a training step spent outside generating, forward and backward passes.

    OMP_NUM_THREADS=2 python benchmarks/step.py [overrides]

Trains the embedded default (or what the overrides say) for 110 steps, leaves out the first 10, and takes wall time from
one step's log to the next, so that rewards, packing, correction, metrics, optimiser, hand-over, probe, logging,
recordings and checkpoints all count as outside; evaluations, which are generating, are switched off. The last line is
one JSON object; ``ratio`` is the share.
"""

from __future__ import annotations

import json
import statistics
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
from trimtab.track import Trackers
from trimtab.train.loop import Loop
from trimtab.train.seeds import seed_everything

WARMUP, STEPS = 10, 110
INSIDE = ("generate", "forward", "backward", "proximal", "reference")


class Stopwatch:
    """A tracker that notes when each step was logged and what the step's own clock said."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, Mapping[str, float]]] = []

    def start(self, config: Mapping[str, Any], run_id: str, name: str, run_dir: Path) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((time.perf_counter(), dict(metrics)))

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        pass


def main() -> None:
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        spec = compose([f"steps={STEPS}", "evaluation.every=0", f"run_dir={place}/run", *sys.argv[1:]])
        folder = stack.enter_context(RunFolder(Path(spec.run_dir), spec.resume))
        watch = Stopwatch()
        tracker = Trackers([build.make_tracker(spec, folder), watch])
        seed_everything(spec.seed)
        parts = build.make_parts(spec, folder, tracker, stack)
        tracker.start({}, "benchmark", "benchmark", folder.path)
        Loop(parts, spec, folder.path, "benchmark")()
        tracker.finish("completed", {})
    rows = watch.rows[WARMUP:]
    walls = [after[0] - before[0] for before, after in pairwise(rows)]
    inside = [sum(row[1].get(f"time/{part}", 0.0) for part in INSIDE) for row in rows[1:]]
    names = sorted({name for _, row in rows for name in row if name.startswith("time/")})
    figures: dict[str, Any] = {"name": "step", "steps": len(walls), "wall_ms": round(1e3 * statistics.median(walls), 2)}
    figures |= {n[5:] + "_ms": round(1e3 * statistics.median(r.get(n, 0.0) for _, r in rows), 2) for n in names}
    figures["ratio"] = round(1.0 - sum(inside) / sum(walls), 4)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
