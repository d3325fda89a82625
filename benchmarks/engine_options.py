"""What each option at the engine does to the gap, and what it costs: the table of docs/how-to-measure-the-gap.md.

    OMP_NUM_THREADS=1 python benchmarks/engine_options.py [overrides]

Samples the built-in questions (``--samples`` responses of ``--tokens`` tokens each) under each option, and scores
the same tokens in trainers of several dtypes. Then, with prefix caching, samples behind a long common prompt before and
after the weights moved by 2 % of their standard deviation. Speed is tokens per second of CPU time, so that it means
something on a machine with other work; with one thread it is tokens/s of an idle core. One JSON line a row.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from trimtab.batch import Problem, Sample, Sampling
from trimtab.lab.bench import Bench, aligned, compose_to_measure, flat, opened
from trimtab.lab.gap import measure
from trimtab.lab.prompts import BUILTIN, problems
from trimtab.policy.model import CausalPolicy
from trimtab.protocol import Policy
from trimtab.spec import CacheReset, Dtype, KvCacheDtype, RolloutSpec

FIGURES = ("log_ratio_std", "dp_from_0.01", "dp_from_0.1", "dp_max", "token_k3", "sequence_ess")
TRAINERS = {  # policy.dtype, policy.fp32_head
    "float32": (Dtype.float32, False),
    "bfloat16": (Dtype.bfloat16, False),
    "bfloat16, fp32 head": (Dtype.bfloat16, True),
}
SYSTEM = "You answer questions of many kinds. " + "Be brief, be exact, say what you do not know, and give units. " * 12


def timed(bench: Bench, asked: Sequence[Problem], sampling: Sampling) -> tuple[list[Sample], float]:
    """Responses, and tokens per second of CPU time."""
    prompts = bench.encode(asked)
    begin = time.process_time()
    samples = bench.sample(prompts, sampling)
    return samples, sum(len(sample.ids) for sample in samples) / (time.process_time() - begin)


def told(engine: str, trainer: str, samples: Sequence[Sample], scorer: Policy, temperature: float,
         **more: Any) -> None:  # fmt: skip
    gap = measure(aligned(samples, scorer.score(flat(samples), temperature)))
    row: dict[str, Any] = {"engine": engine, "trainer": trainer, "tokens": gap.counts.scored}
    for name in FIGURES:
        estimate = gap[name]
        interval = (estimate.value, estimate.low, estimate.high) if estimate.bounded else (estimate.value,)
        row[name] = [float(f"{x:.3g}") for x in interval]
    print(json.dumps(row | more), flush=True)


def dtypes(bench: Bench, asked: Sequence[Problem], sampling: Sampling) -> None:
    """Dtype, head and KV cache of the engine against dtype and head of the trainer."""
    plain = bench.spec.rollout
    narrow = replace(plain, dtype=Dtype.bfloat16)
    eight = KvCacheDtype.fp8
    engines: dict[str, RolloutSpec] = {
        "float32": plain,
        "float16": replace(plain, dtype=Dtype.float16),
        "bfloat16": narrow,
        "bfloat16, fp32 head": replace(narrow, fp32_head=True),
        "bfloat16, fp8 KV": replace(narrow, kv_cache_dtype=eight),
        "float32, fp8 KV": replace(plain, kv_cache_dtype=eight),
    }
    scorers: dict[str, CausalPolicy] = {}
    for name, (dtype, head) in TRAINERS.items():
        scorers[name] = bench.another_policy(replace(bench.spec.policy, dtype=dtype, fp32_head=head))
    for name, rollout in engines.items():
        bench.restart(rollout)
        bench.sample(bench.encode(asked[:2]), replace(sampling, max_tokens=4))
        samples, speed = timed(bench, asked, sampling)
        for trainer, scorer in scorers.items():
            if trainer == "float32" or rollout.dtype is Dtype.bfloat16:
                told(name, trainer, samples, scorer, sampling.temperature, cpu_tokens_per_second=round(speed, 1))


def prefixes(bench: Bench, asked: Sequence[Problem], sampling: Sampling) -> None:
    """What a hand-over does to cached prefixes; the speed is of a second call under one version, the gap of a third."""
    long = [replace(problem, prompt=[{"role": "system", "content": SYSTEM}, *messages(problem)]) for problem in asked]
    plain = replace(bench.spec.rollout, prefix_caching=True)
    before = {name: tensor.clone() for name, tensor in bench.policy.state().items()}
    rows = {"no prefix cache": replace(plain, prefix_caching=False)}
    rows |= {f"prefix cache, {kind.value}": replace(plain, cache_reset=kind) for kind in CacheReset}
    for name, rollout in rows.items():
        bench.policy.load_state(before)
        bench.restart(rollout)
        bench.hand_over()
        bench.sample(bench.encode(long), sampling)
        _, speed = timed(bench, long, replace(sampling, seed=sampling.seed + 1))
        draw = torch.Generator().manual_seed(0)
        moved = {
            key: tensor + 0.02 * tensor.std() * torch.randn(tensor.shape, generator=draw)
            if tensor.ndim == 2
            else tensor
            for key, tensor in before.items()
        }
        bench.policy.load_state(before | moved)
        bench.hand_over()
        samples, _ = timed(bench, long, replace(sampling, seed=sampling.seed + 2))
        told(name, "float32", samples, bench.policy, sampling.temperature, cpu_tokens_per_second=round(speed, 1))
    bench.policy.load_state(before)


def messages(problem: Problem) -> list[dict[str, str]]:
    return problem.prompt if isinstance(problem.prompt, list) else [{"role": "user", "content": problem.prompt}]


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--questions", type=int, default=16, help="of the 16 built-in ones")
    given.add_argument("--samples", type=int, default=2, help="responses of each question")
    given.add_argument("--tokens", type=int, default=64, help="tokens of a response")
    given.add_argument("--only", choices=["dtypes", "prefixes"], help="one half of the table")
    given.add_argument("overrides", nargs="*", help="default: policy=smollm2 rollout.max_model_len=512")
    options = given.parse_args()
    spec = compose_to_measure(["policy=smollm2", "rollout.max_model_len=512", *options.overrides])
    with opened(spec) as bench:
        asked = problems(BUILTIN, spec, bench.policy)[: options.questions]
        sampling = bench.sampling(seed=1, per_prompt=options.samples, max_tokens=options.tokens)
        if options.only != "prefixes":
            dtypes(bench, asked, sampling)
        if options.only != "dtypes":
            prefixes(bench, asked, sampling)


if __name__ == "__main__":
    main()
