"""The program under test, and a never-disturbed run to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.program import Program
from e2e.warm import Warm


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def warm(cache: Path) -> Iterator[Warm]:
    warm = Warm(Program(cache, cache).environment(None, None))
    yield warm
    warm.close()


@pytest.fixture
def program(tmp_path: Path, cache: Path, warm: Warm) -> Program:
    return Program(tmp_path, cache, warm)
