"""AdamW with a warm-up and a schedule that advance only with applied steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trimtab.spec import OptimSpec, Schedule


def learning_rate(spec: OptimSpec, update: int, total: int) -> float:
    """Rate of optimiser step ``update`` (0, 1, …) of ``total``: linear warm-up, then the schedule down to 0."""
    if update < spec.warmup_steps:
        return spec.lr * (update + 1) / spec.warmup_steps
    share = (update - spec.warmup_steps) / max(total - spec.warmup_steps, 1)
    match spec.schedule:
        case Schedule.constant:
            return spec.lr
        case Schedule.linear:
            return spec.lr * max(1.0 - share, 0.0)
        case Schedule.cosine:
            return spec.lr * 0.5 * (1.0 + math.cos(math.pi * min(share, 1.0)))


SMALL = 4_000_000  # parameters up to which waking a second thread for each tensor costs more than it saves


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Have torch use one thread inside the block."""
    threads = torch.get_num_threads()
    if not wanted or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Optimizer:
    """Clip, check, step. ``updates`` counts applied steps and is what the schedule follows."""

    def __init__(self, parameters: Iterable[Tensor], spec: OptimSpec, total_updates: int) -> None:
        self._spec, self._total = spec, total_updates
        self._parameters = list(parameters)
        self.updates = 0
        self._small = sum(parameter.numel() for parameter in self._parameters) <= SMALL
        # The fused kernel is one pass over the parameters; the default one is some ten, which shows on small models.
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=spec.lr,
            betas=(spec.betas[0], spec.betas[1]),
            eps=spec.epsilon,
            weight_decay=spec.weight_decay,
            fused=True,
        )

    @property
    def lr(self) -> float:
        return learning_rate(self._spec, self.updates, self._total)

    def discard(self) -> None:
        """Drop the gradients; nothing advances."""
        self._adamw.zero_grad(set_to_none=True)

    def step(self) -> float | None:
        """Clip to max_grad_norm and step; returns the norm before clipping, or None (no step) when it isn't finite."""
        with one_thread(self._small):
            return self._step()

    def _step(self) -> float | None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients, foreach=True)
        norm = float(total)
        if not math.isfinite(norm):
            self.discard()
            return None
        if norm > self._spec.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._spec.max_grad_norm, total, foreach=True)
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        self.discard()
        self.updates += 1
        return norm

    def state(self) -> dict[str, Any]:
        return self._adamw.state_dict()

    def load_state(self, state: dict[str, Any], updates: int) -> None:
        self._adamw.load_state_dict(state)
        self.updates = updates
