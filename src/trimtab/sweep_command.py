"""``trimtab sweep``: what is done with a sweep as a whole: ``sync`` here, the others in ``launch/commands.py``."""

from __future__ import annotations

import argparse
import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import ConfigError, DataError, TrimtabError
from trimtab.launch import commands as commands_of_launch

if TYPE_CHECKING:
    from trimtab.track.sync import Replay

ABOUT = """\
What is done with a sweep (python -m run -m ...) as a whole.

  trimtab sweep status [SWEEP]        its runs: state, step, reward, and why
  trimtab sweep watch [SWEEP]         the same, again and again until all have ended
  trimtab sweep logs [SWEEP] [RUN]    what its runs printed; -f goes on
  trimtab sweep cancel [SWEEP]        end its jobs, or some of them
  trimtab sweep resume [SWEEP]        submit what is missing or failed
  trimtab sweep collect [SWEEP]       its results as CSV and JSON
  trimtab sweep sync SWEEP...         upload its runs to W&B, from a machine that has network
"""
SYNC = """\
Uploads runs to W&B, from a login node, say: those that recorded offline, that lost their connection, that were killed,
or that had no tracker at all. metrics.jsonl is replayed: each step once, the last attempt's. Only steps that W&B lacks
are sent, so it may be run again at any time, also while runs go on. A run keeps its id: a requeue or a second upload
adds to the same W&B run. What was uploaded is kept in the run's wandb.json.

Runs that are being tracked online right now are left alone. Project and entity are those of the runs' own tracker.*
options unless given here; the key is that of `wandb login` or WANDB_API_KEY.

Exit code: 0, 1 when a run could not be uploaded (the others are), 2 for a command line that can't be read.
"""


def add(commands: Any) -> None:
    """Hang the group below ``trimtab``."""
    raw = argparse.RawDescriptionHelpFormatter
    group = commands.add_parser("sweep", description=ABOUT, formatter_class=raw)
    below = group.add_subparsers(metavar="COMMAND", required=True)
    commands_of_launch.add(below)
    sync = below.add_parser("sync", description=SYNC, formatter_class=raw)
    sync.add_argument("paths", nargs="+", metavar="SWEEP|RUN", help="folders of sweeps or runs, at any depth")
    sync.add_argument("--dry-run", action="store_true", help="show what would be uploaded; needs no server and no key")
    sync.add_argument("--project", metavar="NAME", help="instead of the runs' tracker.project")
    sync.add_argument("--entity", metavar="NAME", help="instead of the runs' tracker.entity")
    sync.set_defaults(call=run_sync)


def folders(paths: Sequence[str]) -> list[Path]:
    """Every run folder at ``paths``, each once. DataError when a path is not there or holds none."""
    from trimtab.report.sources.sweep import search

    found: list[Path] = []
    for given in paths:
        path = Path(given).expanduser()
        if not path.is_dir():
            raise DataError(f"there is no folder {given}; give a sweep's or a run's folder")
        here = search(path).folders
        if not here:
            raise DataError(f"no run below {given}; give a sweep's or a run's folder")
        found += [folder for folder in here if folder.resolve() not in {known.resolve() for known in found}]
    return found


def is_locked(folder: Path) -> bool:
    """Whether a live process of this machine holds the run's lock."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read(folder: Path, options: argparse.Namespace) -> Replay | str:
    """The run to replay, or why it is left alone."""
    from trimtab.track.identity import recall
    from trimtab.track.sync import read_run

    live = is_locked(folder)
    if live and recall(folder).get("mode") == "online":
        return "is being tracked online right now: left alone"
    return read_run(folder, project=options.project, entity=options.entity, killed=not live)


def planned(replay: Replay) -> str:
    """What a dry run says of a run."""
    left = sum(row["step"] > replay.known for row in replay.rows)
    where = "/".join([*([replay.entity] if replay.entity else []), replay.project, replay.who.id])
    group = f", group {replay.who.group}" if replay.who.group else ""
    return f"{left} of {len(replay.rows)} steps to {where} ({replay.who.name}{group}, {replay.state})"


def run_sync(options: argparse.Namespace) -> int:
    """``trimtab sweep sync``."""
    try:
        from trimtab.track.sync import Uploader
    except ImportError as error:
        raise ConfigError(f"it cannot load W&B's client ({error}): pip install 'wandb>=0.31,<0.32'") from error
    from trimtab.track.console import SafeConsole, setup_progress

    found = folders(options.paths)
    told, console = SafeConsole(highlight=False), SafeConsole(highlight=False, stderr=True)
    upload = None if options.dry_run else Uploader()
    failed = 0
    with setup_progress("uploading", console) as report:
        for i, folder in enumerate(found):
            text = f"{i + 1}/{len(found)} {folder.name}"
            try:
                replay = read(folder, options)
                if isinstance(replay, str):
                    line = replay
                elif upload is None:
                    line = planned(replay)
                else:
                    total = len(replay.rows)
                    done = upload(replay, lambda n, total=total, text=text: report(n, total, text))  # type: ignore[misc]
                    line = f"{done.added} of {done.rows} steps added  {done.url}"
            except TrimtabError as error:
                failed += 1
                line = f"failed: {error}"
            told.print(f"{folder}: {line}", markup=False, soft_wrap=True)
    verb = "would be looked at" if options.dry_run else "are up to date"
    told.print(f"{len(found) - failed} of {len(found)} runs {verb}" + (f", {failed} failed" if failed else ""))
    return 1 if failed else 0
