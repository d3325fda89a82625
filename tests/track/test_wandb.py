"""W&B with the real client, offline: runs stay apart, failures are said once, no secret is written."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from wandb_child import child

pytest.importorskip("wandb")

from trimtab.spec import Algo, Level, TisMode, TrackerSpec
from trimtab.track import wandb as ours
from trimtab.track.flat import flat_config

CONFIG = {
    "seed": 3,
    "algo": {"name": Algo.decoupled, "metrics_only": False},
    "mis": {
        "tis_mode": TisMode.truncate,
        "tis_level": Level.geometric,
        "use_rs": True,
        "rs_level": Level.token,
        "rs_veto_threshold": 1e-4,
    },
    "task": {"options": {"a": [1, 2]}, "path": Path("x/y")},
}


def records(file: Path) -> list[dict[str, Any]]:
    """All records of an offline run, read by the client's own inspector."""
    call = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    out = subprocess.run(call, capture_output=True, text=True, check=True, timeout=60).stdout
    return [json.loads(line) for line in out.splitlines()]


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [r[kind] for r in found if r["type"] == kind]


def test_flat_keys_stand_beside_the_nested_config() -> None:
    flat = flat_config(CONFIG)
    keys = ("algo", "tis_mode", "level", "rs", "veto", "seed", "algo_metrics_only")
    assert {k: flat[k] for k in keys} == {
        "algo": "decoupled", "tis_mode": "truncate", "level": "geometric", "rs": "token", "veto": 1e-4, "seed": 3,
        "algo_metrics_only": False,
    }  # fmt: skip
    assert flat["mis"]["tis_level"] == "geometric" and flat["task"] == {"options": {"a": [1, 2]}, "path": "x/y"}
    json.dumps(flat)
    off = flat_config({"mis": {"use_rs": False, "rs_level": "token", "rs_veto_threshold": None}})
    assert (off["rs"], off["veto"]) == ("none", "none")


KEY = "k" * 40


@pytest.mark.parametrize(
    ("env", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": KEY}, "online"),
        ({"WANDB_API_KEY": ""}, "offline"),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, "disabled"),
        ({"WANDB_MODE": "online"}, "offline"),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, "online"),
    ],
)
def test_the_mode_is_chosen_without_asking(env: dict[str, str], mode: str, tmp_path: Path) -> None:
    assert ours.choose_mode({"NETRC": str(tmp_path / "none")} | env) == mode


def test_a_login_of_the_right_host_counts_as_a_key(tmp_path: Path) -> None:
    path = tmp_path / "netrc"
    path.write_text(f"machine api.wandb.ai login user password {KEY}\n")
    path.chmod(0o600)
    assert ours.choose_mode({"NETRC": str(path)}) == "online"
    assert ours.choose_mode({"NETRC": str(path), "WANDB_BASE_URL": "https://other.example"}) == "offline"
    path.write_text("machine\n")
    assert ours.choose_mode({"NETRC": str(path)}) == "offline"


def test_a_folder_that_cannot_be_written_is_said_once_and_the_tracker_is_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "file").write_text("not a folder")
    tracker = ours.WandbTracker(TrackerSpec())
    with caplog.at_level(logging.WARNING):
        tracker.start(CONFIG, "id", "n", tmp_path / "file")
        tracker.log(0, {"x": 1.0})
        tracker.finish("completed", {})
    assert len(caplog.records) == 1 and "W&B failed at start (NotADirectoryError" in caplog.text


class Broken:
    """A run whose helper process is gone."""

    resumed, dir, url, entity = False, "", "", ""

    def __init__(self, error: Exception) -> None:
        self.error, self.summary = error, {}

    def log(self, row: object) -> None:
        raise self.error

    def finish(self, exit_code: int) -> None:
        raise self.error


def client_errors() -> list[Exception]:
    import wandb
    from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

    named = [wandb.errors.CommError("x"), wandb.errors.UsageError("x"), wandb.errors.AuthenticationError("x")]
    system = [ConnectionResetError("x"), BrokenPipeError("x"), TimeoutError("x"), OSError(28, "No space left")]
    return [*named, *system, MailboxClosedError("x"), HandleAbandonedError("x"), ValueError("x")]


@pytest.mark.parametrize("error", client_errors(), ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("doing", ["log", "finish"])
def test_any_failure_of_the_client_is_said_once(
    error: Exception, doing: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torn_down = []

    def teardown() -> None:
        torn_down.append(1)
        raise SystemExit(9)  # what the client does when its helper process was killed

    monkeypatch.setattr("wandb.teardown", teardown)
    monkeypatch.setattr(ours, "open_run", lambda *a, **k: Broken(error))
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = ours.WandbTracker(TrackerSpec())
    with caplog.at_level(logging.WARNING):
        tracker.start(CONFIG, "id", "n", tmp_path)
        if doing == "log":
            tracker.log(0, {})
            tracker.log(1, {})
        tracker.finish("completed", {})
        tracker.finish("completed", {})
    assert [r.levelname for r in caplog.records] == ["WARNING"] and f"W&B failed at {doing}" in caplog.text
    assert torn_down == [1]


@pytest.mark.slow
def test_runs_of_one_process_stay_apart_and_a_failed_one_is_marked(tmp_path: Path) -> None:
    code = """
        try:
            tracker = started("aaaa", "a", group="sweep", tags=["t" * 70, ""])
            tracker.log(0, {"train/reward": 0.5, "mismatch/kl": float("nan")})
            tracker.log(1, {"train/reward": 0.75})
            raise RuntimeError("training fell over")
        except RuntimeError:
            tracker.finish("failed", {"reward": 0.75})
        tracker = started("bbbb", "b", group="sweep")
        tracker.log(0, {"train/reward": 0.25})
        tracker.finish("completed", {})
        unfinished = started("cccc", "c")
        unfinished.log(0, {"train/reward": 0.1})
        tracker = started("dddd", "d")
        tracker.log(7, {"train/reward": 0.9})
        tracker.finish("preempted", {})
        tracker = started("bbbb", "b")
        tracker.log(1, {"train/reward": 0.3})
        tracker.finish("completed", {})
        print("end")
    """
    done = child(code, tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)
    files = {run: sorted((tmp_path / run).rglob("*.wandb")) for run in "abcd"}
    assert {run: len(found) for run, found in files.items()} == {"a": 1, "b": 2, "c": 1, "d": 1}
    rewards = {"a": [[0.5, 0.75]], "b": [[0.25], [0.3]], "c": [[0.1]], "d": [[0.9]]}
    steps = {"a": [[0, 1]], "b": [[0], [1]], "c": [[0]], "d": [[7]]}
    exits = {"a": 1, "b": 0, "d": 1}
    ids: dict[str, set[str]] = {}
    for run, found in files.items():
        for part, file in enumerate(found):
            rows = records(file)
            (begun,) = of_kind(rows, "run")
            ids.setdefault(run, set()).add(begun["run_id"])
            assert begun["run_id"].startswith(f"{run * 4}-") and begun["display_name"] == f"name-{run * 4}"
            history = [h["item"] for h in of_kind(rows, "history")]
            assert [h["train/reward"] for h in history] == rewards[run][part]
            assert [h["train/step"] for h in history] == steps[run][part]
            if run in exits:
                assert [e.get("exit_code", 0) for e in of_kind(rows, "exit")] == [exits[run]]
    assert all(len(found) == 1 for found in ids.values()), "a resumed run keeps its id"
    first = records(files["a"][0])
    begun = of_kind(first, "run")[0]
    assert begun["tags"] == ["t" * 64] and begun["run_group"] == "sweep"
    assert {"step_metric": "train/step", "glob_name": "*"}.items() <= of_kind(first, "metric")[1].items()


@pytest.mark.slow
def test_a_killed_helper_process_does_not_stop_training(tmp_path: Path) -> None:
    code = """
        def kill_helper(tracker):
            until(lambda: tracker._run is not None)
            os.kill(helper(), signal.SIGKILL)
        first = started("aaaa", "a")
        first.log(0, {"x": 1.0})
        kill_helper(first)
        for step in range(1, 50):
            first.log(step, {"x": 1.0})
        first.finish("completed", {})
        second = started("bbbb", "b")
        second.log(0, {"x": 2.0})
        kill_helper(second)
        second.finish("completed", {})
        third = started("cccc", "c")
        third.log(0, {"x": 3.0})
        third.finish("completed", {})
        print("end")
    """
    done = child(code, tmp_path)
    assert done.stdout == "end\n" and done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("WARNING trimtab.track.wandb")]
    assert len(said) == 2 and "Traceback" not in done.stderr
    (file,) = (tmp_path / "c").rglob("*.wandb")
    assert [h["item"]["x"] for h in of_kind(records(file), "history")] == [3]


@pytest.mark.slow
def test_a_process_that_is_killed_keeps_what_was_logged(tmp_path: Path) -> None:
    code = """
        tracker = started("aaaa", "a")
        for step in range(10):
            tracker.log(step, {"x": float(step)})
        until(lambda: tracker._run is not None)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert child(code, tmp_path).returncode == -9
    (file,) = (tmp_path / "a").rglob("*.wandb")
    kept = [h["item"]["x"] for h in of_kind(records(file), "history")]
    assert kept == list(range(len(kept)))  # the tail may be lost; metrics.jsonl has it


@pytest.mark.slow
def test_a_killed_run_loses_no_more_than_a_second(tmp_path: Path) -> None:
    code = """
        import time
        tracker = started("aaaa", "a")
        for step in range(10):
            tracker.log(step, {"x": float(step)})
        time.sleep(2.5)
        tracker.log(10, {"x": 10.0})
        os.kill(helper(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert child(code, tmp_path).returncode == -9
    (file,) = (tmp_path / "a").rglob("*.wandb")
    kept = [h["item"]["x"] for h in of_kind(records(file), "history")]
    assert kept[:10] == list(range(10))


@pytest.mark.slow
def test_no_secret_is_written_or_printed_and_bad_names_are_survived(tmp_path: Path) -> None:
    secret = "s3cr3t" * 7
    code = """
        tracker = started("aaaa", "a")
        tracker.log(0, {"x": 1.0})
        tracker.finish("completed", {"x": 1.0})
        bad = started("bbbb", "b", project="a/b")
        bad.log(0, {"x": 1.0})
        bad.finish("completed", {})
    """
    done = child(code, tmp_path, WANDB_API_KEY=secret, HF_TOKEN=secret, MY_PASSWORD=secret)
    assert done.returncode == 0 and done.stderr.count("WARNING trimtab") == 1 and "project name" in done.stderr
    written = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert len(written) >= 3
    assert not [f for f in written if secret.encode() in f.read_bytes()]
    assert secret not in done.stdout + done.stderr
