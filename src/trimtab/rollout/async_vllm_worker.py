"""What runs in the engine's process: vLLM imports this before it loads a model, and adds ``Receiver`` to its worker."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

import torch

from trimtab.rollout.async_vllm_weights import mapped
from trimtab.rollout.vllm_process import plain_linear_layers, rewind_cpu_generators

TRAINER = "TRIMTAB_TRAINER"
"""Environment variable with the trainer's process id; set for the engine's process alone."""


class Receiver:
    """Methods that the trainer calls by name; vLLM mixes them into its worker class."""

    def trimtab_load(self, path: str, layout: str) -> tuple[list[str], list[str]]:
        """Load the weights that lie at ``path``; returns the model's names and those that it loaded."""
        model = self.get_model()  # type: ignore[attr-defined]
        with torch.no_grad():
            loaded = model.load_weights(mapped(path, layout))
        names = [name for name, _ in model.named_parameters()]
        # Some models do not report what they loaded; the probe after the hand-over still covers them.
        return names, names if loaded is None else sorted(loaded)

    def trimtab_process(self) -> int:
        """The id of this process."""
        return os.getpid()


def die_with(trainer: int) -> None:
    """End this process at once when the trainer's ends, however it ends: an engine without a trainer is left behind."""

    def wait(file: int) -> None:
        select.select([file], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        file = os.pidfd_open(trainer)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=wait, args=(file,), daemon=True, name="trainer watch").start()


_for_ever = contextlib.ExitStack()  # what is changed in the engine's process stays changed


def _enlist(trainer: str | None) -> None:
    if trainer is None or int(trainer) == os.getpid():
        return
    die_with(int(trainer))
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _for_ever.enter_context(plain_linear_layers())
        rewind_cpu_generators()


_enlist(os.environ.get(TRAINER))
