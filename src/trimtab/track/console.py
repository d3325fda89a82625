"""What a person sees: one live line on a terminal, now and then a plain line elsewhere, a table at the end."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import deque
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

log = logging.getLogger(__name__)

PLAIN_SECONDS = 10.0  # between two plain lines
PLAIN_LINES = 10  # at least so many over a run
SPARK_WIDTH = 16
SPARK_STEPS = 1024  # steps that the bars look back

# (label, metric, how it is written)
SHOWN: tuple[tuple[str, str, str], ...] = (
    ("reward", "train/reward", ".3f"),
    ("mismatch KL", "train/mis_k3_kl", ".1e"),
    ("ESS", "train/mis_ess", ".3f"),
    ("kept", "train/mis_kept_token_fraction", ".1%"),
    ("tok/s", "perf/tokens_per_second", ",.0f"),
)


class SafeConsole(Console):
    """A console that goes quiet when its reader goes away (``… | head``), where rich would end the program."""

    def on_broken_pipe(self) -> None:
        silence(self)


def silence(console: Console) -> None:
    """Print nothing more; what standard output still holds goes nowhere, else flushing it at exit fails."""
    console.quiet = True
    if console.file is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), console.file.fileno())


@contextmanager
def surviving(console: Console) -> Iterator[None]:
    """Losing the console (a full disk behind ``>``, a text it cannot write) is no reason to lose a run."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        silence(console)
        log.warning("the console failed (%s); the run goes on without it", error)


def spark(values: Iterable[float], unicode: bool) -> str:
    """Values, on a scale that holds 0 … 1, as small bars, at most ``SPARK_WIDTH``, each the mean of a stretch."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    marks = "▁▂▃▄▅▆▇█" if unicode else "_.-=+*%#"
    count = min(SPARK_WIDTH, len(finite))
    edges = [i * len(finite) // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(0.0, min(means)), max(1.0, max(means))
    return "".join(marks[min(int((m - low) / (high - low) * len(marks)), len(marks) - 1)] for m in means)


def duration(seconds: float) -> str:
    """``75`` seconds as ``1:15``."""
    minutes, rest = divmod(max(int(seconds + 0.5), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ConsoleTracker:
    """Progress of ``steps`` training steps. ``clock`` counts seconds."""

    def __init__(self, steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._console = console if console is not None else SafeConsole(highlight=False)
        self._clock = clock
        self._rewards: deque[float] = deque(maxlen=SPARK_STEPS)
        self._first: tuple[int, float] | None = None  # step and time of the first record
        self._printed: tuple[int, float] | None = None  # those of the last plain line
        self._live: Live | None = None

    def start(self, config: Mapping[str, Any], run_id: str, name: str, run_dir: Path) -> None:
        with surviving(self._console):
            self._console.print(f"training {name} in {run_dir}", markup=False, soft_wrap=True)
            if self._console.is_terminal:
                self._live = Live(console=self._console, refresh_per_second=4, transient=False)
                self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        if "train/reward" in metrics:
            self._rewards.append(metrics["train/reward"])
        with surviving(self._console):
            if self._live is not None:
                self._live.update(Text(self.line(step, metrics, now), no_wrap=True, overflow="ellipsis"))
            elif self._due(step, now):
                self._printed = (step, now)
                self._console.print(self.line(step, metrics, now), markup=False, soft_wrap=True)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        with surviving(self._console):
            live, self._live = self._live, None
            if live is not None:
                live.stop()
            self._console.print(f"run {state}", markup=False)

    def _due(self, step: int, now: float) -> bool:
        if self._printed is None or step >= self._steps:
            return True
        last_step, last_time = self._printed
        return now - last_time >= PLAIN_SECONDS or step - last_step >= max(self._steps // PLAIN_LINES, 1)

    def line(self, step: int, metrics: Mapping[str, float], now: float) -> str:
        """``step 20/300  reward 0.412 ▁▂▃  mismatch KL 1.2e-07  …  left 1:10``; metrics not given are left out."""
        parts = [f"step {step}/{self._steps}"]
        unicode = self._console.encoding.lower().startswith("utf")
        for label, metric, form in SHOWN:
            if metric in metrics:
                bars = f" {spark(self._rewards, unicode)}" if metric == "train/reward" else ""
                parts.append(f"{label} {metrics[metric]:{form}}{bars}")
        if self._first is not None and step > self._first[0]:
            per_step = (now - self._first[1]) / (step - self._first[0])
            parts.append(f"left {duration(per_step * (self._steps - step))}")
        return "  ".join(parts)


def written(value: Any) -> str:
    """A table cell: floats with 4 significant digits, None as a dash."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary_table(
    rows: Mapping[str, Sequence[Any]],
    columns: Sequence[str] = ("", "before", "after"),
    footer: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """Print the small table at the end of a run: ``rows`` maps a label to its cells; ``footer`` lines follow whole."""
    console = console if console is not None else SafeConsole(highlight=False)
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for label, cells in rows.items():
        table.add_row(label, *(written(cell) for cell in cells))
    with surviving(console):
        console.print(table)
        for line in footer:
            console.print(line, markup=False, soft_wrap=True)


@contextmanager
def setup_progress(title: str, console: Console | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """Shows a phase before training; the body calls the given ``progress(done, total, text)``."""
    console = console if console is not None else SafeConsole(highlight=False)
    if not console.is_terminal:
        yield plain_progress(title, console)
        return
    bars = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[text]}")
    with Progress(*bars, TimeElapsedColumn(), console=console) as display:
        task = display.add_task(title, total=None, text="")
        yield lambda done, total, text: display.update(task, completed=done, total=total, text=text)


def plain_progress(
    title: str, console: Console, clock: Callable[[], float] = time.monotonic
) -> Callable[[int, int, str], None]:
    """Progress as plain lines: the first report, the last, and one each ``PLAIN_SECONDS``."""
    last: float | None = None

    def report(done: int, total: int, text: str) -> None:
        nonlocal last
        now = clock()
        if last is None or done >= total or now - last >= PLAIN_SECONDS:
            last = now
            with surviving(console):
                console.print(f"{title} {done}/{total} {text}".rstrip(), markup=False, soft_wrap=True)

    return report
