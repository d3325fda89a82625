"""Rollout by vLLM in a process of its own: it samples while the trainer trains, and takes weights in mid-response."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import queue
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from trimtab.batch import Prompt, Sample, Sampling
from trimtab.errors import EngineError
from trimtab.rollout.async_vllm_process import POLL, PULSE, EngineDied, EngineProcess
from trimtab.rollout.async_vllm_weights import SharedWeights
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
from trimtab.rollout.vllm_options import effective, silent_change
from trimtab.rollout.vllm_process import prepare_environment
from trimtab.spec import CacheReset, InflightCache, RolloutSpec

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")
_DEATHS = 3  # of the engine's process, one after the other without a finished response between them


@dataclass(frozen=True)
class _Group:
    """Responses to one prompt that are being written."""

    prompt: Prompt
    sampling: Sampling


class AsyncVllmEngine:
    """vLLM's asynchronous engine (``protocol.Streaming``).

    Groups of responses are submitted under a number and fetched when they are finished, in the order in which they
    finish. A hand-over pauses the engine between two tokens; running responses go on under the new weights, and each
    token carries the version that sampled it. Their KV cache is dropped and computed anew (``inflight_cache=clear``:
    later tokens are exactly the new policy's) or kept (``keep``: they are sampled from a mixture that no weights have).

    When the engine's process dies it is started again with the last weights, and what had not finished is sampled anew.
    """

    def __init__(self, folder: Path, spec: RolloutSpec) -> None:
        check_options(spec)
        prepare_environment(spec.enforce_eager)
        self._folder, self._spec = folder, spec
        self._salted = _salted(spec)
        self._weights = SharedWeights()
        self._version = self._handovers = 0
        self._open: dict[int, _Group] = {}
        self._done: queue.SimpleQueue[tuple[int, int, list[Sample] | BaseException]] = queue.SimpleQueue()
        self._life = 0  # answers of an earlier process are not this one's
        self._ids = itertools.count()
        self._deaths = 0
        self._restarts = 0
        self._process: EngineProcess | None = EngineProcess(folder, spec)
        self._refuse_silent_changes()
        self._try_out()

    # -- sampling ----------------------------------------------------------------------------------------------------

    def submit(self, key: int, prompt: Prompt, sampling: Sampling) -> None:
        """Begin ``samples_per_prompt`` responses to ``prompt``; ``finished`` returns them under ``key``."""
        check_request([prompt], sampling, self._spec.max_model_len, self._vocabulary())
        if key in self._open:
            raise EngineError(f"group {key} is being sampled already")
        self._open[key] = _Group(prompt, sampling)
        self._begin(key)

    def finished(self, wait: bool = True) -> tuple[int, list[Sample]] | None:
        """The next group that is finished; None when none is open, or with ``wait`` false, when none is finished."""
        silent = 0.0
        while self._open:
            try:
                life, key, result = self._done.get(timeout=POLL) if wait else self._done.get_nowait()
            except queue.Empty:
                if not wait:
                    return None
                silent += POLL
                self._look_after(silent)
                silent = 0.0 if silent > PULSE else silent
                continue
            if life != self._life or key not in self._open:
                continue
            match result:
                case EngineDied():
                    self._revive(self._live().died())
                case BaseException():
                    raise EngineError(f"vLLM failed while generating: {reason(result)}") from result
                case samples:
                    del self._open[key]
                    self._deaths = 0
                    return key, samples
        return None

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        """``samples_per_prompt`` responses of each prompt, prompt by prompt, beside the groups that are running."""
        check_request(prompts, sampling, self._spec.max_model_len, self._vocabulary())
        count = sampling.samples_per_prompt
        outputs = self._answers(
            [
                (self._request(prompt.ids), params_of(sampling, row_seed(sampling.seed, p, s)))
                for p, prompt in enumerate(prompts)
                for s in range(count)
            ]
        )
        return [sample_of(prompts[i // count], out, self._versions(out)) for i, out in enumerate(outputs)]

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, T=1) of tokens 1.. of each row; NaN for one that lies at the model's very end."""
        check_rows(rows)
        kept = [list(row)[: self._spec.max_model_len - 1] for row in rows]  # one more is sampled
        outputs = self._answers([(self._request(row), params_to_score()) for row in kept])
        return [scores_of(row, len(ids), output) for row, ids, output in zip(rows, kept, outputs, strict=True)]

    # -- weights -----------------------------------------------------------------------------------------------------

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Hand weights over through shared memory; tokens sampled from then on are of ``version``."""
        self._weights.write(weights)
        self._version = version
        self._handovers += 1  # a version may be handed over twice, with other weights
        try:
            self._live().call(self._take_over(), seconds=None)
        except EngineDied as death:
            self._revive(death)  # which hands the weights over

    async def _take_over(self) -> None:
        llm, clear = self._live().llm, self._spec.inflight_cache is InflightCache.clear
        await llm.pause_generation(mode="keep", clear_cache=clear)
        try:
            (answer,) = await llm.collective_rpc("trimtab_load", args=self._weights.address())
        except REFUSALS as error:
            raise EngineError(
                f"vLLM could not take over the trainer's weights ({reason(error)}). "
                "Trainer and engine must load the same model (policy.kind, policy.path)"
            ) from error
        names, loaded = answer
        check_handover(self._weights.names, (), set(names) - set(loaded))
        await llm.update_weight_version(str(self._version))
        await llm.resume_generation()

    # -- its life ----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Settings as vLLM runs them, read from its own configuration object."""
        versions = {"engine": "vllm in its own process", "vllm": version_of_vllm(), "torch": torch.__version__}
        here = {"inflight_cache": self._spec.inflight_cache.value, "restarts": self._restarts}
        found = versions | effective(self._live().llm.vllm_config, self._spec) | here
        return found | {"cache_reset": _cache_reset(self._spec)} if self._spec.prefix_caching else found

    def restarts(self) -> int:
        """How often the engine's process had to be started again."""
        return self._restarts

    @property
    def pid(self) -> int:
        """The id of the engine's process."""
        return self._live().pid

    def close(self) -> None:
        """End the engine's process; a second call does nothing."""
        self._open.clear()
        if self._process is not None:
            self._process.close()
            self._process = None
        self._weights.close()

    def _live(self) -> EngineProcess:
        if self._process is None:
            raise EngineError("this vLLM engine was closed")
        return self._process

    def _vocabulary(self) -> int:
        return int(self._live().llm.vllm_config.model_config.get_vocab_size())

    def _revive(self, death: EngineDied) -> None:
        """Start the process again with the last weights, and what had not finished from its beginning."""
        while True:
            self._deaths += 1
            if self._deaths > _DEATHS:
                raise EngineError(
                    f"the engine's process died {self._deaths} times without finishing a response between: {death}"
                ) from death
            log.warning(
                "the engine's process died: %s; starting it again with policy version %d, %d unfinished groups anew",
                death, self._version, len(self._open),
            )  # fmt: skip
            self._live().close()
            self._life += 1
            self._restarts += 1
            self._process = EngineProcess(self._folder, self._spec)
            try:
                if self._weights.written:
                    self._process.call(self._take_over())
                break
            except EngineDied as again:
                death = again
        for key in self._open:
            self._begin(key)

    def _alive(self, act: Callable[[EngineProcess], T]) -> T:
        """What ``act`` returns, tried again after each death of the process."""
        while True:
            try:
                return act(self._live())
            except EngineDied as death:
                self._revive(death)

    def _look_after(self, silent: float) -> None:
        process = self._live()
        try:
            if not process.alive():
                raise process.died()
            if silent > PULSE:
                process.check_reacts()
        except EngineDied as death:
            self._revive(death)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _begin(self, key: int) -> None:
        group, life = self._open[key], self._life
        future = self._live().go(self._group(group, self._request(group.prompt.ids)))

        def note(done: concurrent.futures.Future[list[Sample]]) -> None:
            if done.cancelled():
                return
            error = done.exception()
            self._done.put((life, key, done.result() if error is None else error))

        future.add_done_callback(note)

    async def _group(self, group: _Group, request: Any) -> list[Sample]:
        count, seed = group.sampling.samples_per_prompt, group.sampling.seed
        outputs = await asyncio.gather(
            *(self._respond(request, params_of(group.sampling, row_seed(seed, 0, s))) for s in range(count))
        )
        return [sample_of(group.prompt, output, self._versions(output)) for output in outputs]

    def _request(self, ids: Sequence[int]) -> Any:
        return request_of(ids, f"hand-over {self._handovers}" if self._salted else None)

    async def _respond(self, request: Any, params: SamplingParams) -> RequestOutput:
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        params.output_kind = RequestOutputKind.FINAL_ONLY
        last: RequestOutput | None = None
        process = self._live()
        try:
            async for output in process.llm.generate(request, params, str(next(self._ids))):
                last = output
        except EngineDeadError as error:
            raise EngineDied from error
        assert last is not None
        return last

    def _answers(self, requests: Sequence[tuple[Any, SamplingParams]]) -> list[RequestOutput]:
        async def all_of() -> list[RequestOutput]:
            return await asyncio.gather(*(self._respond(request, params) for request, params in requests))

        try:
            return self._alive(lambda process: process.call(all_of()))
        except REFUSALS as error:
            raise EngineError(f"vLLM failed while generating: {reason(error)}") from error

    def _versions(self, output: RequestOutput) -> tuple[int, ...]:
        """The policy version of each token, by the labels that the engine put on them."""
        (completion,) = output.outputs
        spans, versions = completion.weight_versions or [], list[int]()
        for span in spans:
            known = 0 if span.version == "default" else int(span.version)  # default: before the first hand-over
            versions += [known] * (span.end - span.start)
        if len(versions) != len(completion.token_ids):
            raise EngineError(f"vLLM labelled {len(versions)} of {len(completion.token_ids)} tokens with a version")
        return tuple(versions)

    def _refuse_silent_changes(self) -> None:
        running = self.describe()
        changed = silent_change(running, self._spec)
        if changed is not None:
            key, wanted, runs = changed
            self.close()
            raise EngineError(
                f"rollout.{key}={wanted} was asked for, but vLLM runs {key}={runs} on {running['device']}; "
                f"set rollout.{key} to what it runs, or use rollout=transformers rollout.mode=one_step_off"
            )

    def _try_out(self) -> None:
        # vLLM refuses some models (on a CPU: head sizes without a kernel) only at the first request.
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, detokenize=False)
        try:
            self._live().call(self._respond({"prompt_token_ids": [0, 0]}, params))
        except (EngineDied, *REFUSALS) as error:
            self.close()
            raise EngineError(f"vLLM does not run this model: {error}") from error


def _salted(spec: RolloutSpec) -> bool:
    """Whether prefixes are found by requests of their own version only; running responses hold on to their blocks, so

    that a kept cache can't be emptied (``cache_reset=reset``) and is salted instead.
    """
    kept = spec.inflight_cache is InflightCache.keep
    return spec.prefix_caching and (
        spec.cache_reset is CacheReset.salt or (kept and spec.cache_reset is CacheReset.reset)
    )


def _cache_reset(spec: RolloutSpec) -> str:
    if spec.inflight_cache is InflightCache.clear:
        return "reset: emptied at each hand-over, with the cache of running responses"
    if _salted(spec):
        return "salt: prefixes are kept, and found by requests of the same policy version only"
    return "keep: prefixes computed under older weights are used again, a fault"
