"""An asynchronous run whose engine or trainer is killed: it goes on or says how it ended; nothing hangs or stays."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from e2e.program import BATCH, VARIED, Program, logged, rows, series, status, wait_until

RUN = (*BATCH, *VARIED, "rollout=vllm", "rollout.mode=async", "rollout.max_lag=1", "rollout.kv_cache_gib=0.1",
       "evaluation.every=0", "checkpoint.every=5", "run_dir=run", "resume=auto")  # fmt: skip


def engines_of(trainer: int) -> list[int]:
    """Process ids of the vLLM engines that descend from a process."""
    found, todo = [], [trainer]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                todo.append(child)
                if "EngineCor" in Path(f"/proc/{child}/comm").read_text():  # cut at 15 characters
                    found.append(child)
    return found


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie, which its parent has not looked at, has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(pid: int, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not gone(pid):
        assert time.monotonic() < end, "the engine's process was left behind"
        time.sleep(0.05)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_engine_killed_the_run_interrupted_the_trainer_killed(program: Program, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = program.start(*RUN, "steps=100000", "optim.schedule=constant")
    wait_until(logged(run, 3), process)
    assert process.poll() is None, (tmp_path / "output").read_text()
    (engine,) = engines_of(process.pid)
    os.kill(engine, signal.SIGKILL)
    at = rows(run)[-1]["step"]
    wait_until(logged(run, at + 5), process)  # it is started again, with the weights of the last hand-over
    assert process.poll() is None and series(run, "train/engine_restarts")[-1] == 1
    assert max(series(run, "train/lag_max")) <= 1
    assert max(series(run, "train/train_rollout_logprob_abs_diff")) < 0.5
    (engine,) = engines_of(process.pid)
    os.kill(engine, signal.SIGTERM)  # what asks a run to stop reaches its whole group; the engine waits for the trainer
    os.kill(engine, signal.SIGINT)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 75
    wait_gone(engine)
    assert status(run)["state"] == "preempted"

    process = program.start(*RUN, "steps=100000", "optim.schedule=constant")
    done = status(run)["step"]
    wait_until(logged(run, done + 3), process)
    steps = [row["step"] for row in rows(run)]
    assert steps == list(range(1, len(steps) + 1)) and steps[-1] > done
    (engine,) = engines_of(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_gone(engine)


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_that_keeps_dying_ends_the_run_with_a_true_status(program: Program, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = program.start(*RUN, "steps=100000", "rollout.max_tokens=200", "rollout.batch_size=64")
    wait_until(lambda: bool(run.exists() and engines_of(process.pid)), process)
    end, last = time.monotonic() + 400, 0
    while process.poll() is None:
        assert time.monotonic() < end, "the run neither went on nor ended"
        for engine in engines_of(process.pid):
            if engine != last:
                last = engine
                os.kill(engine, signal.SIGKILL)  # each at its very start
        time.sleep(0.1)
    assert process.wait() == 1
    assert status(run)["state"] == "failed" and "EngineError" in status(run)["error"]
