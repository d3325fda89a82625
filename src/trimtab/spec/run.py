"""Every option of a run beside its method: engines, models, tasks, optimiser, files; and the whole, ``RunSpec``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from trimtab.spec.choices import (
    Attention,
    CacheReset,
    Device,
    Difficulty,
    Dtype,
    Engine,
    InflightCache,
    KvCacheDtype,
    LogprobsMode,
    Match,
    Mismatch,
    PolicyKind,
    PromptStyle,
    RolloutMode,
    Schedule,
    TaskName,
    TooOld,
    TrackerName,
)
from trimtab.spec.method import AdvantageSpec, AlgoSpec, LossSpec, MisSpec
from trimtab.spec.option import opt


@dataclass(frozen=True)
class MismatchSpec:
    kind: Mismatch = opt(Mismatch.none, "an injected gap between engine and trainer; the run carries its label")
    strength: float = opt(
        0.0,
        "logit_noise: standard deviation; temperature: T times 1 + this; top_p: mass cut off; quantised_weights: step "
        "over the row's largest (1/127: int8); stale: hand-overs left out; shift: share of responses moved by one",
    )
    dtype: Dtype = opt(Dtype.bfloat16, "mismatch=dtype: what the engine computes in")


@dataclass(frozen=True)
class RolloutSpec:
    engine: Engine = opt(Engine.vllm, "who samples the tokens")
    batch_size: int = opt(128, "responses per step")
    group_size: int = opt(4, "responses per prompt")
    max_tokens: int = opt(8, "longest response")
    temperature: float = opt(1.0, "sampling temperature")
    top_p: float = opt(1.0, "nucleus sampling; must be 1 while the trainer scores the full vocabulary")
    top_k: int = opt(0, "top-k sampling, 0 for off; must be 0 while the trainer scores the full vocabulary")
    logprobs_mode: LogprobsMode = opt(
        LogprobsMode.processed, "log-probs of the sampled distribution, or raw ones at T=1"
    )
    dtype: Dtype = opt(Dtype.float32, "dtype of the engine's weights")
    prefix_caching: bool = opt(False, "vLLM: reuse the KV cache of equal prefixes")
    async_scheduling: bool = opt(False, "vLLM: schedule a step ahead")
    chunked_prefill: bool = opt(True, "vLLM: long prompts in parts, between tokens of other responses")
    cache_reset: CacheReset = opt(CacheReset.reset, "vLLM, prefix caching: what a hand-over does to cached prefixes")
    kv_cache_dtype: KvCacheDtype = opt(KvCacheDtype.auto, "vLLM: dtype of the KV cache; auto: the weights'")
    fp32_head: bool = opt(False, "the engine computes the logits in float32 whatever the dtype")
    enforce_eager: bool = opt(True, "vLLM: no graph capture or compilation")
    kv_cache_gib: float = opt(0.5, "vLLM on CPU: memory of the KV cache")
    gpu_memory_utilization: float = opt(0.4, "vLLM on a GPU: share of its memory")
    max_num_seqs: int = opt(128, "sequences at once")
    max_model_len: int = opt(256, "longest prompt plus response")
    probe_every: int = opt(10, "hand-overs between two probes; each step's own gap is checked too; 0 for neither")
    probe_sequences: int = opt(4, "sequences scored by both sides in a probe")
    probe_bound: Optional[float] = opt(None, "largest mean |log-ratio| between engine and trainer; empty: by dtype")
    record_every: int = opt(50, "steps between two recordings to rollouts/*.parquet, 0 for never")
    path: Optional[str] = opt(None, "replay: a run folder, or a folder of Parquet files")
    mode: RolloutMode = opt(RolloutMode["sync"], "sample before each step, during the one before, or all the time")
    max_lag: int = opt(1, "async: policy versions that a training batch's oldest token may lie behind")
    too_old: TooOld = opt(TooOld.drop, "async: drop responses that exceed max_lag, or leave them to the correction")
    inflight_cache: InflightCache = opt(InflightCache.clear, "async: the KV cache of running responses at a hand-over")


@dataclass(frozen=True)
class PolicySpec:
    kind: PolicyKind = opt(PolicyKind.tiny, "which model is trained")
    path: Optional[str] = opt(None, "policy=hf: a model folder or a hub name")
    dtype: Dtype = opt(Dtype.float32, "dtype of the trainer's weights")
    fp32_head: bool = opt(False, "compute the logits in float32 whatever the dtype")
    gradient_checkpointing: bool = opt(False, "recompute activations in the backward pass")
    attention: Attention = opt(Attention.sdpa, "attention implementation of transformers")
    device: Device = opt(Device.auto, "where the trainer computes")
    logit_chunk: int = opt(1024, "tokens whose logits are in memory at once")
    warmup_accuracy: float = opt(
        0.3, "policy=tiny: sampled accuracy that the supervised warm-up leaves it with, 0 for random weights"
    )
    cache_dir: Optional[str] = opt(None, "where prepared models lie; empty: $TRIMTAB_CACHE or ~/.cache/trimtab")


@dataclass(frozen=True)
class TaskSpec:
    name: TaskName = opt(TaskName.arithmetic, "where prompts and rewards come from")
    difficulty: Difficulty = opt(Difficulty.two_digit, "arithmetic: which sums")
    style: PromptStyle = opt(PromptStyle.plain, "how the prompt is written")
    shots: int = opt(4, "few_shot: worked examples before the question")
    system: Optional[str] = opt(None, "chat: the system message")
    stop: Optional[str] = opt(None, "a response ends at the first token whose text holds this")
    train_size: int = opt(7000, "generated tasks: problems to train on")
    eval_size: int = opt(256, "problems to evaluate on")
    path: Optional[str] = opt(None, "jsonl: the file; hf: the dataset's folder or name; custom: package.module:name")
    eval_path: Optional[str] = opt(None, "jsonl: the evaluation file; empty: the last eval_size lines of path")
    subset: Optional[str] = opt(None, "hf: the dataset's configuration name")
    split: str = opt("train", "hf: split to train on")
    eval_split: Optional[str] = opt(None, "hf: split to evaluate on; empty: the last eval_size rows of split")
    prompt_key: str = opt("prompt", "jsonl, hf: field with the prompt")
    answer_key: str = opt("answer", "jsonl, hf: field with the answer")
    match: Match = opt(Match.exact, "jsonl, hf: how a response is compared with the answer")
    pattern: Optional[str] = opt(None, "regex: first group of the last match is compared with the answer")
    generator: Optional[str] = opt(None, "reasoning_gym: name of the generator")
    options: Dict[str, Any] = opt({}, "reasoning_gym: the generator's options; custom: keyword arguments")


@dataclass(frozen=True)
class OptimSpec:
    lr: float = opt(3e-4, "peak learning rate of AdamW")
    betas: List[float] = opt([0.9, 0.99], "AdamW's two decay rates")
    epsilon: float = opt(1e-8, "AdamW's epsilon")
    weight_decay: float = opt(0.0, "AdamW's weight decay")
    max_grad_norm: float = opt(1.0, "gradient norm above which it is scaled down")
    schedule: Schedule = opt(Schedule.linear, "learning rate after the warm-up")
    warmup_steps: int = opt(0, "steps of linear warm-up")
    epochs: int = opt(1, "passes over a rollout batch")
    minibatches: int = opt(1, "optimiser steps per pass")
    microbatch_tokens: int = opt(16384, "padded tokens (prompt and response) in one forward pass")
    max_bad_steps: int = opt(3, "abort after this many non-finite steps in a row")
    max_rejected_steps: int = opt(0, "abort after this many all-rejected steps in a row, 0 for never")


@dataclass(frozen=True)
class EvalSpec:
    every: int = opt(50, "steps between evaluations (also before the first and after the last), 0 for never")
    greedy: bool = opt(True, "one greedy response per problem")
    samples: int = opt(1, "sampled responses per problem, 0 for none")


@dataclass(frozen=True)
class CheckpointSpec:
    every: int = opt(50, "steps between checkpoints, 0 for only at the end and on a signal")
    keep: int = opt(2, "checkpoints to keep, at least 2 so that a damaged one has a predecessor")


@dataclass(frozen=True)
class TrackerSpec:
    name: TrackerName = opt(TrackerName.file, "metrics.jsonl alone, or a tracker beside it")
    project: str = opt("trimtab", "W&B, trackio: project")
    entity: Optional[str] = opt(None, "W&B entity")
    group: Optional[str] = opt(None, "W&B, trackio: group; empty: the sweep's name")
    tags: List[str] = opt([], "W&B, trackio: tags")
    finish_seconds: float = opt(5.0, "W&B: how long a run's end waits for the last rows to be uploaded")


@dataclass(frozen=True)
class DebugSpec:
    deterministic: bool = opt(True, "refuse torch operations that are not deterministic")
    anomaly: bool = opt(False, "torch's anomaly detection: find the operation that made a NaN (slow)")


@dataclass(frozen=True)
class RunSpec:
    seed: int = opt(0, "seeds everything: data order, sampling, model initialisation")
    steps: int = opt(300, "rollout batches to train on")
    run_dir: str = opt("", "where the run's files go; empty: runs/<time>_<algo>_<hash>")
    resume: str = opt("no", "no | auto (the last good checkpoint in run_dir, if any) | a run or checkpoint folder")
    shadow: Any = opt([], "presets measured beside the method, each step, without touching the run: a list, or all")
    shadow_gradient_every: int = opt(0, "steps between comparisons of the shadows' gradients, 0 for never")
    algo: AlgoSpec = opt(AlgoSpec, "algorithm")
    mis: MisSpec = opt(MisSpec, "correction")
    loss: LossSpec = opt(LossSpec, "objective")
    advantage: AdvantageSpec = opt(AdvantageSpec, "advantages")
    mismatch: MismatchSpec = opt(MismatchSpec, "injected gap")
    rollout: RolloutSpec = opt(RolloutSpec, "rollout engine")
    policy: PolicySpec = opt(PolicySpec, "trained model")
    task: TaskSpec = opt(TaskSpec, "prompts and rewards")
    optim: OptimSpec = opt(OptimSpec, "optimiser")
    evaluation: EvalSpec = opt(EvalSpec, "evaluation")
    checkpoint: CheckpointSpec = opt(CheckpointSpec, "checkpoints")
    tracker: TrackerSpec = opt(TrackerSpec, "trackers")
    debug: DebugSpec = opt(DebugSpec, "debugging")
