"""From ``rollout.*`` to vLLM's own options, and back: what the engine that runs makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.spec import CacheReset, LogprobsMode, RolloutSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CPU_BLOCK = 32  # tokens per KV block; vLLM's 128 on a CPU would keep prefixes below 128 tokens out of the prefix cache


def engine_options(folder: Path, spec: RolloutSpec, cpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``LLM`` and ``AsyncEngineArgs`` for the model in ``folder``."""
    options: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "dtype": spec.dtype.value,
        "seed": 0,
        "logprobs_mode": vllm_mode(spec.logprobs_mode),
        "enable_prefix_caching": spec.prefix_caching,
        "async_scheduling": spec.async_scheduling,
        "enable_chunked_prefill": spec.chunked_prefill,
        "kv_cache_dtype": spec.kv_cache_dtype.value,
        "enforce_eager": spec.enforce_eager,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "kv_cache_memory_bytes": int(spec.kv_cache_gib * 2**30) if cpu else None,
        "block_size": _CPU_BLOCK if cpu else None,
        "disable_log_stats": True,
    }
    if spec.fp32_head:
        options["hf_overrides"] = {"head_dtype": "float32"}
    return options


def effective(config: VllmConfig, spec: RolloutSpec) -> dict[str, Any]:
    """Settings as vLLM runs them, read from its own configuration; ``cache_reset`` is what this package does."""
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    return {
        "device": config.device_config.device_type,
        "dtype": _plain(model.dtype),
        "head_dtype": _plain(model.head_dtype),
        "logprobs_mode": str(model.logprobs_mode),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "cache_reset": _cache_reset(spec, bool(cache.enable_prefix_caching)),
        "async_scheduling": bool(scheduler.async_scheduling),
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "enforce_eager": bool(model.enforce_eager),
        "max_model_len": int(model.max_model_len),
        "max_num_seqs": int(scheduler.max_num_seqs),
        "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
        "kv_block_size": int(cache.block_size),
        "kv_cache_dtype": str(cache.cache_dtype),
        "kv_blocks": int(cache.num_gpu_blocks or 0),
    }


def silent_change(running: dict[str, Any], spec: RolloutSpec) -> tuple[str, Any, Any] | None:
    """The first option that vLLM runs otherwise than asked for, as (key, wanted, running); None where all agree."""
    wanted: dict[str, Any] = {
        "logprobs_mode": vllm_mode(spec.logprobs_mode),
        "prefix_caching": spec.prefix_caching,
        "async_scheduling": spec.async_scheduling,
        "chunked_prefill": spec.chunked_prefill,
        "kv_cache_dtype": spec.kv_cache_dtype.value,
        "enforce_eager": spec.enforce_eager,
        "dtype": spec.dtype.value,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
    }
    found = ((key, value, running[key]) for key, value in wanted.items() if running[key] != value)
    if spec.fp32_head and running["head_dtype"] != "float32":
        return "fp32_head", True, False
    return next(found, None)


def vllm_mode(mode: LogprobsMode) -> str:
    """vLLM's name of what its log-probs mean."""
    match mode:
        case LogprobsMode.processed:
            return "processed_logprobs"
        case LogprobsMode.raw:
            return "raw_logprobs"


def _cache_reset(spec: RolloutSpec, caching: bool) -> str:
    if not caching:
        return "no prefix cache"
    match spec.cache_reset:
        case CacheReset.reset:
            return "reset: emptied at each hand-over and before each call"
        case CacheReset.salt:
            return "salt: prefixes are kept, and found by requests of the same policy version only"
        case CacheReset.keep:
            return "keep: prefixes computed under older weights are used again, a fault"


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
