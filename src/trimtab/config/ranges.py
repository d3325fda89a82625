"""The interval that each number must lie in, and how a refusal is worded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Optional

from trimtab.config.keys import options, value_of, written
from trimtab.spec import RunSpec


def wrong(key: str, value: Any, allowed: str, mend: str) -> str:
    """One violation: what was given, what is allowed, and the override that mends it."""
    return f"{key}={written(value)} is refused; allowed: {allowed}; for example {mend}"


@dataclass(frozen=True)
class Range:
    """An interval of numbers; ``open_low`` leaves its lower end out, and ``example`` mends a wrong value."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    example: Optional[float] = None

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and -math.inf < value < math.inf  # math.isfinite fails for integers beyond a float

    def __str__(self) -> str:
        if math.isinf(self.low):
            return ""
        low = f"{'>' if self.open_low else '>='} {self.low:.10g}"
        return low if math.isinf(self.high) else f"{low} and {'<' if self.open_high else '<='} {self.high:.10g}"


# Whole numbers end where no run can want more, so that a slip of the keyboard is told and not tried.
NATURAL, COUNT, POSITIVE, AT_LEAST_0 = Range(0, 10**9), Range(1, 10**9), Range(0, open_low=True), Range(0)
RANGES: Mapping[str, Range] = {
    "seed": Range(0, 2**32 - 1),
    "steps": COUNT,
    "shadow_gradient_every": NATURAL,
    "mis.tis_lower_bound": Range(0, example=0.5),
    "mis.tis_upper_bound": Range(0, open_low=True, example=2),
    "mis.rs_lower_bound": Range(0, example=0.5),
    "mis.rs_upper_bound": Range(0, open_low=True, example=2),
    "mis.rs_veto_threshold": Range(0, 1, open_low=True, open_high=True, example=1e-4),
    "mis.m2_threshold": Range(0, open_low=True, example=0.04),
    "mis.log_ratio_clamp": Range(0, 80, open_low=True, example=20),
    "loss.clip_low": Range(0, 1, open_low=True),
    "loss.clip_high": POSITIVE,
    "loss.dual_clip": Range(1, open_low=True, example=3),
    "loss.ratio_cap": Range(1, open_low=True, example=20),
    "loss.sapo_tau_positive": POSITIVE,
    "loss.sapo_tau_negative": POSITIVE,
    "loss.sum_constant": Range(0, open_low=True, example=1024),
    "loss.kl_coef": AT_LEAST_0,
    "loss.log_ratio_clamp": Range(0, open_low=True, example=20),
    "loss.kl_input_clamp": Range(0, open_low=True, example=20),
    "loss.advantage_kl_coef": AT_LEAST_0,
    "loss.kl_clamp": Range(0, open_low=True, example=10),
    "loss.log_ratio_penalty": AT_LEAST_0,
    "loss.top_entropy": Range(0, 1, open_low=True),
    "loss.positive_nll_coef": AT_LEAST_0,
    "loss.entropy_coef": Range(-math.inf),
    "advantage.epsilon": AT_LEAST_0,
    "advantage.overlong_buffer": NATURAL,
    "advantage.overlong_penalty": AT_LEAST_0,
    "mismatch.strength": AT_LEAST_0,
    "rollout.batch_size": COUNT,
    "rollout.group_size": COUNT,
    "rollout.max_tokens": Range(1, 10**7),
    "rollout.temperature": POSITIVE,
    "rollout.top_p": Range(0, 1, open_low=True),
    "rollout.top_k": NATURAL,
    "rollout.kv_cache_gib": POSITIVE,
    "rollout.gpu_memory_utilization": Range(0, 1, open_low=True),
    "rollout.max_num_seqs": Range(1, 10**6),
    "rollout.max_model_len": Range(2, 10**7),
    "rollout.max_lag": NATURAL,
    "rollout.probe_every": NATURAL,
    "rollout.probe_sequences": Range(1, 10**6),
    "rollout.probe_bound": Range(0, open_low=True, example=1e-3),
    "rollout.record_every": NATURAL,
    "policy.logit_chunk": COUNT,
    "policy.warmup_accuracy": Range(0, 1, open_high=True),
    "task.shots": Range(1, 10**4),
    "task.train_size": COUNT,
    "task.eval_size": COUNT,
    "optim.lr": POSITIVE,
    "optim.epsilon": POSITIVE,
    "optim.weight_decay": AT_LEAST_0,
    "optim.max_grad_norm": POSITIVE,
    "optim.warmup_steps": NATURAL,
    "optim.epochs": Range(1, 10**5),
    "optim.minibatches": COUNT,
    "optim.microbatch_tokens": COUNT,
    "optim.max_bad_steps": COUNT,
    "optim.max_rejected_steps": NATURAL,
    "evaluation.every": NATURAL,
    "evaluation.samples": Range(0, 10**5),
    "tracker.finish_seconds": Range(0, 3600, open_low=True, example=5.0),
    "checkpoint.every": NATURAL,
    "checkpoint.keep": Range(2, 10**9),
}


def ranges(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """(key, violation) of every number outside its range of ``RANGES``; NaN and infinities always are."""
    for key, allowed in RANGES.items():
        value = value_of(spec, key)
        if value is None or value in allowed:
            continue
        finite = "" if -math.inf < value < math.inf else "a finite number "
        example = written(allowed.example or options()[key].default)
        yield key, wrong(key, value, f"{finite}{allowed}".strip(), f"{key}={example}")
