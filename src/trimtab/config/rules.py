"""Rules that a schema cannot state: ranges, and what two options must agree on. Every violation is reported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional

from trimtab.config.keys import options, value_of, written
from trimtab.config.resolve import resolve
from trimtab.errors import ConfigError
from trimtab.spec import (
    Algo,
    Attention,
    Baseline,
    Device,
    Dtype,
    Engine,
    Level,
    LogprobsMode,
    Match,
    Mismatch,
    Numerator,
    PolicyKind,
    PromptStyle,
    RunSpec,
    TaskName,
    TisMode,
)

Rule = Callable[[RunSpec], Iterator[str]]


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
        return math.isfinite(value) and above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        low = f"{'>' if self.open_low else '>='} {self.low:.10g}"
        return low if math.isinf(self.high) else f"{low} and {'<' if self.open_high else '<='} {self.high:.10g}"


NATURAL, COUNT, POSITIVE, AT_LEAST_0 = Range(0), Range(1), Range(0, open_low=True), Range(0)
RANGES: Mapping[str, Range] = {
    "seed": Range(0, 2**32 - 1),
    "steps": COUNT,
    "mis.tis_lower_bound": Range(0, open_low=True, example=0.5),
    "mis.tis_upper_bound": Range(0, open_low=True, example=2),
    "mis.rs_lower_bound": Range(0, open_low=True, example=0.5),
    "mis.rs_upper_bound": Range(0, open_low=True, example=2),
    "mis.rs_veto_threshold": Range(0, 1, open_low=True, open_high=True, example=1e-4),
    "loss.clip_low": Range(0, 1, open_low=True),
    "loss.clip_high": POSITIVE,
    "loss.dual_clip": Range(1, open_low=True, example=3),
    "loss.sum_constant": Range(0, open_low=True, example=1024),
    "loss.kl_coef": AT_LEAST_0,
    "loss.entropy_coef": Range(-math.inf),
    "advantage.epsilon": AT_LEAST_0,
    "mismatch.strength": AT_LEAST_0,
    "rollout.batch_size": COUNT,
    "rollout.group_size": COUNT,
    "rollout.max_tokens": COUNT,
    "rollout.temperature": POSITIVE,
    "rollout.kv_cache_gib": POSITIVE,
    "rollout.gpu_memory_utilization": Range(0, 1, open_low=True),
    "rollout.max_num_seqs": COUNT,
    "rollout.max_model_len": Range(2),
    "rollout.probe_every": NATURAL,
    "rollout.probe_sequences": COUNT,
    "rollout.probe_bound": Range(0, open_low=True, example=1e-3),
    "rollout.record_every": NATURAL,
    "policy.logit_chunk": COUNT,
    "policy.warmup_accuracy": Range(0, 1, open_high=True),
    "task.shots": COUNT,
    "task.train_size": COUNT,
    "task.eval_size": COUNT,
    "optim.lr": POSITIVE,
    "optim.epsilon": POSITIVE,
    "optim.weight_decay": AT_LEAST_0,
    "optim.max_grad_norm": POSITIVE,
    "optim.warmup_steps": NATURAL,
    "optim.epochs": COUNT,
    "optim.minibatches": COUNT,
    "optim.microbatch_tokens": COUNT,
    "optim.max_bad_steps": COUNT,
    "optim.max_rejected_steps": NATURAL,
    "evaluation.every": NATURAL,
    "evaluation.samples": NATURAL,
    "checkpoint.every": NATURAL,
    "checkpoint.keep": Range(2),
}


def ranges(spec: RunSpec) -> Iterator[str]:
    """Every number within its range of ``RANGES``; NaN and infinities never are."""
    for key, allowed in RANGES.items():
        value = value_of(spec, key)
        if value is not None and value not in allowed:
            default = options()[key].default
            yield wrong(key, value, str(allowed), f"{key}={written(allowed.example or default)}")


def full_support(spec: RunSpec) -> Iterator[str]:
    """The trainer scores the whole vocabulary at the rollout's temperature, so the engine must report just that."""
    rollout = spec.rollout
    why = "while the trainer scores the full vocabulary"
    if rollout.top_p != 1:
        yield wrong("rollout.top_p", rollout.top_p, f"1 {why}", "rollout.top_p=1")
    if rollout.top_k != 0:
        yield wrong("rollout.top_k", rollout.top_k, f"0 (off) {why}", "rollout.top_k=0")
    if rollout.logprobs_mode is LogprobsMode.raw and rollout.temperature != 1:
        allowed = f"processed at rollout.temperature={written(rollout.temperature)}, or raw at rollout.temperature=1"
        yield wrong("rollout.logprobs_mode", rollout.logprobs_mode, allowed, "rollout.logprobs_mode=processed")


def batches(spec: RunSpec) -> Iterator[str]:
    """Whole groups in a batch, whole rows in a minibatch, and groups large enough for their baseline."""
    rows, group, parts = spec.rollout.batch_size, spec.rollout.group_size, spec.optim.minibatches
    baseline = spec.advantage.baseline
    if rows < 1 or group < 1 or parts < 1:
        return  # ranges has told
    if rows % group:
        mend = f"rollout.batch_size={math.ceil(rows / group) * group}"
        yield wrong("rollout.batch_size", rows, f"multiples of rollout.group_size={group}", mend)
    if rows % parts:
        divisors = [d for d in range(1, rows + 1) if rows % d == 0]
        nearest = min(divisors, key=lambda d: abs(d - parts))
        yield wrong(
            "optim.minibatches", parts, f"divisors of rollout.batch_size={rows}", f"optim.minibatches={nearest}"
        )
    if group < 2 and baseline is not Baseline.none:
        allowed = f">= 2 with advantage.baseline={baseline.name}, whose advantages would all be 0"
        yield wrong("rollout.group_size", group, allowed, "rollout.group_size=8")


def numerator(spec: RunSpec) -> Iterator[str]:
    """Bypass has no proximal policy of its own; decoupled is defined by weighting with it."""
    algo, given = spec.algo.name, spec.mis.numerator
    if algo in (Algo.bypass, Algo.reinforce) and given is Numerator.proximal:
        yield wrong(
            "mis.numerator",
            given,
            f"current with algo={algo.name}, which skips the forward that scores the proximal policy",
            "mis.numerator=current (or algo=decoupled)",
        )
    if algo is Algo.decoupled and given is Numerator.current:
        allowed = "proximal with algo=decoupled, whose PPO ratio covers current/proximal already"
        yield wrong("mis.numerator", given, allowed, "mis.numerator=proximal (or algo=reinforce)")


def bounds(spec: RunSpec) -> Iterator[str]:
    """lower < upper, and 1 lies within: equal log-probs must give a weight of 1 and keep everything."""
    mis = spec.mis
    pairs = (
        ("tis", mis.tis_level, mis.tis_lower_bound, mis.tis_upper_bound, mis.tis_mode is TisMode.truncate),
        ("rs", mis.rs_level, mis.rs_lower_bound, mis.rs_upper_bound, False),
    )
    for stage, level, lower, upper, only_upper in pairs:
        if upper is None or (lower is None and not only_upper):
            continue  # this stage is off
        low, high = f"mis.{stage}_lower_bound", f"mis.{stage}_upper_bound"
        good = _example(stage, level)
        if lower is not None and not lower < upper:
            yield wrong(low, lower, f"less than {high}={written(upper)}", good)
        elif lower is not None and lower > 1:
            yield wrong(low, lower, "<= 1, so that equal log-probs (a weight of 1) are kept as they are", good)
        elif upper < 1:
            yield wrong(high, upper, ">= 1, so that equal log-probs (a weight of 1) are kept as they are", good)


def _example(stage: str, level: Level) -> str:
    lower, upper = (0.999, 1.001) if level is Level.geometric else (0.5, 2)
    return f"mis.{stage}_lower_bound={lower} mis.{stage}_upper_bound={upper}"


def engine(spec: RunSpec) -> Iterator[str]:
    """What the engine needs, and what only one engine can do."""
    rollout, mismatch = spec.rollout, spec.mismatch
    if rollout.engine is Engine.replay and not rollout.path:
        yield wrong("rollout.path", rollout.path, "a run folder, or one of Parquet files, with rollout=replay",
                    "rollout.path=runs/NAME")  # fmt: skip
    if mismatch.kind is Mismatch.logit_noise and rollout.engine is not Engine.transformers:
        allowed = f"none with rollout={rollout.engine.name}; only rollout=transformers samples from noisy logits"
        yield wrong("mismatch.kind", mismatch.kind, allowed, "rollout=transformers (or mismatch=none)")
    if rollout.engine is not Engine.replay and rollout.max_tokens >= rollout.max_model_len:
        allowed = f"less than rollout.max_model_len={rollout.max_model_len}, which holds the prompt too"
        mend = f"rollout.max_model_len={2 * rollout.max_tokens + 128}"
        yield wrong("rollout.max_tokens", rollout.max_tokens, allowed, mend)


def policy(spec: RunSpec) -> Iterator[str]:
    """What the model needs, and which attention runs where."""
    chosen = spec.policy
    if chosen.kind is PolicyKind.hf and not chosen.path:
        yield wrong("policy.path", chosen.path, "a model folder or a hub name with policy=hf",
                    "policy.path=./my-model (or policy=smollm2)")  # fmt: skip
    if chosen.kind is PolicyKind.tiny and chosen.warmup_accuracy and spec.task.style is PromptStyle.chat:
        yield wrong("task.style", spec.task.style, "plain, few_shot with policy=tiny, which is warmed up on texts",
                    "task.style=plain (or policy=smollm2)")  # fmt: skip
    if chosen.attention is Attention.flash_attention_2:
        if chosen.device is Device.cpu:
            yield wrong("policy.attention", chosen.attention, "sdpa, eager on a CPU", "policy.attention=sdpa")
        elif chosen.dtype is Dtype.float32:
            yield wrong("policy.attention", chosen.attention, "sdpa, eager with policy.dtype=float32",
                        "policy.dtype=bfloat16 (or policy.attention=sdpa)")  # fmt: skip


def task(spec: RunSpec) -> Iterator[str]:
    """What each task needs to find its problems."""
    chosen = spec.task
    if chosen.name is TaskName.jsonl and not chosen.path:
        yield wrong("task.path", chosen.path, "a file of JSON lines with task=jsonl", "task.path=problems.jsonl")
    if chosen.name is TaskName.hf and not chosen.path:
        yield wrong("task.path", chosen.path, "a dataset's folder or name with task=hf", "task.path=openai/gsm8k")
    if chosen.name is TaskName.custom and not _is_import_path(chosen.path):
        yield wrong("task.path", chosen.path, "package.module:name with task=custom", "task.path=my_package.task:make")
    if chosen.name is TaskName.reasoning_gym and not chosen.generator:
        yield wrong("task.generator", chosen.generator, "the name of a generator with task=reasoning_gym",
                    "task.generator=basic_arithmetic")  # fmt: skip
    if chosen.match is Match.regex and not chosen.pattern:
        yield wrong("task.pattern", chosen.pattern, "a regular expression with one group when task.match=regex",
                    "'task.pattern=\"answer: (.*)\"' (or task.match=exact)")  # fmt: skip


def _is_import_path(path: Optional[str]) -> bool:
    module, _, name = (path or "").partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def betas(spec: RunSpec) -> Iterator[str]:
    """AdamW takes two decay rates."""
    given = spec.optim.betas
    if len(given) != 2 or not all(0 <= b < 1 for b in given):
        yield wrong("optim.betas", given, "two numbers >= 0 and < 1", "optim.betas=[0.9,0.99]")


def resume(spec: RunSpec) -> Iterator[str]:
    """A word, or a folder that is there."""
    if spec.resume not in ("no", "auto") and not Path(spec.resume).is_dir():
        yield wrong("resume", spec.resume, "no, auto, or an existing run or checkpoint folder", "resume=auto")


# Numbers are judged as given, even where nothing reads them; agreement only where the options are in force.
AS_GIVEN: tuple[Rule, ...] = (ranges, betas, full_support, batches, resume)
IN_FORCE: tuple[Rule, ...] = (numerator, bounds, engine, policy, task)


def check(spec: RunSpec) -> None:
    """Raise ConfigError with one line for each violation."""
    found = [line for rule in AS_GIVEN for line in rule(spec)]
    resolved = resolve(spec)
    found += [line for rule in IN_FORCE for line in rule(resolved)]
    if found:
        raise ConfigError("\n".join(found))
