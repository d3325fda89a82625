"""The console: what stands in a line, how often it comes, and terminals of every kind."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from trimtab.track import ConsoleTracker, setup_progress, summary_table
from trimtab.track.console import duration, plain_progress, spark

METRICS = {
    "train/reward": 0.5,
    "train/mis_k3_kl": 1.23e-7,
    "train/mis_ess": 0.987,
    "train/mis_kept_token_fraction": 0.9951,
    "perf/tokens_per_second": 12345.6,
    "train/other": 1.0,
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ascii_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=60), out


def run(steps: int, seconds: float, records: range | None = None) -> list[str]:
    console, out = ascii_console()
    clock = Clock()
    tracker = ConsoleTracker(steps, console, clock)
    tracker.start({}, "id", "tiny-decoupled", Path("runs/x"))
    for step in records if records is not None else range(1, steps + 1):
        tracker.log(step, METRICS)
        clock.now += seconds
    tracker.finish("completed", {})
    return out.getvalue().splitlines()


def test_a_plain_line() -> None:
    lines = run(300, 0.3)
    assert lines[0] == "training tiny-decoupled in runs/x" and lines[-1] == "run completed"
    parts = lines[2].split("  ")
    assert parts[0] == "step 31/300" and parts[1].startswith("reward 0.500 ")
    assert parts[2:] == ["mismatch KL 1.2e-07", "ESS 0.987", "kept 99.5%", "tok/s 12,346", "left 1:21"]  # 269 · 0.3 s


def test_plain_lines_are_few_but_never_far_apart() -> None:
    assert [line.split()[1] for line in run(300, 0.01)[1:-1]] == [f"{s}/300" for s in (*range(1, 300, 30), 300)]
    assert [line.split()[1] for line in run(300, 4.0)[1:5]] == ["1/300", "4/300", "7/300", "10/300"]
    assert len(run(3, 0.01)) == 5


def test_metrics_that_are_missing_or_not_finite() -> None:
    console, _ = ascii_console()
    tracker = ConsoleTracker(10, console)
    assert tracker.line(3, {}, 0.0) == "step 3/10"
    tracker.log(1, {"train/reward": math.nan})
    assert "reward nan" in tracker.line(2, {"train/reward": math.nan, "train/mis_k3_kl": math.inf}, 0.0)


def test_time_left_counts_from_where_the_run_resumed() -> None:
    lines = run(300, 1.0, range(201, 301))
    assert lines[1].startswith("step 201/300") and "left" not in lines[1]
    assert lines[2].split("  ")[0] == "step 211/300" and lines[2].endswith("left 1:29")


def test_spark_and_duration() -> None:
    assert spark([0.0, 0.5, 1.0], True) == "▁▅█" and spark([0.0, 1.0], False) == "_#"
    assert spark([], True) == spark([math.nan], True) == ""
    assert len(spark([i / 300 for i in range(300)], True)) == 16
    assert spark([-1.0, 3.0], True) == "▁█"
    assert [duration(s) for s in (0, 59.6, 75, 3700, -1)] == ["0:00", "1:00", "1:15", "1:01:40", "0:00"]


def test_a_terminal_gets_one_live_line() -> None:
    out = io.StringIO()
    console = Console(file=out, width=150, force_terminal=True, legacy_windows=False)
    tracker = ConsoleTracker(100, console)
    tracker.start({}, "id", "n", Path("runs/x"))
    for step in range(1, 101):
        tracker.log(step, METRICS)
    tracker.finish("completed", {})
    text = out.getvalue()
    assert "step 100/100" in text and text.count("\n") <= 5  # the line is redrawn, not repeated


def test_a_terminal_that_only_knows_ascii() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=60)
    tracker = ConsoleTracker(2, console)
    tracker.start({}, "id", "n", Path("runs/x"))
    tracker.log(1, METRICS)
    tracker.finish("completed", {})
    summary_table({"reward": (0.4, 0.9)}, console=console)
    console.file.flush()
    assert b"step 1/2  reward 0.500" in raw.getvalue() and b"| reward |" in raw.getvalue()


def test_summary_table() -> None:
    console, out = ascii_console()
    path = "runs/" + "x" * 100
    summary_table({"reward": (0.41237, 0.9), "steps": (None, 300)}, footer=[f"files: {path}"], console=console)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    assert rows == [["reward", "0.4124", "0.9"], ["steps", "-", "300"]]
    assert f"files: {path}\n" in out.getvalue()
    assert "before" in out.getvalue() and "after" in out.getvalue()


def test_set_up_progress_in_plain_lines() -> None:
    console, out = ascii_console()
    clock = Clock()
    report = plain_progress("warm-up", console, clock)
    for done in range(0, 101):
        report(done, 100, "accuracy 0.1")
        clock.now += 1.0
    steps = [line.split()[1] for line in out.getvalue().splitlines()]
    assert steps == [f"{i}/100" for i in range(0, 101, 10)]


def test_set_up_progress_on_a_terminal() -> None:
    out = io.StringIO()
    with setup_progress("warm-up", Console(file=out, width=100, force_terminal=True)) as progress:
        progress(1, 2, "half")
        progress(2, 2, "done")
    assert "warm-up" in out.getvalue() and "100%" in out.getvalue() and "done" in out.getvalue()
    console, plain = ascii_console()
    with setup_progress("warm-up", console) as progress:
        progress(1, 2, "half")
    assert plain.getvalue() == "warm-up 1/2 half\n"


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    script = (
        "import sys; from pathlib import Path; from trimtab.track import ConsoleTracker\n"
        "t = ConsoleTracker(500); t.start({}, 'i', 'n', Path('r'))\n"
        "for i in range(500): t._printed = None; t.log(i, {'train/reward': 0.5})\n"
        "t.finish('completed', {}); print('alive', file=sys.stderr)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    errors = child.stderr.read().decode()
    child.stderr.close()
    child.wait()
    assert (errors, child.returncode) == ("alive\n", 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_does_not_end_the_run() -> None:
    script = (
        "import sys; from pathlib import Path; from trimtab.track import ConsoleTracker, summary_table\n"
        "t = ConsoleTracker(9); t.start({}, 'i', 'n', Path('r')); t.log(1, {'train/reward': 0.5})\n"
        "t.finish('completed', {}); summary_table({'a': (1, 2)}); print('alive', file=sys.stderr)"
    )
    with open("/dev/full", "w") as full:
        child = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True)
    assert child.returncode == 0 and child.stderr.endswith("alive\n") and "Traceback" not in child.stderr
