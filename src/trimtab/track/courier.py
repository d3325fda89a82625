"""A thread that makes calls which may hang, in order, so that the thread which asks for them never waits."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
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
        """Whether every call was made within ``timeout`` seconds; none is made that is put after this."""
        end = time.monotonic() + timeout
        try:
            self._calls.put(None, timeout=timeout)
        except queue.Full:
            return False
        return self.join(max(end - time.monotonic(), 0.0))

    def join(self, timeout: float) -> bool:
        """Whether it came to its end within ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self.busy

    def abandon(self, last: Call) -> None:
        """Let the call that is under way be the last but ``last``; whoever puts calls must be who asks for this."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()
        self._calls.put_nowait(last)
        self._calls.put_nowait(None)

    @property
    def busy(self) -> bool:
        """Whether a call may still be under way, or come."""
        return self._thread.is_alive()
