"""The copied code is whole, free of what git ignores, and holds the user's own modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.errors import ConfigError
from trimtab.launch import snapshot

NAMES = ["src", "conf", "sweeps", "launchers"]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout of git, and the current folder of a user beside it."""
    root = tmp_path / "checkout"
    for name in (
        "src/trimtab/__init__.py",
        "src/trimtab/a.py",
        "conf/config.yaml",
        "sweeps/s.yaml",
        "launchers/l.yaml",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    (root / "conf" / "sweep").symlink_to("../sweeps")
    (root / ".gitignore").write_text("*.log\n__pycache__/\n")
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    (root / "src/trimtab/new.py").write_text("x = 1\n")
    (root / "src/trimtab/a.py").write_text("# edited\n")
    (root / "src/trimtab/big.log").write_text("ignored\n")
    (root / "src/trimtab/__pycache__").mkdir()
    (root / "src/trimtab/__pycache__/a.pyc").write_bytes(b"")
    monkeypatch.setattr(snapshot, "ROOT", root)
    (tmp_path / "user").mkdir()
    monkeypatch.chdir(tmp_path / "user")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return root


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() or path.is_symlink()}


def test_what_git_does_not_ignore_is_copied(checkout: Path, tmp_path: Path) -> None:
    code = tmp_path / "sweep" / "code"
    code.parent.mkdir()
    told = snapshot.take(code, NAMES, [])
    assert files(code) == {"src/trimtab/__init__.py", "src/trimtab/a.py", "src/trimtab/new.py", "conf/config.yaml",
                           "conf/sweep", "sweeps/s.yaml", "launchers/l.yaml"}  # fmt: skip
    assert os.readlink(code / "conf" / "sweep") == "../sweeps" and (code / "conf/sweep/s.yaml").exists()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True)
    assert told["commit"] == head.stdout.strip() and told["dirty"] is True
    assert "+# edited" in (code.parent / "code.diff").read_text()
    assert not snapshot.changed(code, NAMES, [])
    (checkout / "sweeps/s.yaml").write_text("# another\n")
    assert snapshot.changed(code, NAMES, []) and (code / "sweeps/s.yaml").read_text() == "# sweeps/s.yaml\n"


def test_without_git_everything_but_caches_is_copied(checkout: Path, tmp_path: Path) -> None:
    subprocess.run(["rm", "-rf", str(checkout / ".git")], check=True)
    code = tmp_path / "code"
    told = snapshot.take(code, NAMES, [])
    assert told["commit"] is None and told["dirty"] is None
    assert "src/trimtab/big.log" in files(code) and not [name for name in files(code) if "pycache" in name]


def test_own_modules_come_along_with_what_they_import(checkout: Path, tmp_path: Path) -> None:
    here = Path.cwd()
    (here / "my_task.py").write_text("import json\nimport helper\nfrom pack.inner import y\nimport trimtab\n")
    (here / "helper.py").write_text("X = 3\n")
    (here / "pack").mkdir()
    (here / "pack/__init__.py").write_text("")
    (here / "pack/inner.py").write_text("y = 4\n")
    (here / "pack/table.csv").write_text("1\n")
    (here / "unused.py").write_text("")
    code = tmp_path / "code"
    told = snapshot.take(code, NAMES, ["my_task", "numpy"])
    assert told["modules"] == ["helper", "my_task", "pack"]
    assert {"src/my_task.py", "src/helper.py", "src/pack/inner.py", "src/pack/table.csv"} <= files(code)
    assert "src/unused.py" not in files(code) and not snapshot.changed(code, NAMES, told["modules"])
    (here / "helper.py").write_text("X = 5\n")
    shown = subprocess.run(
        [sys.executable, "-P", "-c", "import my_task; print(my_task.helper.X)"],
        cwd=here, env={"PYTHONPATH": str(code / "src")}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout == "3\n"


def test_a_module_with_the_name_of_a_part_is_refused(checkout: Path, tmp_path: Path) -> None:
    (checkout / "src" / "run.py").write_text("")
    (Path.cwd() / "run.py").write_text("")
    with pytest.raises(ConfigError, match="has the name of a part of trimtab"):
        snapshot.take(tmp_path / "code", NAMES, ["run"])
    assert not (tmp_path / "code").exists() and not list(tmp_path.glob(".code*"))
