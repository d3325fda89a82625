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
        begin = time.monotonic()
        tracker = started("abcd", "0")
        for step in range(100):
            tracker.log(step, {"x": 1.0})
        assert time.monotonic() - begin < 1.0, "training waited"
        tracker.finish("completed", {})
        assert time.monotonic() - begin < 46.0
    """
    done = child(code, tmp_path, **env)
    assert done.returncode == 0 and len(said(done.stderr)) == 1 and "tracking offline" in done.stderr, done.stderr
    assert json.loads((tmp_path / "0" / "wandb.json").read_text())["mode"] == "offline"


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
        FINISH = 3.0
        tracker = started("abcd", "0")
        begin = time.monotonic()
        for step in range(100):
            tracker.log(step, {"x": float(step)})
        assert time.monotonic() - begin < 1.0
        tracker.finish("completed", {})
        assert time.monotonic() - begin < 15.0, time.monotonic() - begin
        print(time.monotonic() - begin)
    """
    done = child(code, tmp_path, **server.env)
    assert done.returncode == 0 and len(said(done.stderr)) == 1, done.stderr
    assert "W&B failed at finish (TimeoutError" in done.stderr


def test_a_client_that_is_frozen_is_left_to_itself(tmp_path: Path) -> None:
    code = """
        ours.GRACE_SECONDS, ours.WAITING_ROWS = 1.0, 50
        FINISH = 2.0
        tracker = started("abcd", "0")
        tracker.log(0, {"x": 0.0})
        until(lambda: tracker._run is not None)
        frozen = helper()
        os.kill(frozen, signal.SIGSTOP)
        begin = time.monotonic()
        for step in range(2000):
            tracker.log(step, {f"m{i}": 1.0 for i in range(100)})
        tracker.finish("completed", {})
        second = started("efgh", "1")
        second.log(0, {"x": 0.0})
        second.finish("completed", {})
        assert time.monotonic() - begin < 10.0
        print(frozen)
        os.kill(frozen, signal.SIGKILL)
    """
    done = child(code, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = said(done.stderr)
    assert "does not answer (50 rows wait" in first and "since an earlier run" in second
