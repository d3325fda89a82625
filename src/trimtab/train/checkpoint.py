"""Checkpoints: written beside, flushed and renamed, so a kill at any moment leaves a usable one.

``checkpoints/step_00000010/`` holds model.safetensors, optimizer.safetensors, random.safetensors, state.json,
engine.safetensors where the engine has a state of its own, and manifest.json with the SHA-256 of each; a folder whose
manifest doesn't hold is passed over for the one before.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab.errors import CheckpointError
from trimtab.files import flush, sha256

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to go on as if it had never stopped. ``meta`` is plain JSON."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    meta: dict[str, Any]
    randomness: dict[str, Any]
    engine: dict[str, Tensor] = field(default_factory=dict)


def random_state() -> dict[str, Any]:
    """States of the global generators of torch (all devices), numpy and Python."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    version, words, gauss = random.getstate()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if torch.cuda.is_available():
        tensors |= {f"cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    plain = {"numpy": [name, position, has_gauss, cached], "python": [version, list(words), gauss]}
    return {"tensors": tensors, "plain": plain}


def set_random_state(state: dict[str, Any]) -> None:
    """Inverse of ``random_state``."""
    tensors, plain = state["tensors"], state["plain"]
    torch.set_rng_state(tensors["torch"])
    name, position, has_gauss, cached = plain["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    for i in range(sum(key.startswith("cuda") for key in tensors)):
        torch.cuda.set_rng_state(tensors[f"cuda{i}"], i)


def _split_optimizer(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"{index}.{name}": value for index, slot in state["state"].items() for name, value in slot.items()}
    return tensors, {"param_groups": state["param_groups"]}


def _join_optimizer(tensors: dict[str, Tensor], plain: dict[str, Any]) -> dict[str, Any]:
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        slots.setdefault(int(index), {})[name] = value
    return {"state": slots, **plain}


def save(folder: Path, snapshot: Snapshot, keep: int) -> Path:
    """Write a checkpoint under ``folder`` and drop all but the newest ``keep``; returns its path.

    Raises CheckpointError when the disk refuses; what was there before is whole then.
    """
    final = folder / f"step_{snapshot.step:08d}"
    beside = folder / f".{final.name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".step_*"):  # of a killed process; its room may be needed now
            shutil.rmtree(stale, ignore_errors=True)
        _write(beside, snapshot)
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
        flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {final} cannot be written ({error}); those before it are whole: make room (a checkpoint.keep "
            "as low as 2 needs less) and go on with resume=auto"
        ) from error
    for old in checkpoints(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _write(folder: Path, snapshot: Snapshot) -> None:
    """All files of a checkpoint, flushed."""
    folder.mkdir()
    tensors, plain = _split_optimizer(snapshot.optimizer)
    # Contiguous CPU copies: safetensors refuses views that share memory.
    parts = {"model": snapshot.model, "optimizer": tensors, "random": snapshot.randomness["tensors"]}
    for name, values in (parts | ({"engine": snapshot.engine} if snapshot.engine else {})).items():
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in values.items()}, folder / f"{name}.safetensors")
    state = {"meta": snapshot.meta, "optimizer": plain, "random": snapshot.randomness["plain"], "step": snapshot.step}
    (folder / "state.json").write_text(json.dumps(state))
    manifest = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for path in folder.iterdir():
        flush(path)


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    return sorted(folder.glob("step_*"), reverse=True)


def fault(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name, digest in manifest.items():
            if sha256(path / name) != digest:
                return f"{name} does not match its checksum"
    except (OSError, ValueError) as error:
        return f"manifest unreadable ({error})"
    return None


def load(path: Path) -> Snapshot:
    """Read one checkpoint; CheckpointError when it is damaged."""
    wrong = fault(path)
    if wrong:
        raise CheckpointError(f"checkpoint {path}: {wrong}")
    try:
        state = json.loads((path / "state.json").read_text())
        model, tensors, randomness = (
            load_file(path / f"{name}.safetensors") for name in ("model", "optimizer", "random")
        )
        engine = path / "engine.safetensors"
        held = load_file(engine) if engine.exists() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error
    return Snapshot(
        step=state["step"],
        model=model,
        optimizer=_join_optimizer(tensors, state["optimizer"]),
        meta=state["meta"],
        randomness={"tensors": randomness, "plain": state["random"]},
        engine=held,
    )


def load_last(folder: Path) -> Snapshot | None:
    """The newest checkpoint that is whole, or None where there is none; damaged ones are passed over, aloud."""
    found = checkpoints(folder)
    for path in found:
        wrong = fault(path)
        if wrong is None:
            return load(path)
        log.warning("checkpoint %s is damaged (%s); trying the one before", path, wrong)
    if found:
        raise CheckpointError(f"every checkpoint in {folder} is damaged; start anew with another run_dir=")
    return None
