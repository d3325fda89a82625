"""Trackers whose package is missing are told before a run starts, with the command that mends it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from trimtab import build
from trimtab.config import compose
from trimtab.config.convert import to_dict
from trimtab.errors import ConfigError
from trimtab.folder import RunFolder
from trimtab.spec import TrackerName


@pytest.mark.parametrize("name", [name.name for name in TrackerName if name is not TrackerName.file])
def test_a_missing_package_is_told_with_what_mends_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"trimtab.track.{name}", raising=False)
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"tracker={name} cannot load .*pip install '{name}>="):
        build.make_tracker(compose([f"tracker={name}"]), RunFolder(tmp_path, "no"))


def test_a_missing_package_of_the_report_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trimtab.report.wandb_report", raising=False)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(ConfigError, match=r"pip install 'wandb-workspaces==0"):
        importlib.import_module("trimtab.report.wandb_report")


@pytest.mark.parametrize(
    ("name", "read"),
    [("file", set()), ("tensorboard", set()), ("trackio", {"project", "group", "tags"}),
     ("wandb", {"project", "group", "tags", "entity"})],
)  # fmt: skip
def test_what_a_tracker_does_not_read_is_put_back(name: str, read: set[str]) -> None:
    given = {"project": "p", "group": "g", "tags": ["t"], "entity": "e"}
    typed = [f"tracker.{key}={'[t]' if key == 'tags' else value}" for key, value in given.items()]
    tracker = to_dict(compose([f"tracker={name}", *typed]))["tracker"]
    assert {key for key in given if tracker[key] == given[key]} == read
