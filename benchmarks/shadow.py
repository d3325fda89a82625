"""What 20 shadow methods cost: as a share of a training step on the tiny model, and on 2.8 million tokens.

    MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000 OMP_WAIT_POLICY=passive \\
        OMP_NUM_THREADS=2 python benchmarks/shadow.py [overrides]

Step: the embedded default (rollouts from vLLM where it is installed, else from transformers) with ``shadow=[...]``
and no gradients, in a process of its own; the median of time/shadow over time/step in metrics.jsonl, the first 10
steps left out. Batch: that of benchmarks/correction.py, in multiples of the floor exp(a - b) over the same tokens, the
two timed in turn (for the MALLOC variables see there). The slower of two widely used implementations takes 540 floors
for one pass of one method over such a batch. The last line is one JSON object; ``ratio`` is the share of the step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from correction import batch, seconds
from torch import Tensor

from trimtab.config import methods
from trimtab.method import Inputs, Shadows
from trimtab.spec import RunSpec

ROOT = Path(__file__).parent.parent
WARMUP = 10
NAMES = (
    "verl/decoupled_token_is", "verl/decoupled_seq_is_rs", "verl/decoupled_k3_rs_token_tis",
    "verl/bypass_ppo_clip_geo_rs", "verl/bypass_pg_is",
    "miles/default", "miles/mask", "miles/geometric",
    "slime/icepop",
    "nemo_rl/tis", "nemo_rl/seq_mask_tis",
    "trl/token_truncate", "trl/sequence_mask",
    "areal/token_k3_mask", "areal/m2po",
    "pipelinerl/ppo", "pipelinerl/gspo",
    "prime_rl/dppo", "prime_rl/legacy_token",
    "trimtab/guarded",
)  # fmt: skip


def step(steps: int, overrides: list[str]) -> tuple[str, float, float, float]:
    """The engine; medians: milliseconds of the shadows and of the step, and the share of one in the other."""
    engine = "vllm" if importlib.util.find_spec("vllm") else "transformers"
    with tempfile.TemporaryDirectory() as place:
        given = [f"rollout={engine}", f"steps={steps + WARMUP}", "evaluation.every=0", f"run_dir={place}/run"]
        command = [sys.executable, "-m", "run", *given, f"shadow=[{','.join(NAMES)}]", *overrides]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        rows = [json.loads(line) for line in (Path(place) / "run" / "metrics.jsonl").read_text().splitlines()]
    times = [(row["time/shadow"], row["time/step"]) for row in rows if row["step"] > WARMUP]
    shadow, whole = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return engine, shadow, whole, statistics.median(one / all_ for one, all_ in times)


def large(repeats: int) -> tuple[int, float, float]:
    """Tokens; medians in seconds: the floor, and all methods on the large batch."""
    torch.set_num_threads(2)
    numerator_N, rollout_N, valid_N, length_B = batch(0.0)
    rows = len(length_B)
    generator = torch.Generator().manual_seed(1)
    inputs = Inputs(
        current_N=numerator_N, rollout_N=rollout_N, valid_N=valid_N, length_B=length_B, proximal_N=numerator_N,
        row_N=torch.repeat_interleave(torch.arange(rows), length_B), group_B=torch.arange(rows) // 4,
        advantage_B=torch.randn(rows, generator=generator), lag_N=torch.zeros(len(valid_N), dtype=torch.int64),
    )  # fmt: skip
    ask = Shadows(methods(NAMES, RunSpec()))

    def floor() -> Tensor:
        return torch.exp(numerator_N - rollout_N)

    ask(inputs), floor()
    times = [(seconds(floor), seconds(lambda: ask(inputs))) for _ in range(repeats)]
    floor_s, shadow_s = (statistics.median(column) for column in zip(*times, strict=True))
    return len(valid_N), floor_s, shadow_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="training steps that are measured")
    parser.add_argument("--repeats", type=int, default=9, help="passes over the large batch")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    tokens, floor_s, shadow_s = large(args.repeats)
    engine, shadow_ms, step_ms, share = step(args.steps, args.overrides)
    figures = {
        "name": "shadow",
        "methods": len(NAMES),
        "engine": engine,
        "shadow_ms": round(shadow_ms, 2),
        "step_ms": round(step_ms, 2),
        "tokens": tokens,
        "floor_ms": round(1e3 * floor_s, 3),
        "batch_ms": round(1e3 * shadow_s, 1),
        "floors": round(shadow_s / floor_s, 1),
        "ratio": round(share, 4),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
