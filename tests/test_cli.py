"""The console script: help, refusals, the doctor's judgements, the table of runs."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trimtab import cli, doctor
from trimtab.doctor import Finding, State
from trimtab.errors import Preempted
from trimtab.folder import RunFolder

SRC = Path(__file__).parents[1] / "src"


def trimtab(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, then the heavy modules it loaded on stderr's last line."""
    code = (
        "import sys\nfrom trimtab.cli import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as stop:\n    code = stop.code\n"
        "print([m for m in ('torch', 'numpy', 'rich', 'pyarrow') if m in sys.modules], file=sys.stderr)\nsys.exit(code)"
    )
    environment = os.environ | {"PYTHONPATH": str(SRC), "COLUMNS": "120"}
    return subprocess.run((sys.executable, "-c", code, *arguments), env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], ["python -m run", "trimtab doctor", "trimtab runs"]),
        (["doctor", "--help"], ["--json", "Exit code: 0 when a default run could start"]),
        (["runs", "--help"], ["FOLDER", "--json", "killed"]),
        (["replay", "--help"], ["RUN_DIR", "preset=all", "--json", "record_every", "Exit code"]),
    ],
)
def test_help_teaches_without_torch(arguments: list[str], said: list[str]) -> None:
    done = trimtab(*arguments)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]"
    assert [text for text in said if text not in done.stdout] == []
    assert max(map(len, done.stdout.splitlines())) <= 120


@pytest.mark.parametrize("arguments", [[], ["prob"], ["runs", "--yaml"], ["runs", "no-such-folder"]])
def test_a_wrong_command_line_ends_with_2(arguments: list[str]) -> None:
    done = trimtab(*arguments)
    assert done.returncode == 2 and done.stdout == "" and "error: " in done.stderr and "Traceback" not in done.stderr


# -- runs ------------------------------------------------------------------------------------------------------------


def made(path: Path, error: BaseException | None = None, **fields: Any) -> RunFolder:
    """A run folder that ended."""
    folder = RunFolder(path, "no")
    folder.__enter__()
    folder.report("running", run_id="abc", name="n", **fields)
    folder.config.write_text("algo:\n  name: bypass\n")
    folder.__exit__(None, error, None)
    return folder


def test_runs_tells_state_step_reward_and_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = made(tmp_path / "deep" / "a", steps=20, step=20, reward=0.75)
    lines = [{"step": 0, "eval/reward": 0.25}, {"step": 10, "eval/reward": 0.5}, {"step": 11, "eval/reward": None}]
    done.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 20, "eval/reward": 0.')
    made(tmp_path / "b", error=ValueError("broken\nin two lines"), steps=20, step=3)
    made(tmp_path / "c", error=Preempted("SIGTERM"), steps=20)
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["run", "state", "step", "reward", "eval", "algo", "hash"],
        ["deep/a", "completed", "20/20", "0.750", "0.500", "bypass", "abc"],
        ["b", "failed", "3/20", "-", "-", "bypass", "abc"],
        ["ValueError:", "broken"],
        ["c", "preempted", "-", "-", "-", "bypass", "abc"],
        ["Preempted:", "SIGTERM"],
    ]
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(r["run"], r["state"], r["reward"], r["eval"]) for r in found] == [
        ("deep/a", "completed", 0.75, 0.5), ("b", "failed", None, None), ("c", "preempted", None, None),
    ]  # fmt: skip


def test_a_run_without_its_lock_was_killed(tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    folder.status.write_text('{"state": "running"}')
    assert [run["state"] for run in cli.find_runs(tmp_path)] == ["killed"]
    with (folder.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [run["state"] for run in cli.find_runs(tmp_path)] == ["running"]
    with RunFolder(folder.path, "auto"):  # asking did not leave the lock taken
        assert [run["state"] for run in cli.find_runs(tmp_path)] == ["running"]


def test_runs_survives_torn_files_and_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "status.json").write_text('{"state": "comp')
    (tmp_path / "torn" / "config.yaml").write_text("algo: [")
    done = trimtab("runs", str(tmp_path), "--json")
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]"
    assert [(r["run"], r["state"], r["algo"]) for r in json.loads(done.stdout)] == [("torn", "unknown", None)]


def test_a_folder_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs below {tmp_path}\n"


# -- doctor ----------------------------------------------------------------------------------------------------------

NMS = "Traceback (most recent call last):\nRuntimeError: operator torchvision::nms does not exist\n"
ABSENT = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'vllm'\n"


@pytest.mark.parametrize(
    ("name", "code", "out", "err", "state", "text", "advice"),
    [
        ("torch", 0, "2.13.0+cpu cpu\n", "noise", State.ok, "2.13.0+cpu cpu", ""),
        ("vllm", 1, "", ABSENT, State.fail, "No module named 'vllm'", "rollout=transformers"),
        ("vllm", 1, "", NMS, State.fail, "torchvision of another build", "pip uninstall -y torchvision"),
        ("transformers", 1, "", NMS, State.fail, "torchvision of another build", "pip uninstall -y torchvision"),
        ("torchvision", 1, "", NMS, State.fail, "torchvision of another build", "pip uninstall -y torchvision"),
        ("wandb", 1, "", "ImportError: no", State.note, "ImportError: no", "only tracker=wandb needs it"),
        ("torch", -9, "", "", State.fail, "exit code -9", "setup.sh"),
    ],
)
def test_judgement_of_an_import(name: str, code: int, out: str, err: str, state: State, text: str, advice: str) -> None:
    found = doctor.judge(name, code, out, err)
    assert found.state is state and text in found.text
    assert advice in found.advice and bool(found.advice) is bool(advice)


def test_one_failure_is_enough_and_a_note_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    ok, note, fail = (Finding(s.name, s, "text", "advice" * (s is not State.ok)) for s in State)
    assert doctor.able([ok, note]) and not doctor.able([ok, fail])
    assert "a default run can start: python -m run" in doctor.as_text([ok, note])
    assert doctor.as_text([fail]).splitlines()[1].strip() == "-> advice"
    assert json.loads(doctor.as_json([fail])) == {
        "ok": False, "findings": [{"name": "fail", "state": "fail", "text": "text", "advice": "advice"}],
    }  # fmt: skip


def test_the_exit_code_is_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for state, code in ((State.note, 0), (State.fail, 1)):
        monkeypatch.setattr(doctor, "examine", lambda state=state: [Finding("a", state, "b")])
        assert cli.main(["doctor"]) == code
        assert cli.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ok"] is False


def test_cache_disk_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [f.state for f in doctor.cache(tmp_path / "new")] == [State.ok, State.note]
    (tmp_path / "file").write_text("")
    (bad,) = doctor.cache(tmp_path / "file" / "cache")
    assert bad.state is State.fail and "policy.cache_dir=" in bad.advice
    monkeypatch.setattr(doctor, "DISK_GIB", 1e9)
    assert doctor.disk(tmp_path).state is State.fail
    count = len(os.sched_getaffinity(0))
    assert doctor.cores(str(count)).state is doctor.cores(None).state is State.ok
    assert doctor.cores(str(count + 1)).advice.endswith(f"OMP_NUM_THREADS={count}")


@pytest.mark.slow
@pytest.mark.vllm
def test_doctor_here_tells_of_a_key_but_never_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    done = trimtab("doctor", "--json")
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0 and json.loads(done.stdout)["ok"] is True
    assert [found[n]["state"] for n in ("python", "torch", "transformers", "vllm", "config", "cache")] == ["ok"] * 6
    assert "0123456789" not in done.stdout + done.stderr and found["wandb"]["text"].endswith("a key is set")
