"""Which options of a run beside its method have no effect, and why."""

from __future__ import annotations

from typing import Mapping

from trimtab.config.stage import Stage, Unread, under
from trimtab.spec import (
    Dtype,
    Engine,
    InflightCache,
    KvCacheDtype,
    Match,
    Mismatch,
    PolicyKind,
    PromptStyle,
    RolloutMode,
    RunSpec,
    TaskName,
    TrackerName,
)

WITHOUT_STRENGTH = (Mismatch.dtype, Mismatch.kv_fp8, Mismatch.raw_logprobs)
"""Injected gaps that are there or not."""
VLLM = (
    "prefix_caching", "cache_reset", "async_scheduling", "chunked_prefill", "kv_cache_dtype", "enforce_eager",
    "kv_cache_gib", "gpu_memory_utilization",
)  # fmt: skip


def _mismatch(spec: RunSpec) -> list[Unread]:
    kind, found = spec.mismatch.kind, list[Unread]()
    if kind is not Mismatch.none and kind not in WITHOUT_STRENGTH and spec.mismatch.strength == 0:
        found.append(Unread("mismatch.strength=0 injects nothing", ("mismatch.kind",)))
    if kind is Mismatch.dtype and spec.mismatch.dtype is spec.rollout.dtype:
        found.append(Unread("rollout.dtype is mismatch.dtype already", ("mismatch.kind", "mismatch.dtype")))
    if kind is Mismatch.kv_fp8 and spec.rollout.kv_cache_dtype is KvCacheDtype.fp8:
        found.append(Unread("rollout.kv_cache_dtype=fp8 keeps 8 bits already", ("mismatch.kind",)))
    if kind is Mismatch.raw_logprobs and spec.rollout.temperature == 1:
        found.append(Unread("at rollout.temperature=1 raw log-probs are the processed ones", ("mismatch.kind",)))
    if kind in WITHOUT_STRENGTH or kind is Mismatch.none:
        found.append(Unread(f"mismatch={kind.name} has no strength", ("mismatch.strength",)))
    if kind is not Mismatch.dtype:
        found.append(Unread(f"mismatch={kind.name} leaves the dtype as it is", ("mismatch.dtype",)))
    return found


def _rollout(spec: RunSpec) -> list[Unread]:
    engine, found = spec.rollout.engine, []
    if engine is not Engine.vllm:
        found.append(Unread(f"rollout={engine.name} is not vLLM", under("rollout", *VLLM)))
    if engine is not Engine.vllm or not spec.rollout.prefix_caching:
        found.append(Unread("rollout.prefix_caching=false keeps no prefixes", ("rollout.cache_reset",)))
    if spec.rollout.mode is RolloutMode["async"] and spec.rollout.inflight_cache is InflightCache.clear:
        why = "rollout.inflight_cache=clear empties the whole cache at each hand-over"
        found.append(Unread(why, ("rollout.cache_reset",)))
    if spec.rollout.mode is not RolloutMode["async"]:
        why = f"rollout.mode={spec.rollout.mode.name} hands weights over between responses"
        found.append(Unread(why, under("rollout", "max_lag", "too_old", "inflight_cache")))
    computed = spec.mismatch.dtype if spec.mismatch.kind is Mismatch.dtype else spec.rollout.dtype
    if computed is Dtype.float32:
        found.append(Unread("rollout.dtype=float32 has its head in float32 already", ("rollout.fp32_head",)))
    if engine is not Engine.replay:
        found.append(Unread(f"rollout={engine.name} replays nothing", ("rollout.path",)))
    if engine is Engine.replay:
        why = "rollout=replay has no model to sample from or to probe"
        keys = (
            "evaluation.every",
            *under("rollout", "probe_every", "dtype", "fp32_head", "max_num_seqs", "max_model_len"),
        )
        found.append(Unread(why, keys, {"rollout.probe_every": 0, "evaluation.every": 0}))
    return found


def _probe(spec: RunSpec) -> list[Unread]:
    if spec.rollout.probe_every == 0:
        return [Unread("rollout.probe_every=0 never probes", ("rollout.probe_sequences", "rollout.probe_bound"))]
    return []


def _policy(spec: RunSpec) -> list[Unread]:
    kind, found = spec.policy.kind, []
    if kind is not PolicyKind.hf:
        found.append(Unread(f"policy={kind.name} brings its own model", ("policy.path",)))
    if kind is not PolicyKind.tiny:
        found.append(Unread(f"policy={kind.name} is not warmed up", ("policy.warmup_accuracy",)))
    if spec.policy.dtype is Dtype.float32:
        found.append(Unread("policy.dtype=float32 has its head in float32 already", ("policy.fp32_head",)))
    return found


def _task(spec: RunSpec) -> list[Unread]:
    readers: Mapping[str, tuple[TaskName, ...]] = {
        "difficulty": (TaskName.arithmetic,),
        "style": (TaskName.arithmetic, TaskName.reasoning_gym, TaskName.jsonl, TaskName.hf),
        "train_size": (TaskName.arithmetic, TaskName.reasoning_gym),
        "eval_size": (TaskName.arithmetic, TaskName.reasoning_gym, TaskName.jsonl, TaskName.hf),
        "path": (TaskName.jsonl, TaskName.hf, TaskName.custom),
        "eval_path": (TaskName.jsonl,),
        "subset": (TaskName.hf,),
        "split": (TaskName.hf,),
        "eval_split": (TaskName.hf,),
        "prompt_key": (TaskName.jsonl, TaskName.hf),
        "answer_key": (TaskName.jsonl, TaskName.hf),
        "match": (TaskName.jsonl, TaskName.hf),
        "generator": (TaskName.reasoning_gym,),
        "options": (TaskName.reasoning_gym, TaskName.custom),
    }
    task = spec.task
    unread = under("task", *(key for key, names in readers.items() if task.name not in names))
    found = [Unread(f"task={task.name.name} has no use for it", unread)]
    if task.match is not Match.regex or "task.match" in unread:
        found.append(Unread("task.match is not regex", ("task.pattern",)))
    if "task.style" in unread:
        found.append(Unread(f"task={task.name.name} writes its own prompts", ("task.shots", "task.system")))
    if task.style is not PromptStyle.few_shot:
        found.append(Unread(f"task.style={task.style.name} shows no examples", ("task.shots",)))
    if task.style is not PromptStyle.chat:
        found.append(Unread(f"task.style={task.style.name} has no system message", ("task.system",)))
    return found


def _rest(spec: RunSpec) -> list[Unread]:
    found: list[Unread] = []
    if spec.evaluation.every and not spec.evaluation.greedy and not spec.evaluation.samples:
        found.append(Unread("nothing to evaluate with", ("evaluation.every",), {"evaluation.every": 0}))
    if spec.evaluation.every == 0 or found:
        found.append(Unread("evaluation.every=0 never evaluates", ("evaluation.greedy", "evaluation.samples")))
    readers: Mapping[str, tuple[TrackerName, ...]] = {
        "project": (TrackerName.wandb, TrackerName.trackio),
        "entity": (TrackerName.wandb,),
        "group": (TrackerName.wandb, TrackerName.trackio),
        "tags": (TrackerName.wandb, TrackerName.trackio),
        "finish_seconds": (TrackerName.wandb,),
    }
    keys = under("tracker", *(key for key, names in readers.items() if spec.tracker.name not in names))
    if keys:
        found.append(Unread(f"tracker={spec.tracker.name.name} does not read it", keys))
    if not spec.shadow:
        found.append(Unread("shadow=[] measures no method beside the run's", ("shadow_gradient_every",)))
    return found


STAGES: tuple[Stage, ...] = (_mismatch, _rollout, _probe, _policy, _task, _rest)
