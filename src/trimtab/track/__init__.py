"""Where metrics go: metrics.jsonl (the truth), the console, Weights & Biases; ``Trackers`` feeds several."""

from __future__ import annotations

from trimtab.track.alarms import alarms_of
from trimtab.track.console import ConsoleTracker, setup_progress, summary_table
from trimtab.track.jsonl import JsonlTracker, read_metrics, truncate_after
from trimtab.track.many import Trackers

__all__ = [
    "ConsoleTracker",
    "JsonlTracker",
    "Trackers",
    "alarms_of",
    "read_metrics",
    "setup_progress",
    "summary_table",
    "truncate_after",
]
