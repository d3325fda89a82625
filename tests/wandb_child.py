"""Code in a process of its own: W&B's client keeps state for a process, and a helper process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

HEAD = """
    import json, logging, os, signal, subprocess, sys, time
    from pathlib import Path
    from trimtab.spec import TrackerSpec
    from trimtab.track import wandb as ours
    from trimtab.track.wandb import WandbTracker
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    FINISH = 30.0
    def started(run_id, folder, **spec):
        tracker = WandbTracker(TrackerSpec(**{"finish_seconds": FINISH, **spec}))
        tracker.start({"seed": 1}, run_id, "name-" + run_id, Path(folder))
        return tracker
    def helper():
        for _ in range(300):  # the client starts it in the background
            for line in subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True).stdout.splitlines():
                if "wandb-core" in line and line.endswith(f"--pid {os.getpid()}"):
                    return int(line.split()[0])
            time.sleep(0.1)
        raise SystemExit("no helper process found")
    def until(true, seconds=10):
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "it did not come true"
            time.sleep(0.02)
"""


def child(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` after ``HEAD``, with nothing of W&B in the environment but what is given; offline by default."""
    base = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    own = {"WANDB_MODE": "offline", "PYTHONPATH": os.pathsep.join(sys.path), "NETRC": str(cwd / "none")}
    with (cwd / "child.out").open("w+") as out, (cwd / "child.err").open("w+") as err:
        # files, not pipes: a helper process that outlives the child would keep a pipe open
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(HEAD) + textwrap.dedent(code)],
            cwd=cwd, env=base | own | env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=120,
        )  # fmt: skip
    texts = [(cwd / name).read_text() for name in ("child.out", "child.err")]
    for name in ("child.out", "child.err"):
        (cwd / name).unlink()
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)
