"""vLLM's engine in a process of its own: started, asked from an ordinary thread, watched, and ended."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Coroutine, Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from trimtab.errors import EngineError
from trimtab.rollout.async_vllm_worker import TRAINER
from trimtab.rollout.vllm_answers import REFUSALS, reason
from trimtab.rollout.vllm_options import engine_options
from trimtab.rollout.vllm_process import global_state_kept, quiet, wanted_quiet
from trimtab.spec import RolloutSpec

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
POLL = 0.1  # seconds between two looks whether the engine's process still lives
PULSE = 30.0  # seconds without an answer after which the engine must show that it reacts at all
REACTS = 60.0  # seconds that it has for that, and for a hand-over
_STAMP = re.compile(r"^\(.*?\) \w+ [\d-]+ [\d:]+ \[.*?\] ")  # of a line of vLLM's log
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class EngineDied(Exception):
    """The engine's process ended, or no longer reacts; it must be started anew."""


class EngineProcess:
    """One life of an ``AsyncLLM``: its client and event loop in a thread here, the engine in a child process.

    The child gets none of the signals that ask a run to stop (they reach a whole process group), as the run decides
    when its engine ends; and it ends by itself when the trainer's process does.
    """

    def __init__(self, folder: Path, spec: RolloutSpec) -> None:
        before = set(multiprocessing.active_children())
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  what the engine's process says
        self._said_at_start = 0
        self._children: list[BaseProcess] = []
        self._llm: AsyncLLM | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="vLLM client")
        try:
            with global_state_kept(), _environment(), self._output_kept():
                resource_tracker.ensure_running()  # started by the thread it would let signals through again
                self._thread.start()
                self._llm = self.go(_start(folder, spec)).result()
            self._said_at_start = self._errors.seek(0, os.SEEK_END)
        except REFUSALS as error:
            traceback.clear_frames(error.__traceback__)
            raise EngineError(
                f"vLLM refused to start in its own process with the model in {folder}: {reason(error)}{self._said()}. "
                "Or sample in the trainer's process: rollout.mode=one_step_off"
            ) from error
        finally:
            self._children = [child for child in multiprocessing.active_children() if child not in before]
            if self._llm is None:
                self._end()

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's client; its coroutines are for ``go`` and ``call``."""
        assert self._llm is not None
        return self._llm

    @property
    def pid(self) -> int:
        """The id of the engine's process."""
        return int(self._children[0].pid or 0)

    def go(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin ``work`` on the client's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """The result of ``work``; EngineDied when the engine's process ends meanwhile, or reacts no longer."""
        from vllm.v1.engine.exceptions import EngineDeadError

        future, begin = self.go(work), time.monotonic()
        pulse = begin
        while True:
            try:
                return future.result(timeout=POLL)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise  # the work's own
            except (EngineDeadError, EngineDied) as error:
                raise self.died() from error
            now = time.monotonic()
            if not self.alive():
                future.cancel()
                raise self.died()
            if seconds is not None and now - begin > seconds:
                future.cancel()
                raise EngineDied(f"no answer within {seconds:.0f} s")
            if seconds is None and now - pulse > PULSE:
                self.check_reacts()
                pulse = time.monotonic()

    def check_reacts(self) -> None:
        """EngineDied unless the engine answers within ``REACTS`` seconds."""
        self.call(self.llm.is_paused(), REACTS)

    def alive(self) -> bool:
        """Whether the engine's process runs."""
        return all(child.is_alive() for child in self._children)

    def died(self) -> EngineDied:
        """Why, as far as it is known."""
        for child in self._children:
            child.join(timeout=REACTS / 10)  # it reports its own errors a moment before it ends
        codes = [child.exitcode for child in self._children if child.exitcode is not None]
        how = f"killed by {signal.Signals(-codes[0]).name}" if codes and codes[0] < 0 else f"exit codes {codes}"
        return EngineDied(how + self._said())

    def close(self) -> None:
        """End the process and the thread; a second call does nothing."""
        if self._loop.is_closed():
            return
        self._end()

    def _run(self) -> None:
        # Blocked here and so in the process that is started from here.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _end(self) -> None:
        for child in self._children:
            child.kill()  # nothing in it is worth a farewell, and it is deaf to SIGTERM
            child.join()
        with contextlib.suppress(concurrent.futures.TimeoutError, asyncio.CancelledError):
            self.go(self._leave()).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._loop.close()
        self._llm = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of a start that failed halfway
            gc.collect()
        self._errors.close()

    async def _leave(self) -> None:
        if self._llm is not None:
            client: Any = self._llm.engine_core
            self._llm.shutdown(timeout=0)
            client.resources.ctx.destroy(linger=0)  # which vLLM leaves to the collector
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    @contextlib.contextmanager
    def _output_kept(self) -> Iterator[None]:
        """What is printed meanwhile, and by the new process for all its life, goes to a file of our own."""
        if not wanted_quiet():
            yield
            return
        kept = {stream: os.dup(stream) for stream in (1, 2)}
        _flush()
        for stream in kept:
            os.dup2(self._errors.fileno(), stream)
        try:
            yield
        finally:
            _flush()
            for stream, file in kept.items():
                os.dup2(file, stream)
                os.close(file)
            logging.getLogger("vllm").setLevel(logging.CRITICAL)  # a death is reported in our own words

    def _said(self) -> str:
        """The last words of the engine's process, if there are any."""
        end = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(self._said_at_start, end - 2000))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        lines = [line for line in lines if line.strip() and "NUMA binding" not in line]
        return f" (it said: {re.sub(_STAMP, '', lines[-1])[:300]})" if lines else ""


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


async def _start(folder: Path, spec: RolloutSpec) -> AsyncLLM:
    # In the event loop's own thread: the process inherits its signal mask.
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    options = engine_options(folder, spec, current_platform.is_cpu())
    extension = "trimtab.rollout.async_vllm_worker.Receiver"
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**options, use_tqdm_on_load=False, worker_extension_cls=extension))


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What the engine's process must find in its environment, and this one must not keep."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork would copy the trainer's threads' locks
    with quiet():
        import vllm  # noqa: F401  its import is slow and noisy
    os.environ[TRAINER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[TRAINER]
