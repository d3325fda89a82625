"""What options choose between; members are named as users type them."""

from __future__ import annotations

from enum import Enum


class Algo(Enum):
    standard = "standard"
    bypass = "bypass"
    decoupled = "decoupled"
    on_policy = "on_policy"


class Proximal(Enum):
    recompute = "recompute"
    loglinear = "loglinear"


class TisMode(Enum):
    off = "off"
    unbounded = "unbounded"
    truncate = "truncate"
    clip = "clip"
    mask = "mask"
    zero = "zero"


class Level(Enum):
    token = "token"
    sequence = "sequence"
    geometric = "geometric"


class Numerator(Enum):
    proximal = "proximal"
    current = "current"


class Statistic(Enum):
    ratio = "ratio"
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    abs = "abs"
    mult_error = "mult_error"
    prob_diff = "prob_diff"


class OverTokens(Enum):
    sum = "sum"
    mean = "mean"
    max = "max"
    every = "every"


class Sign(Enum):
    any = "any"
    positive = "positive"
    nonpositive = "nonpositive"
    negative = "negative"
    nonnegative = "nonnegative"


class Pair(Enum):
    proximal_rollout = "proximal_rollout"
    current_rollout = "current_rollout"
    current_proximal = "current_proximal"


class LossName(Enum):
    ppo_clip = "ppo_clip"
    importance = "importance"
    reinforce = "reinforce"
    cispo = "cispo"
    sapo = "sapo"
    gmpo = "gmpo"
    dppo_tv = "dppo_tv"
    dppo_kl = "dppo_kl"
    vespo = "vespo"


class RatioLevel(Enum):
    token = "token"
    sequence = "sequence"
    sequence_token = "sequence_token"


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
    group_mean = "group_mean"


class KlEstimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KlImportance(Enum):
    none = "none"
    rollout = "rollout"
    anchor = "anchor"
    current_live = "current_live"
    rollout_live = "rollout_live"
    anchor_live = "anchor_live"


class AdvantageKl(Enum):
    none = "none"
    anchor = "anchor"
    reference = "reference"


class Overlong(Enum):
    keep = "keep"
    drop = "drop"
    punish = "punish"


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
    temperature = "temperature"
    top_p = "top_p"
    dtype = "dtype"
    kv_fp8 = "kv_fp8"
    quantised_weights = "quantised_weights"
    stale = "stale"
    raw_logprobs = "raw_logprobs"
    shift = "shift"


class Engine(Enum):
    vllm = "vllm"
    transformers = "transformers"
    replay = "replay"


class LogprobsMode(Enum):
    processed = "processed"
    raw = "raw"


# "async" is a word of Python's own, so no class body can hold it.
RolloutMode = Enum("RolloutMode", [("sync", "sync"), ("one_step_off", "one_step_off"), ("async", "async")])
"""When the engine samples: before a step, during the one before, or all the time."""


class TooOld(Enum):
    drop = "drop"
    correct = "correct"


class InflightCache(Enum):
    clear = "clear"
    keep = "keep"


class CacheReset(Enum):
    reset = "reset"
    keep = "keep"
    salt = "salt"


class KvCacheDtype(Enum):
    auto = "auto"
    fp8 = "fp8"


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
    tensorboard = "tensorboard"
    trackio = "trackio"
