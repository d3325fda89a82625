"""The real client against a double of the server: resume, and every way that a server or the client can die."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("wandb")

from wandb_child import child
from wandb_server import WandbServer

pytestmark = pytest.mark.slow


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as served:
        yield served
        assert served.unknown == []


FAST = {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.2"}  # instead of 15 s


def id_of(run_dir: Path) -> str:
    return str(json.loads((run_dir / "wandb.json").read_text())["id"])


def said(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("WARNING trimtab.track.wandb")]


def test_a_run_killed_and_requeued_is_one_run_without_a_step_twice(server: WandbServer, tmp_path: Path) -> None:
    sweep = tmp_path / "lr-sweep"
    (sweep / "0").mkdir(parents=True)
    (sweep / "multirun.yaml").write_text("")
    (sweep / "0" / "overrides.yaml").write_text("[algo=decoupled, seed=1, tracker=wandb, run_dir=x]")
    first = """
        tracker = started("abcd", "0")
        for step in range(8):
            tracker.log(step, {"x": float(step)})
        until(lambda: Path("seen").exists(), 60)
        os.kill(os.getpid(), signal.SIGKILL)
    """

    def tell_when_seen() -> None:
        for _ in range(600):
            if any(len(run.rows) == 8 for run in server.runs.values()):
                break
            time.sleep(0.05)
        (sweep / "seen").touch()

    watch = threading.Thread(target=tell_when_seen)
    watch.start()
    assert child(first, sweep, **server.env, **FAST).returncode == -9
    watch.join()
    second = """
        tracker = started("abcd", "0")
        for step in range(5, 12):  # from the checkpoint of step 4
            tracker.log(step, {"x": float(step)})
        tracker.finish("completed", {"objective": 0.5})
    """
    done = child(second, sweep, **server.env)
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = server.runs.values()
    assert run.name == id_of(sweep / "0") and run.name.startswith("abcd-")
    assert server.rows(run.name, "train/step") == list(range(12))
    assert (run.group, run.display_name, run.state) == ("lr-sweep", "algo=decoupled seed=1", "finished")
    assert run.summary["objective"] == 0.5 and run.summary["state"] == "completed" and run.config["seed"] == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused_makes_an_offline_run(server: WandbServer, tmp_path: Path, status: int) -> None:
    server.fail["*"] = [status] * 1000
    code = """
        begin = time.monotonic()
        tracker = started("abcd", "0")
        tracker.log(0, {"x": 1.0})
        assert time.monotonic() - begin < 1.0, "training waited"
        tracker.finish("completed", {})
        assert time.monotonic() - begin < 20.0
    """
    done = child(code, tmp_path, **server.env)
    assert done.returncode == 0 and len(said(done.stderr)) == 1, done.stderr
    assert "tracking offline" in done.stderr and "trimtab sweep sync" in done.stderr
    assert len(list((tmp_path / "0" / "wandb").glob("offline-run-*/*.wandb"))) == 1


def test_a_server_that_is_down_at_the_start_costs_no_step_and_is_said_once(tmp_path: Path) -> None:
    with WandbServer() as server:
        env = server.env
    code = """
        tracker = started("abcd", "0")
        tracker.log(0, {"x": 1.0})
        until(lambda: tracker._run is not None, 60)  # the client takes 20 s to give up
        begin = time.monotonic()
        tracker.finish("completed", {})
        assert time.monotonic() - begin < 5.0
    """
    done = child(code, tmp_path, **env)
    assert done.returncode == 0 and len(said(done.stderr)) == 1 and "tracking offline" in done.stderr, done.stderr
    assert json.loads((tmp_path / "0" / "wandb.json").read_text())["mode"] == "offline"


def test_a_server_that_is_down_does_not_hold_up_the_end_of_short_runs(tmp_path: Path) -> None:
    with WandbServer() as server:
        env = server.env
    code = """
        for folder in "01":
            tracker = WandbTracker(TrackerSpec())
            begin = time.monotonic()
            tracker.start({}, "abcd", "name", Path(folder))
            for step in range(100):
                tracker.log(step, {"x": 1.0})
            assert time.monotonic() - begin < 1.0, "training waited"
            tracker.finish("completed", {})
            assert time.monotonic() - begin < 9.0
        begin = time.monotonic()
        import wandb
        wandb.teardown()  # as at the end of the process
        assert time.monotonic() - begin < 2.0
    """
    done = child(code, tmp_path, **env)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    for line, folder in zip(said(done.stderr), "01", strict=True):
        assert "not done within 6 s" in line and f"trimtab sweep sync {tmp_path / folder}" in line


def test_a_server_that_errs_for_a_while_loses_nothing(server: WandbServer, tmp_path: Path) -> None:
    server.fail = {"UpsertBucket": [500, 502], "file_stream": [500, 503]}
    code = """
        tracker = started("abcd", "0")
        for step in range(5):
            tracker.log(step, {"x": float(step)})
        tracker.finish("failed", {})
    """
    done = child(code, tmp_path, **server.env)
    assert (done.returncode, said(done.stderr)) == (0, []), done.stderr
    assert server.rows(id_of(tmp_path / "0"), "train/step", "x") == [(i, i) for i in range(5)]
    assert server.run(id_of(tmp_path / "0")).state == "failed"


def test_a_server_that_goes_away_bounds_the_end(server: WandbServer, tmp_path: Path) -> None:
    server.fail["file_stream"] = [500] * 100_000
    code = """
        tracker = WandbTracker(TrackerSpec())
        tracker.start({}, "abcd", "name", Path("0"))
        begin = time.monotonic()
        for step in range(100):
            tracker.log(step, {"x": float(step)})
        assert time.monotonic() - begin < 1.0
        tracker.finish("completed", {})
        assert time.monotonic() - begin < 9.0, time.monotonic() - begin
    """
    done = child(code, tmp_path, **server.env)
    assert done.returncode == 0 and len(said(done.stderr)) == 1, done.stderr
    assert "W&B failed at finish (TimeoutError" in done.stderr or "not done within 6 s" in done.stderr
    assert "trimtab sweep sync" in done.stderr


@pytest.mark.parametrize("rows", [5, 2000])
def test_a_client_that_is_frozen_is_killed_and_the_next_run_is_tracked(
    server: WandbServer, tmp_path: Path, rows: int
) -> None:
    code = f"""
        ours.WAITING_ROWS, FINISH = 50, 2.0
        tracker = started("abcd", "0")
        tracker.log(0, {{"x": 0.0}})
        until(lambda: tracker._run is not None)
        frozen = helper()
        os.kill(frozen, signal.SIGSTOP)
        begin = time.monotonic()
        for step in range(1, {rows}):
            tracker.log(step, {{f"m{{i}}": 1.0 for i in range(100)}})
        assert time.monotonic() - begin < 1.0, "training waited"
        tracker.finish("completed", {{}})
        assert time.monotonic() - begin < 6.0
        until(lambda: not any(courier.busy for courier in ours.ABANDONED))
        second = WandbTracker(TrackerSpec())
        second.start({{"seed": 2}}, "efgh", "name", Path("1"))
        second.log(0, {{"x": 7.0}})
        second.finish("completed", {{}})
    """
    done = child(code, tmp_path, **server.env)  # that it ends at all is a part of the test
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    (told,) = said(done.stderr)
    assert "does not answer (50 rows wait" in told if rows > 50 else "does not answer (not done within 3 s" in told
    assert server.rows(id_of(tmp_path / "1"), "x") == [7.0] and server.run(id_of(tmp_path / "1")).state == "finished"


LOGGING = """
    from trimtab.track.jsonl import JsonlTracker, truncate_after
    from trimtab.track.many import Trackers
    def attempt(resumed_at, upto, end=True):
        truncate_after(Path("0/metrics.jsonl"), resumed_at)
        tracker, inner = Trackers([JsonlTracker(), WandbTracker(TrackerSpec())]), None
        tracker.start({"seed": 1}, "abcd", "name", Path("0"))
        for step in range(resumed_at + 1, upto):
            tracker.log(step, {"x": float(step)})
        if end:
            tracker.finish("completed", {"objective": 0.5})
        return tracker
    def die(tracker):
        until(lambda: tracker._trackers[1]._run is not None)
        os.kill(helper(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def attempts(code: str) -> str:
    return LOGGING + "\n".join("    " + line for line in code.splitlines())


def test_what_two_killed_attempts_took_along_is_sent_after_the_resume(server: WandbServer, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    for at, upto in ((-1, 8), (4, 12)):  # killed, helper and all, before the client's first upload
        done = child(attempts(f"die(attempt({at}, {upto}, end=False))"), tmp_path, **server.env)
        assert done.returncode == -9, done.stderr
    assert [run.rows for run in server.runs.values()] == [[]]
    done = child(attempts("attempt(9, 15)"), tmp_path, **server.env)
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = server.runs.values()
    assert server.rows(run.name, "train/step", "x") == [(i, i) for i in range(15)]
    assert (run.state, run.summary["train/step"], run.summary["objective"]) == ("finished", 14, 0.5)


def test_gaps_that_an_earlier_attempt_left_are_filled_and_nothing_stands_twice(
    server: WandbServer, tmp_path: Path
) -> None:
    (tmp_path / "0").mkdir()
    first = """
        tracker = started("abcd", "0")
        for step in (0, 1, 2, 5, 9):
            tracker.log(step, {"x": float(step)})
        tracker.finish("preempted", {})
    """
    assert child(first, tmp_path, **server.env).returncode == 0
    lines = [json.dumps({"step": step, "x": float(step)}) + "\n" for step in range(8)]
    (tmp_path / "0" / "metrics.jsonl").write_text("".join(lines))
    done = child(attempts("attempt(7, 10)"), tmp_path, **server.env)
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = server.runs.values()
    assert server.rows(run.name, "x") == [0, 1, 2, 5, 9, 3, 4, 6, 7, 8]
    assert (run.summary["train/step"], run.summary["x"]) == (9, 9.0)  # not those of the last row sent


def test_steps_that_were_tracked_offline_or_not_at_all_follow_when_the_run_is_online(
    server: WandbServer, tmp_path: Path
) -> None:
    (tmp_path / "0").mkdir()
    assert child(attempts("attempt(-1, 5)"), tmp_path).returncode == 0
    assert child(attempts("attempt(4, 8)"), tmp_path, **server.env).returncode == 0
    (run,) = server.runs.values()
    assert server.rows(run.name, "train/step") == list(range(8))


@pytest.mark.parametrize("fault", ["error", "lag"])
def test_a_server_that_does_not_tell_what_it_has_gets_no_step_twice_and_sync_adds_the_rest(
    server: WandbServer, tmp_path: Path, fault: str
) -> None:
    (tmp_path / "0").mkdir()
    first = attempts("attempt(-1, 4)")
    assert child(first, tmp_path, **server.env).returncode == 0
    lines = [json.dumps({"step": step, "x": float(step)}) + "\n" for step in range(6)]
    (tmp_path / "0" / "metrics.jsonl").write_text("".join(lines))  # 4 and 5 are lost to the server
    if fault == "error":
        server.fail["Run"] = [404] * 3
    else:
        server.lag = 2
    second = "    ours.ASK_SECONDS = 0.01\n" + attempts("attempt(1, 8)")
    done = child(second, tmp_path, **server.env)
    (told,) = said(done.stderr)
    assert done.returncode == 0 and "does not tell which steps it has" in told and "trimtab sweep sync" in told
    (run,) = server.runs.values()
    assert server.rows(run.name, "train/step") == list(range(8))
