"""Stopping a run at any moment and going on leaves the same metrics as never stopping it."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.program import BATCH, VARIED, Process, Program, lines, logged, series, status, wait_until

STEPS = 24
COMMON = (*BATCH, *VARIED, f"steps={STEPS}", "checkpoint.every=3", "evaluation.every=5", "rollout.record_every=4")
TRANSFORMERS = ("rollout=transformers", *COMMON)
VLLM = ("rollout=vllm", *COMMON)
ENGINES = [
    pytest.param(TRANSFORMERS, marks=pytest.mark.slow, id="transformers"),
    pytest.param(VLLM, marks=pytest.mark.vllm, id="vllm"),
]
Undisturbed = Callable[[tuple[str, ...]], Path]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Undisturbed:
    """The folder of a run of these overrides that nothing stopped; made once. Copy it before changing it."""
    made: dict[tuple[str, ...], Path] = {}

    def of(overrides: tuple[str, ...]) -> Path:
        if overrides not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            Program(folder, cache).good(*overrides, "run_dir=run")  # from a fresh interpreter, with its own hash seed
            made[overrides] = folder / "run"
        return made[overrides]

    return of


def recorded(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "rollouts").iterdir())


def check_equal(run_dir: Path, other: Path) -> None:
    """Metrics line for line, weights byte for byte, the same recordings."""
    assert lines(run_dir) == lines(other)
    last = f"checkpoints/step_{STEPS:08d}/model.safetensors"
    assert (run_dir / last).read_bytes() == (other / last).read_bytes()
    assert recorded(run_dir) == recorded(other)


def kill(process: Process) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def at_a_random_moment(seed: int, run: Path, process: Process) -> None:
    draw = random.Random(seed)
    wait_until(logged(run, draw.randrange(STEPS // 2)), process)
    time.sleep(draw.random() * 0.4)
    kill(process)


def while_writing_a_checkpoint(seed: int, run: Path, process: Process) -> None:
    draw = random.Random(seed)
    wait_until(logged(run, 3 * draw.randrange(1, STEPS // 4)), process)
    wait_until(lambda: any((run / "checkpoints").glob(".step_*")), process)
    time.sleep(draw.random() * 0.01)
    kill(process)


@pytest.mark.parametrize("overrides", ENGINES)
def test_killed_and_resumed_until_done(
    program: Program, tmp_path: Path, overrides: tuple[str, ...], undisturbed: Undisturbed
) -> None:
    run = tmp_path / "run"
    moments = [at_a_random_moment, while_writing_a_checkpoint, at_a_random_moment, while_writing_a_checkpoint]
    for seed, moment in enumerate(moments):
        process = program.start(*overrides, "run_dir=run", "resume=auto")
        moment(seed, run, process)
        if process.returncode == 0:  # it was done before the moment came
            break
        assert process.returncode == -signal.SIGKILL, (tmp_path / "output").read_text()
    program.good(*overrides, "run_dir=run", "resume=auto")
    check_equal(run, undisturbed(overrides))
    assert status(run)["state"] == "completed" and not list((run / "checkpoints").glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_once(program: Program, tmp_path: Path, seed: int, undisturbed: Undisturbed) -> None:
    run = tmp_path / "run"
    process = program.start(*TRANSFORMERS, "run_dir=run")
    (at_a_random_moment if seed % 2 else while_writing_a_checkpoint)(10 + seed, run, process)
    assert process.returncode == -signal.SIGKILL, (tmp_path / "output").read_text()
    assert status(run)["state"] == "running"  # nobody was left to say otherwise
    program.good(*TRANSFORMERS, "run_dir=run", "resume=auto")
    check_equal(run, undisturbed(TRANSFORMERS))
    assert status(run)["attempt"] == 2


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        *(pytest.param(TRANSFORMERS, name, marks=pytest.mark.slow) for name in ("SIGTERM", "SIGUSR2", "SIGINT")),
        pytest.param(VLLM, "SIGUSR2", marks=pytest.mark.vllm),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_asked_to_stop(
    program: Program, tmp_path: Path, overrides: tuple[str, ...], name: str, undisturbed: Undisturbed
) -> None:
    run = tmp_path / "run"
    process = program.start(*overrides, "run_dir=run")
    wait_until(logged(run, 4), process)
    process.send_signal(signal.Signals[name])
    process.wait(timeout=60)
    output = (tmp_path / "output").read_text()
    assert process.returncode == 75, output
    assert "Traceback" not in output
    found = status(run)
    assert found["state"] == "preempted" and name in found["error"] and "resume=auto" in found["error"]
    assert json.loads((run / "summary.json").read_text())["state"] == "preempted"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert (run / "checkpoints" / f"step_{last:08d}").is_dir()
    program.good(*overrides, "run_dir=run", "resume=auto")
    check_equal(run, undisturbed(overrides))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_asked_to_stop_before_the_first_step(program: Program, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    process = program.start(*TRANSFORMERS, "run_dir=run")
    wait_until((run / "status.json").exists, process)
    time.sleep(0.05)
    process.send_signal(signal.Signals[name])
    process.wait(timeout=60)
    assert (process.returncode, status(run)["state"]) == (75, "preempted"), (tmp_path / "output").read_text()


@pytest.mark.slow
def test_a_completed_run_stays_as_it_is(program: Program, tmp_path: Path, undisturbed: Undisturbed) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed(TRANSFORMERS), run)
    before = (run / "metrics.jsonl").read_bytes()
    program.good(*TRANSFORMERS, "run_dir=run", "resume=auto")
    assert (run / "metrics.jsonl").read_bytes() == before
    check_equal(run, undisturbed(TRANSFORMERS))
    assert status(run)["state"] == "completed" and status(run)["step"] == STEPS

    done = program.call(*TRANSFORMERS, "run_dir=run")
    assert done.returncode == 2 and "resume=auto" in done.stderr and "completed" in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == before and status(run)["state"] == "completed"


@pytest.mark.slow
def test_another_configuration_is_refused_and_changes_nothing(
    program: Program, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed(TRANSFORMERS), run)
    names = ("metrics.jsonl", "config.yaml", "overrides.yaml", "summary.json", "environment.json")
    before = {name: (run / name).read_bytes() for name in names}
    done = program.call(*TRANSFORMERS, "run_dir=run", "resume=auto", "optim.lr=0.01")
    assert done.returncode == 2 and "same overrides" in done.stderr and "run_dir=" in done.stderr
    assert status(run)["state"] == "completed"
    assert {name: (run / name).read_bytes() for name in names} == before
    assert recorded(run) == recorded(undisturbed(TRANSFORMERS))


@pytest.mark.slow
def test_resuming_from_a_path_into_a_new_folder(program: Program, tmp_path: Path, undisturbed: Undisturbed) -> None:
    source = undisturbed(TRANSFORMERS)
    early = source / "checkpoints" / f"step_{STEPS - 3:08d}"
    assert early.is_dir()
    program.good(*TRANSFORMERS, "run_dir=from_checkpoint", f"resume={early}")
    run = tmp_path / "from_checkpoint"
    assert lines(run) == lines(source)
    last = f"checkpoints/step_{STEPS:08d}/model.safetensors"
    assert (run / last).read_bytes() == (source / last).read_bytes()
    program.good(*TRANSFORMERS, "run_dir=from_run", f"resume={source}")
    assert lines(tmp_path / "from_run") == lines(source)


@pytest.mark.slow
def test_resuming_from_a_path_spares_a_used_folder(program: Program, tmp_path: Path, undisturbed: Undisturbed) -> None:
    run = tmp_path / "run"
    program.good(*TRANSFORMERS, "run_dir=run", "seed=1", "steps=2")
    before = (run / "metrics.jsonl").read_bytes()
    done = program.call(*TRANSFORMERS, "run_dir=run", f"resume={undisturbed(TRANSFORMERS)}")
    assert done.returncode == 2 and "run_dir=" in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_more_steps_under_a_constant_rate(program: Program, tmp_path: Path, undisturbed: Undisturbed) -> None:
    program.good(*TRANSFORMERS, "run_dir=run", "steps=7")
    program.good(*TRANSFORMERS, "run_dir=run", "resume=auto")
    run, other = tmp_path / "run", undisturbed(TRANSFORMERS)
    for name in ("train/reward", "train/loss", "train/grad_norm", "train/tokens"):
        assert series(run, name) == series(other, name)
    # Step 7 was the last one then, so it was evaluated; nothing else differs.
    differ = [a for a, b in zip(map(json.loads, lines(run)), map(json.loads, lines(other)), strict=True) if a != b]
    assert [row["step"] for row in differ] == [7] and "eval/reward" in differ[0]


@pytest.mark.slow
def test_more_steps_under_a_schedule_are_refused(program: Program, tmp_path: Path) -> None:
    program.good(*TRANSFORMERS, "run_dir=run", "steps=3", "optim.schedule=cosine")
    done = program.call(*TRANSFORMERS, "run_dir=run", "steps=6", "optim.schedule=cosine", "resume=auto")
    assert done.returncode == 2 and "same overrides" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["bytes", "gone"])  # the rest: tests/train/test_checkpoint.py
def test_a_damaged_checkpoint_is_passed_over(
    program: Program, tmp_path: Path, damage: str, undisturbed: Undisturbed
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed(TRANSFORMERS), run)
    newest = run / "checkpoints" / f"step_{STEPS:08d}"
    match damage:
        case "bytes":
            data = bytearray((newest / "optimizer.safetensors").read_bytes())
            data[-100] ^= 1
            (newest / "optimizer.safetensors").write_bytes(data)
        case "gone":
            (newest / "random.safetensors").unlink()
    done = program.good(*TRANSFORMERS, "run_dir=run", "resume=auto")
    said = done.stdout + done.stderr
    assert "is damaged" in said and "trying the one before" in said
    check_equal(run, undisturbed(TRANSFORMERS))


@pytest.mark.slow
def test_a_second_process_is_refused(program: Program, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = program.start(*TRANSFORMERS, "steps=100000", "run_dir=run")
    try:
        wait_until(logged(run, 1), process)
        before = status(run)["pid"]
        for resume in ("auto", "no"):
            done = program.call(*TRANSFORMERS, "run_dir=run", f"resume={resume}")
            assert done.returncode == 2 and "in use by a running process" in done.stderr
        assert status(run)["pid"] == before == process.pid and status(run)["state"] == "running"
    finally:
        kill(process)
