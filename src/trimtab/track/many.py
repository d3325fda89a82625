"""Several trackers as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Sequence

from trimtab.protocol import Tracker


class Trackers:
    """Hands every call to each tracker in turn; put metrics.jsonl first, so that the truth is written first."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def start(self, config: Mapping[str, Any], run_id: str, name: str, run_dir: Path) -> None:
        for tracker in self._trackers:
            tracker.start(config, run_id, name, run_dir)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.finish(state, summary)
