"""Several runs in one job: start-up paid once, and each run with its own status, log and end."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from launch.made import SEARCH, job, packed, result, run_dir, spec_of, sweep, until

from trimtab.launch import node
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Slot, State
from trimtab.spec.launch import Packing

HEAVY = """
import time
from dataclasses import replace
from pathlib import Path
print("importing", flush=True)
time.sleep(1.0)
def preload(specs):
    print("preloading", len(specs), flush=True)
def run(spec, overrides):
    time.sleep(0.5)
    return 1.0
"""


def carried_out(folder: SweepFolder, **environment: str) -> tuple[int, str, float]:
    """Exit code, output and seconds of a job with all of the sweep's runs."""
    batch = folder.new_batch("local", "default", [Slot(tuple((run.dir, 1) for run in folder.sweep().runs))])
    begin = time.monotonic()
    process = job(folder, batch.id, **environment)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out, time.monotonic() - begin


@pytest.mark.parametrize("packing", Packing)
def test_imports_are_paid_once(tmp_path: Path, packing: Packing) -> None:
    (tmp_path / "heavy.py").write_text(HEAVY)
    folder = sweep(tmp_path / "s", spec_of("heavy:run", packed(packing)), [1, 2, 3, 4])
    code, out, seconds = carried_out(folder, PYTHONPATH=f"{SEARCH}:{tmp_path}")
    assert code == 0 and out.count("importing") == 1 and "preloading 4" in out
    assert all(result(folder, i).state is State.completed for i in range(4))
    spans = [(result(folder, i).started, result(folder, i).ended) for i in range(4)]
    overlaps = sum(a[0] < b[1] and b[0] < a[1] for a in spans for b in spans) - 4
    assert overlaps == (0 if packing is Packing.in_turn else 12)
    assert seconds < 4 * 1.5


def test_cores_are_shared_by_what_runs_at_the_same_time() -> None:
    """Runs that each take every core slow one another down; what the user chose is left alone."""
    four = dict.fromkeys(["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"], "4")
    assert node.threads({}, 13, 3) == four
    assert node.threads({"MKL_NUM_THREADS": "2"}, 4, 1) == {k: v for k, v in four.items() if k != "MKL_NUM_THREADS"}
    assert node.threads({"OMP_NUM_THREADS": "9"}, 4, 1) == {}
    assert set(node.threads({}, 2, 3).values()) == {"1"}
    here = len(os.sched_getaffinity(0))
    assert node.cores({"SLURM_CPUS_PER_TASK": "1"}) == 1 and node.cores({}) == here
    assert node.cores({"SLURM_CPUS_PER_TASK": str(here + 1)}) == here


@pytest.mark.parametrize(
    ("packing", "at_once", "cluster", "share"),
    [
        (Packing.in_turn, 1, "local", 0),  # the only one: it takes what it likes
        (Packing.in_turn, 3, "local", 0),  # a sweep of one job
        (Packing.side_by_side, 1, "local", 2),
        (Packing.in_turn, 1, "alpha", 1),
        (Packing.side_by_side, 1, "alpha", 2),
    ],
)
def test_a_run_gets_its_share_before_anything_is_imported(
    tmp_path: Path, packing: Packing, at_once: int, cluster: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in node.POOLS:
        monkeypatch.delenv(name, raising=False)
    spec = spec_of("program:threads", replace(packed(packing), at_once=at_once), runs_per_job=2)
    folder = sweep(tmp_path / "s", spec, [1, 2])
    batch = folder.new_batch(cluster, "default", [Slot(tuple((run.dir, 1) for run in folder.sweep().runs))])
    job(folder, batch.id).communicate(timeout=60)
    cores = len(os.sched_getaffinity(0))
    assert result(folder, 0).objective == (max(cores // share, 1) if share else 0)


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize(
    ("program", "state", "words"),
    [
        ("odd_seeds_fail", State.failed, "ValueError: seed 3 is odd"),
        ("odd_seeds_are_killed", State.out_of_memory, "killed by SIGKILL; most likely the memory ran out"),
        ("odd_seeds_exit", State.failed, "its process ended with exit code 7 and left no result; see log.txt"),
    ],
)
def test_a_run_that_fails_hurts_no_other(
    tmp_path: Path, packing: Packing, program: str, state: State, words: str
) -> None:
    folder = sweep(tmp_path / "s", spec_of(f"program:{program}", packed(packing)), [2, 3, 4])
    code, _, _ = carried_out(folder)
    assert code == 1
    assert [result(folder, i).state for i in range(3)] == [State.completed, state, State.completed]
    assert (result(folder, 1).error, result(folder, 0).error) == (words, "")
    assert all((run_dir(folder, i) / "log.txt").read_text().count("== attempt 1") == 1 for i in range(3))


def test_side_by_side_the_jobs_log_says_whose_each_line_is(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", spec_of("program:steps", packed(Packing.side_by_side)), [2, 3])
    _, out, _ = carried_out(folder)
    names = [run.dir for run in folder.sweep().runs]
    lines = [line for line in out.splitlines() if "step" in line]
    assert sorted(lines) == sorted(
        f"{n}: step {i} of seed {s}" for n, s in zip(names, (2, 3), strict=True) for i in range(1, 6)
    )


@pytest.mark.parametrize("packing", Packing)
def test_a_stopped_job_goes_on_with_what_is_left(tmp_path: Path, packing: Packing) -> None:
    spec = spec_of("program:steps", packed(packing))
    folder = sweep(tmp_path / "s", spec, [1, 2, 3], steps=20, overrides=["tick=0.05"])
    batch = folder.new_batch("local", "default", [Slot(tuple((run.dir, 1) for run in folder.sweep().runs))])
    first = job(folder, batch.id)
    last = 1 if packing is Packing.in_turn else 2
    until(lambda: "step 2 " in (log.read_text() if (log := run_dir(folder, last) / "log.txt").exists() else ""))
    first.send_signal(signal.SIGUSR2)
    first.communicate(timeout=20)
    assert first.returncode == 75
    again = job(folder, batch.id)
    again.communicate(timeout=20)
    assert again.returncode == 0
    assert [result(folder, i).objective for i in range(3)] == [210, 420, 630]
    starts = [len((run_dir(folder, i) / "starts.txt").read_text().splitlines()) for i in range(3)]
    assert starts == ([1, 2, 1] if packing is Packing.in_turn else [2, 2, 2])


@pytest.mark.slow
@pytest.mark.parametrize("packing", Packing)
def test_real_runs_that_are_forked_equal_those_of_a_process_each(
    tmp_path: Path, packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.config import compose

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else each has its share of the cores, and sums in another order
    base = compose(["task=arithmetic", "policy=tiny", "rollout=transformers", "policy.warmup_accuracy=0.0"])
    program = "trimtab.experiment:run"
    both = sweep(tmp_path / "both", spec_of(program, packed(packing)), [1, 2], steps=2, base=base)
    code, out, _ = carried_out(both)
    assert code == 0, out
    for i, seed in enumerate((1, 2)):
        alone = sweep(tmp_path / f"alone{seed}", spec_of(program), [seed], steps=2, base=base)
        assert carried_out(alone)[0] == 0
        assert result(alone, 0).objective == result(both, i).objective
        assert _metrics(run_dir(alone, 0)) == _metrics(run_dir(both, i))


def _metrics(folder: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what is of the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "second", "perf", "memory", "per_s")
    return [{k: v for k, v in line.items() if not any(word in k for word in timed)} for line in lines]
