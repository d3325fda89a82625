"""The real program as a subprocess, and how to read what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from e2e.warm import Forked, Warm

ROOT = Path(__file__).parents[2]
PLAIN = ("-m", "run")
# Pinned: what is tested must not move with the defaults.
BATCH = (
    "rollout.batch_size=16",
    "rollout.group_size=4",
    "rollout.max_tokens=6",
    "rollout.probe_every=1",
    "optim.schedule=constant",
)
VARIED = ("task=custom", "task.path=e2e_task:Varied")
# The user's own settings must not change what is tested.
Process = subprocess.Popen[bytes] | Forked
LEFT_OUT = ("HYDRA_FULL_ERROR", "WANDB_API_KEY", "WANDB_MODE", "HF_TOKEN", "VLLM_ENABLE_V1_MULTIPROCESSING")


class Program:
    """Starts trimtab in ``cwd`` with the tiny random model from one shared cache.

    With ``warm``, what needs no other environment and is not to be ``fresh`` is forked from it, in a fifth of the time.
    """

    def __init__(self, cwd: Path, cache: Path, warm: Warm | None = None) -> None:
        self.cwd, self._cache, self._warm = cwd, cache, warm

    def command(self, overrides: tuple[str, ...], entry: tuple[str, ...] = PLAIN) -> list[str]:
        tiny = ("policy.warmup_accuracy=0", f"policy.cache_dir={self._cache}")
        flags = [given for given in overrides if given.startswith("-")]  # Hydra wants them first
        return [sys.executable, *entry, *flags, *tiny, *(given for given in overrides if given not in flags)]

    def environment(self, env: Mapping[str, str] | None, shim: Path | None) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
        paths = [*([shim] if shim else []), ROOT / "src", Path(__file__).parent]
        return kept | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"} | dict(env or {})

    def call(
        self,
        *overrides: str,
        env: Mapping[str, str] | None = None,
        shim: Path | None = None,
        entry: tuple[str, ...] = PLAIN,
        before: Callable[[], None] | None = None,
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        if self._warm and not (env or shim or before or fresh or entry != PLAIN):
            return self._forked(self._warm, overrides)
        return subprocess.run(
            self.command(overrides, entry),
            cwd=self.cwd,
            env=self.environment(env, shim),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            preexec_fn=before,
        )

    def _forked(self, warm: Warm, overrides: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        arguments = self.command(overrides)[1 + len(PLAIN) :]
        with TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            code = warm.start(arguments, self.cwd, self.environment(None, None), out, err).wait()
            return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())

    def good(
        self, *overrides: str, env: Mapping[str, str] | None = None, fresh: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end, which must be a good one."""
        done = self.call(*overrides, env=env, fresh=fresh)
        assert done.returncode == 0, done.stderr
        return done

    def start(self, *overrides: str) -> Process:
        """Run in the background; its output goes to ``cwd/output``."""
        if self._warm:
            arguments, output = self.command(overrides)[1 + len(PLAIN) :], self.cwd / "output"
            return self._warm.start(arguments, self.cwd, self.environment(None, None), output, output)
        with (self.cwd / "output").open("ab") as output:
            return subprocess.Popen(
                self.command(overrides), cwd=self.cwd, env=self.environment(None, None), stdout=output, stderr=output
            )


def wait_until(condition: Callable[[], bool], process: Process, seconds: float = 120) -> None:
    """Poll until the condition holds or the process has ended."""
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.0005)


def lines(run_dir: Path) -> list[str]:
    """metrics.jsonl line by line, without what a clock decides."""
    found = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        found.append(json.dumps({k: v for k, v in record.items() if not k.startswith(("time/", "perf/"))}))
    return found


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of the training steps."""
    return [row for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if row["step"]]


def series(run_dir: Path, name: str) -> list[float]:
    """One metric, step by step."""
    return [row[name] for row in rows(run_dir)]


def status(run_dir: Path) -> dict[str, Any]:
    """status.json."""
    found: dict[str, Any] = json.loads((run_dir / "status.json").read_text())
    return found


def logged(run_dir: Path, step: int) -> Callable[[], bool]:
    """Whether a step has been logged."""
    path = run_dir / "metrics.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") > step
