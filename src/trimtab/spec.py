"""Every option of a run: its type, its default and one line of help. The one home of defaults.

``config/schema.py`` turns these frozen classes into Hydra's (mutable) structured configs; yaml files
state only differences from them. Enum members are named as users type them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Dict, List, Optional


def opt(default: Any, help: str) -> Any:
    """A dataclass field with its help line; a list or dict default is copied per instance."""
    meta = {"help": help}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    if isinstance(default, type):
        return field(default_factory=default, metadata=meta)
    return field(default=default, metadata=meta)


class Algo(Enum):
    standard = "standard"
    bypass = "bypass"
    decoupled = "decoupled"
    reinforce = "reinforce"


class TisMode(Enum):
    off = "off"
    truncate = "truncate"
    clip = "clip"
    mask = "mask"


class Level(Enum):
    token = "token"
    sequence = "sequence"
    geometric = "geometric"


class Numerator(Enum):
    proximal = "proximal"
    current = "current"


class Denominator(Enum):
    kept = "kept"
    all = "all"


class RejectTerms(Enum):
    policy = "policy"
    all = "all"


class Aggregate(Enum):
    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    sequence_sum = "sequence_sum"


class KlEstimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class Baseline(Enum):
    group_mean = "group_mean"
    leave_one_out = "leave_one_out"
    none = "none"


class Scale(Enum):
    std = "std"
    none = "none"


class EqualGroups(Enum):
    keep = "keep"
    drop = "drop"


class Mismatch(Enum):
    none = "none"
    logit_noise = "logit_noise"


class Engine(Enum):
    vllm = "vllm"
    transformers = "transformers"
    replay = "replay"


class LogprobsMode(Enum):
    processed = "processed"
    raw = "raw"


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class PolicyKind(Enum):
    tiny = "tiny"
    smollm2 = "smollm2"
    hf = "hf"


class Attention(Enum):
    sdpa = "sdpa"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class TaskName(Enum):
    arithmetic = "arithmetic"
    reasoning_gym = "reasoning_gym"
    jsonl = "jsonl"
    hf = "hf"
    custom = "custom"


class Difficulty(Enum):
    one_digit = "one_digit"
    two_digit = "two_digit"
    two_digit_mixed = "two_digit_mixed"
    three_digit = "three_digit"
    product = "product"


class PromptStyle(Enum):
    plain = "plain"
    chat = "chat"
    few_shot = "few_shot"


class Match(Enum):
    exact = "exact"
    regex = "regex"
    math_verify = "math_verify"


class Schedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class TrackerName(Enum):
    file = "file"
    wandb = "wandb"


@dataclass(frozen=True)
class AlgoSpec:
    name: Algo = opt(Algo.decoupled, "which policies the loss compares; see docs/methods.md")
    metrics_only: bool = opt(False, "measure the mismatch and the correction, never touch the loss")


@dataclass(frozen=True)
class MisSpec:
    """The correction; names as in the miles table. None means: resolved from the level (config/resolve.py)."""

    tis_mode: TisMode = opt(TisMode.truncate, "how importance weights are bounded")
    tis_level: Level = opt(Level.token, "what one importance weight covers")
    tis_lower_bound: Optional[float] = opt(None, "lower bound of the weight (clip, mask)")
    tis_upper_bound: Optional[float] = opt(None, "upper bound of the weight")
    tis_batch_normalize: bool = opt(False, "divide weights by their batch mean")
    use_rs: bool = opt(False, "rejection sampling: leave out what lies outside the rs bounds")
    rs_level: Level = opt(Level.token, "what one rejection decision covers")
    rs_lower_bound: Optional[float] = opt(None, "smallest accepted ratio proximal/rollout")
    rs_upper_bound: Optional[float] = opt(None, "largest accepted ratio proximal/rollout")
    rs_veto_threshold: Optional[float] = opt(None, "reject a sequence holding a token with ratio below this")
    numerator: Optional[Numerator] = opt(None, "policy in the numerator; empty: proximal if decoupled, else current")


@dataclass(frozen=True)
class LossSpec:
    clip_low: float = opt(0.2, "PPO clip: the ratio's lower bound is 1 - clip_low")
    clip_high: float = opt(0.2, "PPO clip: the ratio's upper bound is 1 + clip_high")
    dual_clip: Optional[float] = opt(None, "cap of the loss at dual_clip * |advantage| for negative advantages (> 1)")
    aggregate: Aggregate = opt(Aggregate.token_mean, "how token losses become one number")
    sum_constant: Optional[float] = opt(None, "divisor of sequence_sum; empty: rollout.max_tokens")
    denominator: Denominator = opt(Denominator.all, "whether rejected tokens count in the denominator")
    reject_terms: RejectTerms = opt(
        RejectTerms.policy, "which terms a rejection removes: policy, or KL and entropy too"
    )
    kl_coef: float = opt(0.0, "weight of the KL penalty to the reference")
    kl_value: KlEstimator = opt(KlEstimator.k3, "estimator of the KL's reported value")
    kl_gradient: KlEstimator = opt(KlEstimator.k2, "estimator whose gradient is used; k2's is that of the true KL")
    kl_importance: bool = opt(False, "weight the KL term by current/rollout, for off-policy tokens")
    entropy_coef: float = opt(0.0, "weight of the entropy bonus")


@dataclass(frozen=True)
class AdvantageSpec:
    baseline: Baseline = opt(Baseline.group_mean, "what is taken from the reward")
    scale: Scale = opt(Scale.std, "what the centred reward is divided by")
    epsilon: float = opt(1e-6, "added to the standard deviation")
    equal_groups: EqualGroups = opt(EqualGroups.keep, "groups whose rewards are all equal: keep or drop their rows")


@dataclass(frozen=True)
class MismatchSpec:
    kind: Mismatch = opt(Mismatch.none, "an injected gap (rollout=transformers only)")
    strength: float = opt(0.0, "standard deviation of the noise added to the logits that are sampled from")


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
    name: TrackerName = opt(TrackerName.file, "metrics.jsonl alone, or W&B beside it")
    project: str = opt("trimtab", "W&B project")
    entity: Optional[str] = opt(None, "W&B entity")
    group: Optional[str] = opt(None, "W&B group")
    tags: List[str] = opt([], "W&B tags")


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
