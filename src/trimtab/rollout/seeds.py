"""A seed for each request: a stable hash, so that a response depends on its own place and on nothing around it."""

from __future__ import annotations

import hashlib


def row_seed(seed: int, prompt: int, sample: int) -> int:
    """Seed of response ``sample`` of the call's prompt number ``prompt``: 63 bits of BLAKE2b over the three numbers.

    A hash, not a sum: seed 3 of prompt 0 must not be seed 0 of prompt 3. Equal in every process and on every machine.
    """
    text = f"{seed}/{prompt}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
