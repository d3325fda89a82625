"""trackio: a local database with a web page of its own, ``trackio show``; no account, and nothing leaves the machine.

Facts of the client (0.43) that shape this file: it prints to standard output; a run is its name, resumed by it; a
resume without a config wipes the one it had; with a token of Hugging Face in the environment it asks their server who
that is; it watches CPU and GPU unless told not to; TRACKIO_SPACE_ID and TRACKIO_SERVER_URL send everything elsewhere.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shlex
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError
from trimtab.spec import TrackerSpec
from trimtab.track.flat import flat_config
from trimtab.track.identity import identify

try:
    import trackio
    from trackio import run as trackio_run
    from trackio.utils import TRACKIO_DIR as FOLDER
except ImportError as error:
    raise ConfigError(f"tracker=trackio cannot load it ({error}): pip install 'trackio>=0.43,<0.44'") from error

log = logging.getLogger(__name__)

ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID", "TRACKIO_DATASET_ID")
ERRORS = (OSError, sqlite3.Error, ValueError, TypeError, RuntimeError)


def nobody() -> None:
    """Who runs this, for the run's config: not asked of a server."""


@contextlib.contextmanager
def quietly(said: set[str]) -> Iterator[None]:
    """The client's lines go to the debug log; its warnings, which it gives instead of raising, to the log once each."""
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as told, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        yield
    for line in printed.getvalue().splitlines():
        log.debug("%s", line)
    for text in (str(warning.message) for warning in told):
        if text not in said:
            said.add(text)
            log.warning("trackio: %s", text)


class TrackioTracker:
    """One run of trackio's project ``tracker.project``. Any failure is said once; from then on it is silent."""

    def __init__(self, spec: TrackerSpec) -> None:
        for name in ELSEWHERE:
            if os.environ.get(name):
                raise ConfigError(f"tracker=trackio keeps its data on this machine, and {name} sends it elsewhere; "
                                  f"unset {name}")  # fmt: skip
        self._spec = spec
        self._run: trackio.Run | None = None
        self._said: set[str] = set()
        self._last = -1  # the last step it has

    def start(self, config: Mapping[str, Any], run_id: str, name: str, run_dir: Path) -> None:
        who = identify(run_dir, run_id, name, self._spec.group)
        setattr(trackio_run, "_get_default_namespace", nobody)  # noqa: B010  (a private name, and a pinned version)
        try:
            with quietly(self._said):
                self._run = trackio.init(
                    self._spec.project,
                    name=f"{who.name} {who.id}"[-200:],
                    group=who.group,
                    config={"id": who.id, "tags": list(self._spec.tags), **flat_config(config)},
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
            self._last = int(self._run._next_step) - 1
            log.info("trackio run %s of project %s in %s; %s", self._run.name, self._run.project, FOLDER, self._open())
        except ERRORS as error:
            self._fail(error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is None or step <= self._last:
            return
        try:
            with quietly(self._said):
                self._run.log(dict(metrics), step=step)
        except ERRORS as error:
            self._fail(error)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        try:
            with quietly(self._said):
                trackio.finish()
            self._run = None
            log.info("trackio has the run; %s", self._open())
        except ERRORS as error:
            self._fail(error)

    def _open(self) -> str:
        return f"to see it: trackio show --project {shlex.quote(self._spec.project)}"

    def _fail(self, error: BaseException) -> None:
        self._run = None
        log.warning("trackio failed (%s); training goes on, metrics.jsonl has everything", error)
