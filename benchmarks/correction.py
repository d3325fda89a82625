"""Speed of ``correct`` + ``measure`` with every metric, against the floor exp(a - b) over the same tokens.

    MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000 OMP_WAIT_POLICY=passive \\
        OMP_NUM_THREADS=2 python benchmarks/correction.py

The MALLOC variables make glibc keep freed memory. Without them it hands some back, by chance, and the floor is 4 or
14 ms: mostly page faults.

A batch of 1,024 rows and about 2.8 million tokens (lengths 16-8,192, skewed), float32. The two are timed in
turn in one process; the figures are medians. The last line is one JSON object; ``ratio`` is correction / floor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Callable

import torch
from torch import Tensor

from trimtab.correction import RejectRule, WeightRule, correct, measure
from trimtab.spec import Level, TisMode

ROWS, TOKENS = 1024, 2_800_000


def lengths(generator: torch.Generator) -> Tensor:
    """Log-normal lengths between 16 and 8,192 which add up to about TOKENS."""
    raw = torch.empty(ROWS).log_normal_(0.0, 1.0, generator=generator)
    low, high = 1.0, 1e5
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (raw * middle).clamp(16, 8192).sum() < TOKENS else (low, middle)
    return (raw * low).clamp(16, 8192).long()


def batch(holes: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """numerator_logp_N, rollout_logp_N, mask_N (a share ``holes`` is masked out), length_B."""
    generator = torch.Generator().manual_seed(0)
    length_B = lengths(generator)
    n = int(length_B.sum())
    rollout = -torch.empty(n).exponential_(2.0, generator=generator)
    numerator = rollout + 0.05 * torch.randn(n, generator=generator)
    return numerator, rollout, torch.rand(n, generator=generator) >= holes, length_B


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--holes", type=float, default=0.0, help="share of tokens that are masked out")
    args = parser.parse_args()
    torch.set_num_threads(2)
    numerator, rollout, mask, length_B = batch(args.holes)
    weight = WeightRule(Level.token, TisMode.truncate, lower=None, upper=2.0, batch_normalize=True)
    rules = [RejectRule.ratio(Level.geometric, 0.99, 1.01)]

    def floor() -> Tensor:
        return torch.exp(numerator - rollout)

    def correction() -> dict[str, float]:
        done = correct(numerator, rollout, mask, length_B, weight=weight, reject=rules, veto=1e-4)
        _ = done.weight_N, done.keep_N  # made when asked for
        return measure(done).as_dict()

    metrics, _ = correction(), floor()
    times = [(seconds(floor), seconds(correction)) for _ in range(args.repeats)]
    floor_s, correction_s = (statistics.median(column) for column in zip(*times, strict=True))
    figures = {
        "name": "correction",
        "rows": ROWS,
        "tokens": mask.numel(),
        "metrics": len(metrics),
        "floor_ms": round(1e3 * floor_s, 3),
        "correction_ms": round(1e3 * correction_s, 3),
        "ratio": round(correction_s / floor_s, 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
