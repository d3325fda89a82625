"""Cheap programs for launchers to run: no torch, seconds long, resumable. ``launch.program=program:<name>``.

What they do beside that is said by the overrides: ``tick=0.1`` seconds a step, ``at=3`` the step at which they do it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from trimtab.errors import Preempted, TrimtabError
from trimtab.spec import RunSpec


def _options(overrides: Sequence[str]) -> dict[str, float]:
    pairs = (override.lstrip("+").split("=", 1) for override in overrides)
    return {key: float(value) for key, value in pairs if key in ("tick", "at", "setup")}


def steps(spec: RunSpec, overrides: Sequence[str]) -> float:
    """Count to ``spec.steps`` from where the last start stopped; a line of metrics.jsonl each; the sum of all."""
    asked: list[int] = []
    options = _options(overrides)
    time.sleep(options.get("setup", 0))  # signals that come now are the launcher's affair
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: asked.append(number))
    folder = Path(spec.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / "saved.json"
    done = json.loads(saved.read_text()) if saved.exists() else []
    with (folder / "starts.txt").open("a") as file:
        file.write(f"{os.getpid()} {os.getppid()} {len(done)} {os.environ.get('TRIMTAB_LAUNCH')}\n")
    while len(done) < spec.steps:
        time.sleep(options.get("tick", 0.02))
        done.append((len(done) + 1) * spec.seed)
        print(f"step {len(done)} of seed {spec.seed}", flush=True)
        if asked:
            _save(saved, done)
            raise Preempted(f"{signal.Signals(asked[0]).name} after step {len(done)}")
        if len(done) % 5 == 0:
            _save(saved, done)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i + 1, "x": x}) + "\n" for i, x in enumerate(done))
    )
    return float(sum(done))


def _save(path: Path, done: list[int]) -> None:
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(done))
    beside.replace(path)


def deaf(spec: RunSpec, overrides: Sequence[str]) -> float:
    """Sleep without a handler for any signal."""
    (Path(spec.run_dir) / "begun").touch()
    time.sleep(_options(overrides).get("tick", 60))
    return 1.0


def odd_seeds_fail(spec: RunSpec, overrides: Sequence[str]) -> float:
    """Raise for odd seeds."""
    if spec.seed % 2:
        raise ValueError(f"seed {spec.seed} is odd\nand that is all")
    return float(spec.seed)


def odd_seeds_are_refused(spec: RunSpec, overrides: Sequence[str]) -> float:
    """Raise an error of trimtab's for odd seeds."""
    if spec.seed % 2:
        raise TrimtabError(f"seed={spec.seed} is odd")
    return float(spec.seed)


def odd_seeds_are_killed(spec: RunSpec, overrides: Sequence[str]) -> float:
    """The first start of an odd seed ends by SIGKILL, as the kernel does when memory runs out."""
    first = Path(spec.run_dir) / "first"
    if spec.seed % 2 and not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(spec.seed)


def odd_seeds_exit(spec: RunSpec, overrides: Sequence[str]) -> float:
    """Odd seeds leave without a word."""
    if spec.seed % 2:
        os._exit(7)
    return float(spec.seed)


def all_reduce(spec: RunSpec, overrides: Sequence[str]) -> float:
    """Sum rank + 1 over all ranks, ``spec.steps`` times; ``at=<rank>`` fails."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    rank, failing = distributed.get_rank(), _options(overrides).get("at", -1)
    total = torch.zeros(1)
    for _ in range(spec.steps):
        if rank == failing:
            raise ValueError(f"rank {rank} fails")
        total = torch.tensor([rank + 1.0])
        distributed.all_reduce(total)
        time.sleep(_options(overrides).get("tick", 0))
    print(f"rank {rank} of {distributed.get_world_size()} at {os.environ['MASTER_PORT']}: {total.item():g}", flush=True)
    distributed.destroy_process_group()
    return float(total.item())


def hung_without_rank_1(spec: RunSpec, overrides: Sequence[str]) -> float:
    """Rank 1 is killed; the others wait for ever, deaf to what can be refused."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    return 0.0


def where(spec: RunSpec, overrides: Sequence[str]) -> float:
    """Say in which folder the run is."""
    (Path(spec.run_dir) / "cwd.txt").write_text(os.getcwd())
    return 0.0


def threads(spec: RunSpec, overrides: Sequence[str]) -> float:
    """How many threads the run is to use; 0: whatever it likes."""
    return float(os.environ.get("OMP_NUM_THREADS", 0))
