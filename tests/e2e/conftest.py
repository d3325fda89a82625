"""The program under test, and a never-disturbed run to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.program import Program


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def program(tmp_path: Path, cache: Path) -> Program:
    return Program(tmp_path, cache)
