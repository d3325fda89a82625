"""A thread that makes calls which may hang, in order, so that the thread which asks for them never waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Call = Callable[[], None]


class Courier:
    """Calls given to ``put`` are made one after the other by a daemon thread: a process can end in spite of it."""

    def __init__(self, name: str, limit: int) -> None:
        self._calls: queue.Queue[Call | None] = queue.Queue(limit)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def put(self, call: Call) -> bool:
        """Whether there was room; never waits."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            return False
        return True

    def close(self, timeout: float) -> bool:
        """Whether every call was made within ``timeout`` seconds; none is taken after this."""
        try:
            self._calls.put_nowait(None)
        except queue.Full:
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()
