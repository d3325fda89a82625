"""The thread that makes calls: in order, never waited for, left behind when it hangs."""

from __future__ import annotations

import threading
import time

from trimtab.track.courier import Courier


def test_calls_are_made_in_order_by_another_thread() -> None:
    made: list[tuple[int, str]] = []
    courier = Courier("courier-test", 1000)
    for i in range(500):
        assert courier.put(lambda i=i: made.append((i, threading.current_thread().name)))  # type: ignore[misc]
    assert courier.close(10.0)
    assert made == [(i, "courier-test") for i in range(500)]


def test_a_call_that_hangs_fills_the_queue_and_bounds_the_end() -> None:
    release = threading.Event()
    courier = Courier("courier-test", 3)
    begin = time.monotonic()
    taken = [courier.put(lambda: release.wait(30) and None) for _ in range(10)]
    assert 3 <= sum(taken) <= 4 and not taken[-1]
    assert not courier.close(0.2) and time.monotonic() - begin < 5.0
    release.set()


def test_an_end_in_time_is_told() -> None:
    hang = threading.Event()
    courier = Courier("courier-test", 10)
    courier.put(lambda: hang.wait(30) and None)
    assert not courier.close(0.05)
    hang.set()
    assert courier.join(10.0) and not courier.busy


def test_an_abandoned_one_makes_one_last_call_and_ends_however_many_wait() -> None:
    hang, made = threading.Event(), []
    courier = Courier("courier-test", 3)
    courier.put(lambda: hang.wait(30) and None)
    while courier.put(lambda: made.append("waiting")):
        pass
    courier.abandon(lambda: made.append("last"))
    assert courier.busy
    hang.set()
    assert courier.join(10.0) and made == ["last"]
