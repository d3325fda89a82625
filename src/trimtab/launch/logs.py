"""``trimtab sweep logs``: what the runs of a sweep printed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trimtab.launch.files import SweepFolder
from trimtab.launch.model import RunStatus
from trimtab.launch.status import Submission, Survey, all_submissions

LINES = 5  # of each run, when several are shown
TAIL = 1 << 18  # bytes that the last lines are looked for in
LOOK, ASK = 0.5, 5.0  # seconds between two looks at a file, and at the cluster


def show(
    folder: SweepFolder, runs: Sequence[RunStatus], ask: Callable[[], Survey], options: argparse.Namespace, whole: bool,
    job: Submission | None = None,
) -> int:  # fmt: skip
    """Print the logs; 1 when there is none. ``job``: the one that was asked for."""
    meant = [run.run.dir for run in runs]
    first = {path_of(folder, run, options.job, job): run for run in reversed(runs)}  # several may share a job's log
    paths = {run.run.dir: path for path, run in reversed(first.items())}
    runs = [run for run in runs if run.run.dir in paths]
    count = options.n if options.n is not None else None if whole else LINES
    there = 0
    ends: dict[str, int] = {}
    for run in runs:
        path = paths[run.run.dir]
        if len(runs) > 1:
            print(f"==> {run.run.dir}: {run.state.value}, {path} <==")
        content = read(path)
        if content is None:
            if len(runs) == 1 and not options.follow:
                print(f"error: {run.run.dir} has printed nothing yet: it is {run.state.value} "
                      f"{f'({run.reason})' if run.reason else ''}".rstrip(), file=sys.stderr)  # fmt: skip
            continue
        there += 1
        ends[run.run.dir] = len(content)
        emit(last(content, count))
    if options.follow:
        follow(paths, ends, ask, meant)
        return 0
    return 0 if there else 1


def path_of(folder: SweepFolder, run: RunStatus, job: bool, asked: Submission | None = None) -> Path:
    """The run's own log, or its job's where it has none yet, or where a job of an earlier attempt was asked for."""
    if asked is not None and (job or (asked.batch.cluster, asked.job) != (run.cluster, run.job)):
        return folder.log(asked.batch.id, asked.slot)
    if job and (attempts := all_submissions(folder).get(run.run.dir)):
        return folder.log(attempts[-1].batch.id, attempts[-1].slot)
    return Path(run.log) if run.log else folder.run(run.run.dir) / "log.txt"


def read(path: Path, start: int = 0) -> bytes | None:
    """The file's bytes from ``start`` on, None when it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError:
        return None


def last(content: bytes, count: int | None) -> bytes:
    """The last ``count`` lines, all for None."""
    if count is None:
        return content
    return b"".join(content[-TAIL:].splitlines(keepends=True)[-count:]) if count > 0 else b""


def emit(content: bytes) -> None:
    """Print bytes of a log, what is no UTF-8 as ``�``."""
    sys.stdout.write(content.decode(errors="replace"))
    if content and not content.endswith(b"\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()


def follow(paths: Mapping[str, Path], ends: dict[str, int], ask: Callable[[], Survey], runs: Sequence[str]) -> None:
    """Print what is added until none of ``runs`` is live; a run that is started again is followed on."""
    asked, speaker = 0.0, ""
    live = True
    while True:
        grown = False
        for run, path in paths.items():
            added = read(path, ends.get(run, 0))
            if not added or not (text := added[: added.rfind(b"\n") + 1] if live else added):
                continue  # half a line is left for the next look
            if len(paths) > 1 and run != speaker:
                print(f"==> {run} <==")
            speaker, grown = run, True
            ends[run] = ends.get(run, 0) + len(text)
            emit(text)
        if not live and not grown:
            return
        if time.monotonic() - asked >= ASK:
            asked = time.monotonic()
            seen = {run.run.dir: run for run in ask().runs}
            live = any(seen[run].state.live for run in runs)
        if live:
            time.sleep(LOOK)
