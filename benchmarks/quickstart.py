"""The embedded default over seeds 0-4: does the reward rise from below 0.5 to above 0.85, and how long does it take?

    python benchmarks/quickstart.py [--seeds 5] [--picture docs/quickstart.png] [overrides]

Each seed is one ``python -m run`` in a process of its own, one after the other; the tiny model's warm-up is cached, so
only the first run pays for it where it wasn't made before. First and last are means over ten steps of training reward.
The last line is one JSON object; ``ratio`` is the slowest run's seconds over the 180 that a run may take.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def run(seed: int, folder: Path, overrides: list[str]) -> tuple[float, list[dict[str, Any]]]:
    """Seconds and metrics of one run."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "run", f"seed={seed}", f"run_dir={folder}", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return time.perf_counter() - begin, [json.loads(line) for line in lines]


def draw(curves: dict[int, list[dict[str, Any]]], path: Path) -> None:
    """Reward (running mean of ten steps) and evaluation of each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for seed, rows in curves.items():
        steps = [row["step"] for row in rows if row["step"] > 0]
        reward = [row["train/reward"] for row in rows if row["step"] > 0]
        mean = [sum(reward[max(0, i - 9) : i + 1]) / len(reward[max(0, i - 9) : i + 1]) for i in range(len(reward))]
        (line,) = axes.plot(steps, mean, label=f"seed {seed}", linewidth=1.5)
        held = [(row["step"], row["eval/reward"]) for row in rows if "eval/reward" in row]
        axes.plot(*zip(*held, strict=True), "o", color=line.get_color(), markersize=4)
    axes.axhline(0.85, color="0.6", linewidth=0.8, linestyle="--")
    axes.set(
        xlabel="step", ylabel="mean reward", ylim=(0, 1), title="line: training (mean of 10 steps); dots: evaluation"
    )
    axes.legend(ncols=len(curves), fontsize=8, frameon=False, loc="lower center")
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    curves, rows = {}, []
    with tempfile.TemporaryDirectory() as place:
        for seed in range(args.seeds):
            seconds, curve = run(seed, Path(place) / str(seed), args.overrides)
            reward = [row["train/reward"] for row in curve if row["step"] > 0]
            held = [row["eval/reward"] for row in curve if "eval/reward" in row]
            first, last = sum(reward[:10]) / 10, sum(reward[-10:]) / 10
            curves[seed] = curve
            rows.append({"seed": seed, "seconds": round(seconds, 1), "first": round(first, 3), "last": round(last, 3)})
            rows[-1] |= {"eval_before": round(held[0], 3), "eval_after": round(held[-1], 3)}
            print(rows[-1], flush=True)
    if args.picture:
        draw(curves, args.picture)
    slowest = max(row["seconds"] for row in rows)
    print(json.dumps({"name": "quickstart", "runs": rows, "slowest_s": slowest, "ratio": round(slowest / 180, 3)}))


if __name__ == "__main__":
    main()
