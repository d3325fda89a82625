"""One run from its spec to its files: build the parts, restore, loop, summarise."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import yaml

from trimtab import build
from trimtab.config import config_hash, read_yaml, to_dict, to_yaml
from trimtab.errors import CheckpointError, ConfigError
from trimtab.files import write_text
from trimtab.folder import RunFolder, end_state, full_disk_explained, launched
from trimtab.protocol import Tracker
from trimtab.provenance import provenance
from trimtab.spec import Engine, RunSpec, Schedule
from trimtab.summary import show, summarise
from trimtab.track import truncate_after
from trimtab.train import checkpoint
from trimtab.train.loop import Loop
from trimtab.train.seeds import seed_everything
from trimtab.train.signals import StopSignal

log = logging.getLogger(__name__)


def resume_hash(spec: RunSpec) -> str:
    """Hash that a checkpoint must share: under a constant learning rate a run may be resumed to more steps."""
    return config_hash(replace(spec, steps=1) if spec.optim.schedule is Schedule.constant else spec)


def find_snapshot(spec: RunSpec, folder: RunFolder) -> checkpoint.Snapshot | None:
    """The checkpoint that ``resume`` asks for. From another run's folder its metrics up to there are copied too."""
    match spec.resume:
        case "no":
            return None
        case "auto":
            return checkpoint.load_last(folder.checkpoints)
    path = Path(spec.resume).expanduser()
    if (path / "manifest.json").exists():
        source, snapshot = path.parent.parent, checkpoint.load(path)
    else:
        source, found = path, checkpoint.load_last(path / "checkpoints")
        if found is None:
            raise CheckpointError(f"resume={spec.resume} holds no checkpoint; give a run's folder or resume=no")
        snapshot = found
    if source.resolve() != folder.path.resolve() and (source / "metrics.jsonl").exists():
        shutil.copyfile(source / "metrics.jsonl", folder.metrics)
    return snapshot


def refuse_harm(spec: RunSpec, folder: RunFolder) -> None:
    """ConfigError when a run would spoil what lies in its folder, which stays as it is.

    That is: another configuration's checkpoints under resume=auto, or the very recording to replay.
    """
    if spec.rollout.engine is Engine.replay and spec.rollout.path is not None:
        path = Path(spec.rollout.path).resolve()
        if folder.rollouts.resolve() in (path, path.parent, path / "rollouts"):
            raise ConfigError(f"run_dir={folder.path} holds the recording to replay; give another with run_dir=")
    if spec.resume != "auto" or not folder.config.exists() or not checkpoint.checkpoints(folder.checkpoints):
        return
    there, here = resume_hash(read_yaml(folder.config)), resume_hash(spec)
    if there != here:
        raise ConfigError(
            f"run_dir={folder.path} holds a run of another configuration ({there}, this is {here}; see its "
            "overrides.yaml); give the same overrides, or start anew with another run_dir="
        )


def rewind(folder: RunFolder, step: int) -> None:
    """Drop what was written after the checkpoint; the resumed run writes it again, equal."""
    if folder.metrics.exists():
        truncate_after(folder.metrics, step)
    for recording in folder.rollouts.glob("step_*.parquet"):
        if int(recording.stem.removeprefix("step_")) > step:
            recording.unlink()


def set_up_torch(spec: RunSpec) -> None:
    """Determinism and debugging switches; they hold for the whole process."""
    torch.use_deterministic_algorithms(spec.debug.deterministic)
    torch.autograd.set_detect_anomaly(spec.debug.anomaly)
    seed_everything(spec.seed)


def preload(specs: Sequence[RunSpec]) -> None:
    """Import what the runs will need, for a launcher that forks them; nothing that starts threads or opens a device."""
    eager = {spec.rollout.enforce_eager for spec in specs if spec.rollout.engine is Engine.vllm}
    if len(eager) == 1:  # the switch is one of the whole process: runs that differ in it import vLLM themselves
        from trimtab.rollout import vllm_process

        vllm_process.preload(*eager)


def execute(
    spec: RunSpec, overrides: Sequence[str], folder: RunFolder, tracker: Tracker, stack: ExitStack, stop: StopSignal
) -> None:
    """Build, restore and train; everything opened is registered in ``stack``."""
    set_up_torch(spec)
    parts = replace(build.make_parts(spec, folder, tracker, stack), overrides=tuple(overrides))
    loop = Loop(parts, spec, folder.path, resume_hash(spec))
    snapshot = find_snapshot(spec, folder)
    if snapshot is not None:
        loop.restore(snapshot)
        log.info("resumed from step %d", snapshot.step)
    rewind(folder, loop.state.step if snapshot is not None else -1)
    code = launched().get("code", {})  # a launcher's copy has no git
    folder.write_json(folder.environment, provenance() | code | {"rollout": parts.rollout.describe()})
    tracker.start(to_dict(spec), config_hash(spec), f"{spec.algo.name.name}-s{spec.seed}", folder.path)
    folder.report("running", step=loop.state.step)
    loop(stop)


def run(spec: RunSpec, overrides: Sequence[str] = ()) -> float | None:
    """Carry out a resolved spec; returns the objective (evaluation reward, else training reward) for sweepers."""
    begin = time.monotonic()
    summary: dict[str, Any] = {}
    claim = RunFolder(Path(spec.run_dir), spec.resume)
    refuse_harm(spec, claim)
    # A signal that comes during the set-up is obeyed after it, one that comes at the end doesn't break it.
    with StopSignal() as stop, full_disk_explained(claim.path), claim as folder, ExitStack() as stack:
        write_text(folder.config, to_yaml(spec))
        write_text(folder.overrides, yaml.safe_dump(list(overrides), allow_unicode=True))
        tracker = build.make_tracker(spec, folder)

        def finish(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
            state = end_state(error)
            summary.update({"state": state} | summarise(folder, spec, time.monotonic() - begin, overrides))
            tracker.finish(state, summary)
            folder.write_json(folder.summary, summary)

        stack.push(finish)
        execute(spec, overrides, folder, tracker, stack, stop)
    show(summary, folder)
    return None if summary["objective"] is None else float(summary["objective"])
