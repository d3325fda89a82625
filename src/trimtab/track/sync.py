"""Uploads run folders to W&B by replaying metrics.jsonl, the truth: each step once, and only those that W&B lacks.

The files of W&B's own that lie in a folder are not read: after a requeue they hold steps twice, and a killed one has no
end.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import wandb
import yaml

from trimtab.errors import ConfigError, DataError, TrimtabError
from trimtab.track.flat import flat_config
from trimtab.track.identity import Identity, identify, read_object, recall, remember
from trimtab.track.jsonl import FILE, read_metrics
from trimtab.track.wandb import CLIENT_ERRORS, close_run, has_key, open_run, reset_client, row_of, short, steps_of

FINISH_SECONDS = 300.0
ENDS: Mapping[str, frozenset[str]] = {
    "completed": frozenset({"finished"}),
    "failed": frozenset({"failed", "crashed", "killed"}),
    "preempted": frozenset({"preempting", "preempted"}),
    "running": frozenset({"preempting", "preempted"}),
}
"""What W&B may call a run that ended so, or has not ended."""

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Replay:
    """A run folder as it is to stand in W&B. ``rows``: by step, each step once, the last attempt's."""

    folder: Path
    who: Identity
    project: str
    entity: str | None
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    rows: tuple[dict[str, Any], ...]
    state: str
    summary: Mapping[str, Any]

    @property
    def known(self) -> int:
        """The last step that an earlier upload of this folder reached; -1: none."""
        return int(recall(self.folder).get("uploaded", {}).get("last_step", -1))


@dataclass(frozen=True)
class Uploaded:
    """``added`` of ``rows`` steps were missing there; ``url``: the run's address."""

    added: int
    rows: int
    url: str


def read_run(folder: Path, *, project: str | None, entity: str | None, killed: bool) -> Replay:
    """What ``folder`` holds. ``killed``: it says running and no process holds its lock. DataError when it is no run."""
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        rows = read_metrics(folder / FILE)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{folder} cannot be read ({short(error)})") from error
    status = read_object(folder / "status.json")
    if not isinstance(config, dict) or not rows or not status.get("run_id"):
        raise DataError(f"{folder} has no step yet: there is nothing to upload")
    tracker = config.get("tracker") or {}
    kept = recall(folder)
    who = identify(folder, str(status["run_id"]), str(status.get("name") or folder.name), tracker.get("group"))
    state = str(status.get("state"))
    return Replay(
        folder=folder.resolve(),
        who=who,
        project=project or kept.get("project") or tracker.get("project") or "trimtab",
        entity=entity or tracker.get("entity") or kept.get("entity"),
        tags=tuple(tracker.get("tags") or ()),
        config=config,
        rows=tuple(rows),
        state="failed" if state == "running" and killed else state,
        summary=read_object(folder / "summary.json"),
    )


class Uploader:
    """Replays runs to the server that the environment names. ConfigError without a key that it takes."""

    def __init__(self) -> None:
        if not has_key(os.environ):  # else the client asks for one on a terminal
            raise ConfigError("uploading needs a key: `wandb login`, or WANDB_API_KEY; --dry-run needs none")
        try:
            self._api = wandb.Api(timeout=30)
            self._entity = self._api.default_entity
        except (*CLIENT_ERRORS, requests.RequestException) as error:
            raise ConfigError(
                f"W&B refuses or cannot be reached ({short(error)}); `wandb login` or WANDB_API_KEY, and on a machine "
                "with network; --dry-run shows what would be uploaded"
            ) from error

    def __call__(self, replay: Replay, progress: Progress = lambda done: None) -> Uploaded:
        """Bring one run up to date; TrimtabError says what failed, and what was sent stays sent."""
        try:
            return self._upload(replay, progress)
        except (*CLIENT_ERRORS, requests.RequestException) as error:
            reset_client()
            self._api = wandb.Api(timeout=30)  # the old one went with the client; asks nothing of the server yet
            raise TrimtabError(f"W&B: {short(error)}; run it again: only what is missing is sent") from error

    def _there(self, path: str) -> tuple[set[int], str | None, str]:
        """Steps that the server has of a run, the run's state (None: there is no such run) and its address."""
        try:
            run = self._api.run(path)
        except wandb.errors.CommError as error:
            if "could not find" in str(error).lower() or "not found" in str(error).lower():
                return set(), None, ""
            raise
        return set(steps_of(run)), str(run.state), str(run.url)

    def _upload(self, replay: Replay, progress: Progress) -> Uploaded:
        entity = replay.entity or self._entity
        steps, state, url = self._there(f"{entity}/{replay.project}/{replay.who.id}")
        missing = [row for row in replay.rows if row["step"] not in steps]
        kept = recall(replay.folder).get("uploaded", {})
        same = kept.get("state") == replay.state or state in ENDS.get(replay.state, frozenset())
        if not missing and state is not None and same:
            progress(len(replay.rows))
        else:
            url = self._send(replay, entity, missing, progress)
        last = replay.rows[-1]["step"]
        uploaded = {"last_step": last, "rows": len(replay.rows), "state": replay.state, "time": time.time()}
        remember(replay.folder, {
            "id": replay.who.id, "config_hash": read_object(replay.folder / "status.json")["run_id"],
            "project": replay.project, "entity": entity, "url": url, "uploaded": uploaded,
        })  # fmt: skip
        return Uploaded(len(missing), len(replay.rows), url)

    def _send(self, replay: Replay, entity: str | None, missing: list[dict[str, Any]], progress: Progress) -> str:
        before = len(replay.rows) - len(missing)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            run = open_run(
                replay.who, "online", flat_config(replay.config), Path(place).resolve(), project=replay.project,
                entity=entity, tags=replay.tags, finish_timeout=FINISH_SECONDS,
            )  # fmt: skip
            for i, record in enumerate(missing):
                run.log(row_of(record))
                progress(before + i + 1)
            url = str(run.url)
            close_run(run, replay.state, {**row_of(replay.rows[-1]), **replay.summary})
        return url
