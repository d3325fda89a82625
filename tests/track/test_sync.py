"""``trimtab sweep sync`` with the real client against a double of the server."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("wandb")

from wandb_child import child
from wandb_server import WandbServer

from trimtab import cli


def write_run(
    folder: Path,
    lines: list[Mapping[str, Any]],
    *,
    state: str = "completed",
    seed: int = 0,
    tail: str = "",
    **tracker: Any,
) -> Path:
    """A run folder as a run leaves it."""
    folder.mkdir(parents=True)
    (folder.parent / "multirun.yaml").touch()
    config = {"seed": seed, "algo": {"name": "decoupled"}, "mis": {"tis_mode": "truncate"}, "tracker": tracker}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "overrides.yaml").write_text(yaml.safe_dump([f"seed={seed}"]))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    (folder / "status.json").write_text(json.dumps({"state": state, "run_id": f"cafe{seed:04}", "name": "decoupled"}))
    if state == "completed":
        (folder / "summary.json").write_text(json.dumps({"objective": 0.25, "after": {"train/reward": 0.5}}))
    return folder


def rows(steps: range, attempt: int = 1) -> list[Mapping[str, Any]]:
    return [{"step": step, "train/reward": attempt + step / 100} for step in steps]


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as served:
        yield served
        assert served.unknown == []


def sync(server: WandbServer | None, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"from trimtab.cli import main; raise SystemExit(main(['sweep', 'sync', *{list(arguments)!r}]))"
    return child(code, cwd, **(server.env if server else {"WANDB_MODE": ""}))


def id_of(run_dir: Path) -> str:
    return str(json.loads((run_dir / "wandb.json").read_text())["id"])


@pytest.mark.slow
def test_a_sweep_is_uploaded_once_each_step_once_the_last_attempt_wins(server: WandbServer, tmp_path: Path) -> None:
    sweep = tmp_path / "bounds"
    twice = rows(range(0, 6), 1) + rows(range(3, 9), 2)  # killed after step 5, requeued from the checkpoint of step 2
    write_run(sweep / "0", twice, seed=0, project="p", tags=["t"])
    bad = [{"step": 0, "train/reward": None, "nonfinite": ["train/reward"]}, *rows(range(1, 4))]
    write_run(sweep / "1", bad, seed=1, state="failed", project="p", tail='{"step": 4, "tra')
    write_run(sweep / "2", [], seed=2, state="failed", project="p")
    write_run(sweep / "10", rows(range(2)), seed=10, state="preempted", project="p", group="mine")

    done = sync(server, tmp_path, "bounds")
    assert done.returncode == 1, done.stderr  # one run has nothing, the others are there
    assert "bounds/0: 9 of 9 steps added" in done.stdout and "bounds/2: failed: bounds/2 has no step" in done.stdout
    assert "3 of 4 runs are up to date, 1 failed" in done.stdout
    first, second, third = (id_of(sweep / name) for name in ("0", "1", "10"))
    assert server.rows(first, "train/step", "train/reward") == [
        (step, pytest.approx((1 if step < 3 else 2) + step / 100)) for step in range(9)
    ]
    assert math.isnan(float(server.rows(second)[0]["train/reward"]))
    assert [server.run(id).state for id in (first, second, third)] == ["finished", "failed", "preempting"]
    assert [server.run(id).group for id in (first, second, third)] == ["bounds", "bounds", "mine"]
    assert server.run(first).summary["objective"] == 0.25 and server.run(first).tags == ["t"]
    assert server.run(first).config["algo"] == "decoupled" and server.run(first).config["seed"] == 0
    assert server.run(first).display_name == "seed=0"
    assert list(sweep.rglob("*.wandb")) == []

    upserts = [run.upserts for run in server.runs.values()]
    again = sync(server, tmp_path, "bounds/0", "bounds/1", "bounds/10")
    assert again.returncode == 0 and again.stdout.count("0 of ") == 3, again.stdout
    assert [run.upserts for run in server.runs.values()] == upserts, "nothing was sent"

    with (sweep / "10" / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in rows(range(2, 5)))
    status = json.loads((sweep / "10" / "status.json").read_text()) | {"state": "completed"}
    (sweep / "10" / "status.json").write_text(json.dumps(status))
    more = sync(server, tmp_path, "bounds/10")
    assert "bounds/10: 3 of 5 steps added" in more.stdout, more.stderr
    assert server.rows(third, "train/step") == list(range(5)) and server.run(third).state == "finished"
    assert len(server.runs) == 3


@pytest.mark.slow
def test_an_online_run_that_was_cut_off_gets_only_what_it_lacks(server: WandbServer, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "s" / "0", rows(range(10)), project="trimtab")
    code = """
        tracker = started("cafe0000", "s/0")
        for step in (0, 1, 2, 5):
            tracker.log(step, {"train/reward": step / 100})
        tracker.finish("failed", {})
    """
    metrics = folder / "metrics.jsonl"
    hidden = metrics.rename(tmp_path / "hidden")  # else the tracker itself would send what is lacking
    assert child(code, tmp_path, **server.env).returncode == 0
    hidden.rename(metrics)
    done = sync(server, tmp_path, "s/0")
    assert done.returncode == 0 and "6 of 10 steps added" in done.stdout, done.stderr
    assert sorted(server.rows(id_of(folder), "train/step")) == list(range(10)) and len(server.runs) == 1
    run = server.run(id_of(folder))
    assert run.state == "finished" and run.summary["train/step"] == 9 and run.summary["objective"] == 0.25


@pytest.mark.slow
def test_offline_fragments_of_a_run_killed_twice_become_one_run(server: WandbServer, tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "s" / "0", rows(range(4)) + rows(range(2, 8), 2) + rows(range(6, 9), 3), project="trimtab"
    )
    for first, last in ((0, 4), (2, 8)):
        code = f"""
            tracker = started("cafe0000", "s/0")
            for step in range({first}, {last}):
                tracker.log(step, {{"x": 1.0}})
            until(lambda: tracker._run is not None)
            os.kill(os.getpid(), signal.SIGKILL)
        """
        assert child(code, tmp_path).returncode == -9
    assert len(list(folder.rglob("*.wandb"))) == 2
    assert sync(server, tmp_path, "s").returncode == 0
    assert server.rows(id_of(folder), "train/step") == list(range(9))
    assert [int(value) for value in server.rows(id_of(folder), "train/reward")] == [1, 1, 2, 2, 2, 2, 3, 3, 3]


@pytest.mark.slow
def test_a_server_that_errs_fails_one_run_and_the_next_call_mends_it(server: WandbServer, tmp_path: Path) -> None:
    for i in range(2):
        write_run(tmp_path / "s" / str(i), rows(range(3)), seed=i, project="p")
    server.fail["RunResumeStatus"] = [404]
    done = sync(server, tmp_path, "s")
    assert done.returncode == 1 and "s/0: failed: W&B" in done.stdout and "s/1: 3 of 3" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr
    assert sync(server, tmp_path, "s").returncode == 0 and len(server.runs) == 2


@pytest.mark.slow
def test_without_a_key_it_says_what_to_do(tmp_path: Path) -> None:
    write_run(tmp_path / "s" / "0", rows(range(3)))
    done = sync(None, tmp_path, "s")
    assert done.returncode == 1 and "wandb login" in done.stderr and "Traceback" not in done.stderr


def test_a_dry_run_tells_and_needs_no_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    folder = write_run(tmp_path / "bounds" / "0", rows(range(5)) + rows(range(3, 7)), project="p", entity="e")
    write_run(tmp_path / "bounds" / "1", rows(range(2)), seed=1, state="running")
    (folder / "wandb.json").write_text('{"id": "kept", "config_hash": "cafe0000", "uploaded": {"last_step": 4}}')
    assert cli.main(["sweep", "sync", "--dry-run", str(tmp_path / "bounds")]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.endswith("0: 2 of 7 steps to e/p/kept (seed=0, group bounds, completed)")
    assert "2 of 2 steps to trimtab/cafe0001-" in second and second.endswith("(seed=1, group bounds, failed)")
    assert last == "2 of 2 runs would be looked at"


def test_a_run_that_is_tracked_online_right_now_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fcntl

    folder = write_run(tmp_path / "s" / "0", rows(range(5)), state="running")
    (folder / "wandb.json").write_text('{"mode": "online"}')
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.main(["sweep", "sync", "--dry-run", str(folder)]) == 0
    assert "left alone" in capsys.readouterr().out


@pytest.mark.parametrize(("make", "error"), [(False, "there is no folder"), (True, "no run below")])
def test_a_wrong_path_is_told(make: bool, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if make:
        (tmp_path / "x").mkdir()
    assert cli.main(["sweep", "sync", "--dry-run", str(tmp_path / "x")]) == 1
    assert error in capsys.readouterr().err
