"""Signals that ask a launcher's process to stop: noted, never lost, looked at by its loop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


class Asked:
    """``with Asked() as asked:`` … ``if asked.names``: the signals that came, in order.

    A process that is started with these signals blocked (``blocked``) gets those that came meanwhile on entering.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._previous: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.names.append(signal.Signals(number).name)

    def __enter__(self) -> Asked:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                    self._previous[number] = signal.signal(number, self._note)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class blocked:
    """``with blocked():`` signals wait, here and in what is started inside; there until it takes them (``Asked``)."""

    def __enter__(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def __exit__(self, *exc: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
