"""Writing files so that a kill or a full disk leaves the old one or the new one, never half."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def flush(path: Path) -> None:
    """Have the disk keep what was written to a file, or to a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside ``path`` to write to, which takes its place when the block ends well."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)  # a full disk leaves half of it
    flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``."""
    with replacing(path) as file:
        file.write(text.encode())


def sha256(path: Path) -> str:
    """Digest of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
