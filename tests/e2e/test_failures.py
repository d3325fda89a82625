"""A run that cannot go on says why and what mends it; its exit code and status.json are true."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e.program import BATCH, PLAIN, VARIED, Program, lines, status

RUN = ("rollout=transformers", *BATCH, *VARIED, "steps=3", "evaluation.every=0", "run_dir=run")
BAD = (
    ("steps=-1", "steps"),
    ("optim.lr=fast", "optim.lr"),
    ("algo=ppo", "bypass"),
    ("rollout.group_size=3", "rollout.group_size"),
    ("level=word", "geometric"),
    ("mis.tis_upper_bound=-2", "mis.tis_upper_bound"),
    ("rollout.top_p=0.9", "rollout.top_p"),
    ("policy=hf", "policy.path"),
    ("resume=/no/such/folder", "resume=auto"),
    ("mismatch=logit_noise rollout=vllm", "rollout=transformers"),
    ("optim.learning_rate=1", "optim has: lr, betas"),
)
NO_VLLM = ("-c", "import sys; sys.modules['vllm'] = None; import run; run.main()")


@pytest.fixture
def no_torch(tmp_path: Path) -> Path:
    """A folder to import from in which torch ends the process."""
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    return tmp_path / "shim"


def test_bad_values_are_refused_before_torch_is_imported(program: Program, no_torch: Path, tmp_path: Path) -> None:
    def refuse(given: str) -> subprocess.CompletedProcess[str]:
        return program.call(*RUN, *given.split(), shim=no_torch)

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(refuse, [given for given, _ in BAD]))
    for (given, hint), done in zip(BAD, ended, strict=True):
        assert done.returncode == 2, (given, done)
        assert hint in done.stderr and "Traceback" not in done.stderr and done.stdout == "", (given, done.stderr)
        assert all(line.startswith(("error: ", "note: ")) for line in done.stderr.splitlines())
    assert [path.name for path in tmp_path.iterdir()] == ["shim"]
    assert program.call(*RUN, shim=no_torch).stderr == "torch was imported\n"  # else this proves nothing


@pytest.mark.slow
@pytest.mark.parametrize(("content", "hint"), [(None, "config.json"), ("{}", "it lacks weights")])
def test_a_folder_that_is_no_model(program: Program, tmp_path: Path, content: str | None, hint: str) -> None:
    (tmp_path / "model").mkdir()
    if content is not None:
        (tmp_path / "model" / "config.json").write_text(content)
    done = program.call(*RUN, "policy=hf", "policy.path=model")
    assert done.returncode == 1 and "policy.path=" in done.stderr and hint in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    found = status(tmp_path / "run")
    assert found["state"] == "failed" and found["error"].startswith("ModelError: ") and str(hint) in found["error"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["import", "absent"])
def test_vllm_that_cannot_be_imported(program: Program, tmp_path: Path, broken: str) -> None:
    shim = tmp_path / "shim" / "vllm"
    shim.mkdir(parents=True)
    (shim / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')\n")
    overrides = (*RUN, "rollout=vllm")
    if broken == "import":
        done = program.call(*overrides, shim=shim.parent)
        assert "libcuda.so.1" in done.stderr
    else:
        done = program.call(*overrides, entry=NO_VLLM)
    assert done.returncode == 1 and "rollout=transformers" in done.stderr and "install" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert status(tmp_path / "run")["state"] == "failed"
    assert status(tmp_path / "run")["error"].startswith("EngineError: vLLM is ")
    # Mended as the message says, in the same folder: nothing was trained, so nothing is in the way.
    program.good(*RUN)
    assert status(tmp_path / "run")["state"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize("debug", ["none", "anomaly"])
def test_a_crash_in_a_users_reward(program: Program, tmp_path: Path, debug: str) -> None:
    done = program.call(*RUN, "+task.options.fail_at=20", f"debug={debug}", "checkpoint.every=1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "e2e_task.py" in done.stderr and "with a second line" in done.stderr
    found = status(tmp_path / "run")
    assert found["state"] == "failed" and found["error"] == "LookupError: the rubric is lost" and found["step"] == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["state"] == "failed" and summary["steps"] == 1


@pytest.mark.slow
def test_anomaly_detection_changes_no_number(program: Program, tmp_path: Path) -> None:
    program.good(*RUN)
    program.good(*RUN, "debug=anomaly", "run_dir=anomaly")
    assert lines(tmp_path / "run") == lines(tmp_path / "anomaly")


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(program: Program, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = program.call(*RUN, "run_dir=file/run")
    assert done.returncode == 2 and "run_dir=" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB: room for two checkpoints of 10 MiB and a third in the making, not for a stale one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting is not permitted")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("room", [15_000_000, 3_000_000, 0])
def test_a_full_disk(program: Program, small_disk: Path, tmp_path: Path, room: int) -> None:
    """``room`` bytes are free when the run goes on after its first checkpoint."""
    run, overrides = small_disk / "run", (*RUN, "checkpoint.every=1", "steps=6", "rollout.record_every=1")
    program.good(*overrides, f"run_dir={run}", "steps=1")
    free = os.statvfs(small_disk)
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        left = free.f_bavail * free.f_frsize - room
        while left > 0:
            left -= file.write(b"\0" * min(left, 1 << 20))
    done = program.call(*overrides, f"run_dir={run}", "resume=auto")
    assert done.returncode == 1, done.stderr
    assert "No space left" in done.stderr and "resume=auto" in done.stderr and "Traceback" not in done.stderr
    found = status(run)
    assert found["state"] == "failed" and "No space left" in found["error"], found
    ballast.unlink()
    program.good(*overrides, f"run_dir={run}", "resume=auto")
    program.good(*overrides, "run_dir=other")
    assert lines(run) == lines(tmp_path / "other") and status(run)["state"] == "completed"
    assert not list(run.rglob(".status*")) and not list((run / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_files_may_not_grow(program: Program, tmp_path: Path) -> None:
    """A quota: the optimizer's 7 MB fail, all else goes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))

    program.good(*RUN, "checkpoint.every=2", "run_dir=other")  # makes the model, too
    done = program.call(*RUN, "checkpoint.every=2", entry=PLAIN, before=limit)
    assert done.returncode == 1 and "File too large" in done.stderr
    found = status(tmp_path / "run")
    assert found["state"] == "failed" and "File too large" in found["error"] and found["step"] == 2
    assert "resume=auto" in done.stderr and "Traceback" not in done.stderr
    program.good(*RUN, "checkpoint.every=2", "resume=auto")
    assert lines(tmp_path / "run") == lines(tmp_path / "other")
