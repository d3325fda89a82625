"""A cache of prepared model folders: made beside, renamed into place, verified by checksum on each use."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

from trimtab.errors import ModelError
from trimtab.files import sha256

log = logging.getLogger(__name__)
CHECKSUMS = "checksums.json"


def cache_root(cache_dir: str | None) -> Path:
    """``cache_dir``, else $TRIMTAB_CACHE, else ~/.cache/trimtab."""
    return Path(cache_dir or os.environ.get("TRIMTAB_CACHE") or "~/.cache/trimtab").expanduser().absolute()


def cached_folder(root: Path, name: str, key: Mapping[str, Any], make: Callable[[Path], None]) -> Path:
    """The folder ``root/name-<hash of key>``, filled by ``make`` unless it is there and intact.

    ``key`` (JSON values) is everything that determines the content. A damaged folder is made again, with a
    warning. Processes that want the same folder at once wait for one another where the file system can lock;
    where it cannot, each makes its own and the first to finish wins.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = root / f"{name}-{digest}"
    if intact(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot make the model cache {root}: {error.strerror}; set policy.cache_dir=") from error
    with _locked(root / f".{folder.name}.lock"):
        if intact(folder):
            return folder
        if folder.exists():
            log.warning("%s is damaged (checksums differ); it is made again", folder)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=root))
        try:
            make(beside)
            _write_checksums(beside)
            _put(beside, folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return folder


def intact(folder: Path) -> bool:
    """Whether every file of a finished folder is there with the content it was made with."""
    listing = folder / CHECKSUMS
    if not listing.is_file():
        return False
    try:
        sums = json.loads(listing.read_text())
    except ValueError:
        return False
    if not isinstance(sums, dict) or not sums:
        return False
    return all((folder / name).is_file() and sha256(folder / name) == value for name, value in sums.items())


def _write_checksums(folder: Path) -> None:
    sums = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    (folder / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n")


def _put(beside: Path, folder: Path) -> None:
    """Rename ``beside`` to ``folder``, unless another process has put an intact one there meanwhile."""
    beside.chmod(0o755)
    if folder.exists():
        if intact(folder):
            return
        grave = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        os.replace(folder, grave / "damaged")
        shutil.rmtree(grave, ignore_errors=True)
    try:
        os.replace(beside, folder)
    except OSError as error:
        if not intact(folder):
            raise ModelError(f"cannot write {folder}: {error.strerror}; set policy.cache_dir=") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.info("%s cannot be locked (%s); going on without", path, error.strerror)
        yield
