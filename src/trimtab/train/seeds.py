"""Seeds: every random draw of a run is named, so a resumed run draws what an undisturbed one would have drawn."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed from the run's seed and a name; equal on every machine and Python version."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    random.seed(derive(seed, "python"))
    np.random.seed(derive(seed, "numpy") % 2**32)
    torch.manual_seed(derive(seed, "torch"))
