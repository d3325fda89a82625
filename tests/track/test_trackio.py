"""trackio with its own client, in a process of its own: it keeps its state for a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("trackio")

from trimtab.errors import ConfigError
from trimtab.spec import TrackerSpec
from trimtab.track.trackio import TrackioTracker

HEAD = """
import json, logging, os, signal, socket, sys, time
from pathlib import Path
asked = []
look_up, connect = socket.getaddrinfo, socket.socket.connect
def refuse(*a, **k):
    asked.append(str(a[:2]))
    raise OSError("no network in this test")
socket.getaddrinfo = refuse
socket.socket.connect = refuse
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
from trimtab.spec import TrackerSpec
from trimtab.track.trackio import TrackioTracker
def attempt(folder, steps, value, run_id="cafe", end="completed", seed=1):
    Path(folder).mkdir(parents=True, exist_ok=True)
    tracker = TrackioTracker(TrackerSpec(project="p", group="g", tags=["t"]))
    tracker.start({"seed": seed, "algo": {"name": "bypass"}}, run_id, "n", Path(folder))
    for step in steps:
        tracker.log(step, {"train/reward": value, "train/step": step})
    if end:
        tracker.finish(end, {})
def rows(name):
    from trackio.sqlite_storage import SQLiteStorage
    return [(row["step"], row["train/reward"]) for row in SQLiteStorage.get_logs("p", name)]
def names():
    from trackio.sqlite_storage import SQLiteStorage
    return SQLiteStorage.get_runs("p")
"""


def child(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("TRACKIO")}
    env |= {"TRACKIO_DIR": str(cwd / "db"), "HF_TOKEN": "hf_" + "x" * 34, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", HEAD + textwrap.dedent(code)],
                          cwd=cwd, env=env, capture_output=True, text=True, timeout=120)  # fmt: skip


@pytest.mark.slow
def test_runs_stay_apart_a_requeue_is_one_run_and_nothing_leaves_the_machine(tmp_path: Path) -> None:
    code = """
    attempt("a", range(6), 0.25)
    attempt("b", range(2), 0.75)
    attempt("a", range(4, 9), 0.5)
    from trackio.sqlite_storage import SQLiteStorage
    configs = {name: SQLiteStorage.get_run_config("p", name) for name in names()}
    print(json.dumps([{name: rows(name) for name in names()}, configs, asked]))
    """
    done = child(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found, configs, asked = json.loads(done.stdout)
    assert asked == []
    assert sorted(map(len, found.values())) == [2, 9]
    (long,) = [name for name in found if len(found[name]) == 9]
    assert long.startswith("n cafe-")
    assert found[long] == [
        [step, 0.25 if step < 6 else 0.5] for step in range(9)
    ]  # a step that is there is not sent again
    assert configs[long]["algo"] == "bypass" and configs[long]["seed"] == 1 and configs[long]["_Group"] == "g"
    assert configs[long]["_Username"] is None


@pytest.mark.slow
def test_a_killed_run_loses_no_more_than_a_second(tmp_path: Path) -> None:
    done = child(
        'attempt("a", range(10), 1.0, end="")\ntime.sleep(2.5)\nos.kill(os.getpid(), signal.SIGKILL)', tmp_path
    )
    assert done.returncode == -9, done.stderr
    done = child("print(json.dumps({name: rows(name) for name in names()}))", tmp_path)
    (kept,) = json.loads(done.stdout).values()
    assert kept == [[step, 1.0] for step in range(10)]


@pytest.mark.slow
def test_start_and_end_say_where_the_run_is_and_how_to_open_it(tmp_path: Path) -> None:
    done = child('logging.getLogger("trimtab").setLevel("INFO")\nattempt("a", range(2), 1.0)', tmp_path)
    start, end = (line for line in done.stderr.splitlines() if line.startswith("INFO trimtab.track.trackio"))
    assert f"of project p in {tmp_path / 'db'}" in start
    assert start.endswith("trackio show --project p") and end.endswith("trackio show --project p")


@pytest.mark.parametrize("name", ["TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"])
def test_what_would_send_it_elsewhere_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x/y")
    with pytest.raises(ConfigError, match=f"unset {name}"):
        TrackioTracker(TrackerSpec())
