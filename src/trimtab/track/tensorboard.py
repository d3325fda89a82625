"""TensorBoard event files in ``run_dir/tensorboard``, without torch or TensorFlow: ``tensorboard --logdir runs``.

The config goes to its HParams tab: the settings that runs are compared by, and other scalars by dotted key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError
from trimtab.track.flat import flat_config

try:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ImportError as error:
    raise ConfigError(f"tracker=tensorboard cannot load it ({error}): pip install 'tensorboard>=2.20,<3'") from error

log = logging.getLogger(__name__)

FOLDER = "tensorboard"
FLUSH_SECONDS = 1.0
QUEUE = 1000


def scalars(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Dotted keys and values of what HParams can hold."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{key}", value


class TensorboardTracker:
    """One event file an attempt. After a resume TensorBoard drops what an earlier attempt wrote from that step on."""

    def __init__(self) -> None:
        self._writer: EventFileWriter | None = None
        self._begun = False

    def start(self, config: Mapping[str, Any], run_id: str, name: str, run_dir: Path) -> None:
        try:
            self._writer = EventFileWriter(str(run_dir / FOLDER), QUEUE, FLUSH_SECONDS)
            self._writer.add_event(Event(wall_time=time.time(), summary=hparams_pb(dict(scalars(flat_config(config))))))
        except OSError as error:
            self._fail(error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in metrics.items()]
        try:
            if not self._begun:
                begin = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=begin))
                self._begun = True
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        except OSError as error:  # of the writer's thread, at the next call
            self._fail(error)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
            self._writer = None
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Say it once and go silent."""
        self._writer = None
        log.warning("TensorBoard's file failed (%s); training goes on, metrics.jsonl has everything", error)
