"""The counters of a run, saved with each checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class TrainState:
    """step: rollout batches done; version: of the policy; updates: optimiser steps applied; the rest count faults."""

    step: int = 0
    version: int = 0
    updates: int = 0
    nonfinite_steps: int = 0
    nonfinite_in_a_row: int = 0
    all_rejected_steps: int = 0
    all_rejected_in_a_row: int = 0
    tokens: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)
