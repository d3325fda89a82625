"""For the whole suite: what run.py sets for a run, set before torch is loaded; files with long tests go first."""

from __future__ import annotations

import os

import pytest

LONG = {"slow", "vllm", "browser", "slurm"}
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with long tests first: the short ones then fill the processes up, and none works alone in the end."""
    long = {item.path for item in items if LONG & {mark.name for mark in item.iter_markers()}}
    items.sort(key=lambda item: item.path not in long)
