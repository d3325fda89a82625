"""Rules about engines: what each needs, which gap it can inject, when it samples."""

from __future__ import annotations

import os
from typing import Iterator, Mapping

from trimtab.config.ranges import RANGES, Range, wrong
from trimtab.spec import Engine, LogprobsMode, Mismatch, RolloutMode, RunSpec

ONLY: Mapping[Mismatch, Engine] = {Mismatch.logit_noise: Engine.transformers, Mismatch.kv_fp8: Engine.vllm}
"""Injected gaps of one engine; the others are made around any engine that samples."""
STRENGTH: Mapping[Mismatch, Range] = {
    Mismatch.top_p: Range(0, 1, open_high=True, example=0.05),
    Mismatch.quantised_weights: Range(0, 1, example=1 / 127),
    Mismatch.shift: Range(0, 1, example=0.5),
}
REPORTED = (Mismatch.temperature, Mismatch.top_p)
"""Injected gaps of the sampler, whose log-probs are to tell of them."""
NOT_IN_FLIGHT = (Mismatch.stale, Mismatch.shift)


def engine(spec: RunSpec) -> Iterator[str]:
    """What the engine needs, and what only one engine can do."""
    rollout = spec.rollout
    if rollout.engine is Engine.replay and not rollout.path:
        yield wrong("rollout.path", rollout.path, "a run folder, or one of Parquet files, with rollout=replay",
                    "rollout.path=runs/NAME")  # fmt: skip
    elif rollout.engine is Engine.replay and rollout.path and not os.path.exists(rollout.path):
        allowed = "a run folder, or one of Parquet files, that exists, with rollout=replay"
        yield wrong("rollout.path", rollout.path, allowed, "rollout.path=runs/NAME")
    if rollout.engine is not Engine.replay and rollout.max_tokens >= rollout.max_model_len:
        allowed = f"less than rollout.max_model_len={rollout.max_model_len}, which holds the prompt too"
        longer = 2 * rollout.max_tokens + 128
        mend = f"rollout.max_model_len={longer}"
        if longer not in RANGES["rollout.max_model_len"]:
            mend = f"rollout.max_tokens={rollout.max_model_len // 2}"
        yield wrong("rollout.max_tokens", rollout.max_tokens, allowed, mend)


def mismatch(spec: RunSpec) -> Iterator[str]:
    """Which engine can make the gap, and how large it may be."""
    kind, strength, engine = spec.mismatch.kind, spec.mismatch.strength, spec.rollout.engine
    if kind is Mismatch.none:
        return
    if engine is Engine.replay:
        yield wrong("mismatch.kind", kind, "none with rollout=replay, which samples nothing", "mismatch=none")
    elif ONLY.get(kind, engine) is not engine:
        allowed = f"none with rollout={engine.name}; only rollout={ONLY[kind].name} can make this gap"
        yield wrong("mismatch.kind", kind, allowed, f"rollout={ONLY[kind].name} (or mismatch=none)")
    if kind in REPORTED and spec.rollout.logprobs_mode is LogprobsMode.raw:
        yield wrong("rollout.logprobs_mode", spec.rollout.logprobs_mode,
                    f"processed with mismatch={kind.name}: raw log-probs are not those of the policy that samples",
                    "rollout.logprobs_mode=processed")  # fmt: skip
    allowed_range = STRENGTH.get(kind)
    if allowed_range is not None and strength not in allowed_range:
        yield wrong("mismatch.strength", strength, f"{allowed_range} with mismatch={kind.name}",
                    f"mismatch.strength={allowed_range.example:.3g}")  # fmt: skip
    if kind is Mismatch.stale and strength % 1:
        yield wrong("mismatch.strength", strength, "a whole number of hand-overs with mismatch=stale",
                    f"mismatch.strength={max(1, round(strength))}")  # fmt: skip


def mode(spec: RunSpec) -> Iterator[str]:
    """Which engine can sample while the trainer trains."""
    rollout, kind = spec.rollout, spec.mismatch.kind
    flying = rollout.mode is RolloutMode["async"]
    if rollout.mode is not RolloutMode["sync"] and rollout.engine is Engine.replay:
        yield wrong("rollout.mode", rollout.mode, "sync with rollout=replay", "rollout.mode=sync")
    elif flying and rollout.engine is not Engine.vllm:
        allowed = f"sync, one_step_off with rollout={rollout.engine.name}, which lives in the trainer's process"
        yield wrong("rollout.mode", rollout.mode, allowed, "rollout=vllm (or rollout.mode=one_step_off)")
    if flying and kind in NOT_IN_FLIGHT:
        yield wrong("mismatch.kind", kind, "another with rollout.mode=async", "rollout.mode=one_step_off")


RULES = (engine, mismatch, mode)
