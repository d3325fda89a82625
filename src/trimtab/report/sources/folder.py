"""A run's folder as a Run. Whatever is wrong with its files is said, and stops no comparison."""

from __future__ import annotations

import fcntl
import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trimtab.folder import RunFolder
from trimtab.report.model import Run, RunState
from trimtab.report.sources.lines import read_lines
from trimtab.report.sources.rows import flatten, injected_of, planned_of, seed_of

LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
STALE_SECONDS = 3600.0  # a run on another machine that has written nothing for so long is taken for dead


def load_folder(path: Path, name: str = "") -> Run:
    """The run in ``path``; of a step that metrics.jsonl holds twice the last line counts; a torn one is dropped."""
    folder = RunFolder(path, "no")
    remarks: list[str] = []
    config = flatten(_config(folder.config, remarks))
    table, wrong = read_lines(folder.metrics)
    status = _object(folder.status)
    state, error = _state(path, status)
    preset = _preset(folder.overrides)
    return Run(
        name=name or path.name,
        config=config | ({"preset": preset} if preset and "preset" not in config else {}),
        seed=seed_of(config),
        state=state,
        step=table.step,
        columns=table.columns,
        path=path,
        run_id=str(status.get("run_id") or ""),
        error=error,
        attempt=_whole(status.get("attempt"), 1),
        injected=injected_of(config),
        nonfinite=table.nonfinite,
        broken=table.broken,
        updated=_updated(status, folder),
        remarks=(*remarks, *wrong),
        planned=planned_of(config),
    )


def _config(path: Path, remarks: list[str]) -> Mapping[str, Any]:
    try:
        found = yaml.load(path.read_bytes(), Loader=LOADER)
    except FileNotFoundError:
        remarks.append("there is no config.yaml: its settings are unknown")
        return {}
    except (OSError, yaml.YAMLError, ValueError) as error:
        remarks.append(f"config.yaml cannot be read ({str(error).splitlines()[0]}): its settings are unknown")
        return {}
    if not isinstance(found, dict):
        remarks.append("config.yaml holds no settings")
        return {}
    return found


def _preset(path: Path) -> str:
    """The preset asked for; the resolved config no longer holds its name."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    found = [line.strip("- '\"").removeprefix("+") for line in lines]
    return next((line.removeprefix("preset=") for line in reversed(found) if line.startswith("preset=")), "")


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def _state(path: Path, status: Mapping[str, Any]) -> tuple[RunState, str]:
    """How the run stands, and its error; one that says ``running`` though nothing runs it was killed."""
    states = {state.value: state for state in RunState}
    state = states.get(str(status.get("state")), RunState.unknown)
    if state is RunState.running and _dead(path, status):
        return RunState.failed, "killed: it says running, but no process holds its lock (resume=auto goes on with it)"
    return state, str(status.get("error") or "")


def _dead(path: Path, status: Mapping[str, Any]) -> bool:
    if status.get("host") != socket.gethostname():  # a lock need not be seen from another machine
        updated = status.get("updated")
        return isinstance(updated, int | float) and time.time() - updated > STALE_SECONDS
    try:
        with (path / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _updated(status: Mapping[str, Any], folder: RunFolder) -> float:
    value = status.get("updated")
    if isinstance(value, int | float):
        return float(value)
    return folder.metrics.stat().st_mtime if folder.metrics.exists() else 0.0
