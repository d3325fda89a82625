"""Wall-clock seconds of each part of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """``with clock("forward"):`` adds the block's seconds to ``forward``; parts must not be nested."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        """``time/<part>`` of each part, and ``time/step`` since the clock was made."""
        step = time.perf_counter() - self._start
        return {f"time/{part}": value for part, value in self.seconds.items()} | {"time/step": step}
