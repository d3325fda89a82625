"""``trimtab``: the commands beside training (``python -m run``). Nothing here imports torch."""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trimtab import replay, sweep_command
from trimtab.errors import TrimtabError
from trimtab.folder import RunFolder
from trimtab.lab import probe_command
from trimtab.lab.parity import command as parity
from trimtab.report import command as compare
from trimtab.report import report_command
from trimtab.truth import command as truth

DONE, FAILED, REFUSED = 0, 1, 2

ABOUT = """\
Commands beside training. Training itself is  python -m run [overrides]  (python -m run --help).

  trimtab doctor           can a default run start on this machine, and if not, what mends it?
  trimtab runs             the runs below runs/: state, step, reward
  trimtab truth            bias and variance of each correction's gradient, exactly, on a tiny problem
  trimtab replay           what other corrections would have made of a recorded run
  trimtab probe            how far engine and trainer are apart on the same tokens
  trimtab parity           why: is the engine off, the trainer or the hand-over, and what mends it?
  trimtab compare          which setting of a sweep is better, by how much and how surely: a page and tables
  trimtab report           a sweep as a report in W&B
  trimtab sweep            status, watch, logs, cancel, resume, collect, sync: a sweep as a whole
  trimtab COMMAND --help   what a command does, its options and exit codes
"""
DOCTOR = """\
Looks at Python, torch, torchvision, transformers, vLLM, the configuration, the model cache, disk, memory, cores, W&B
and git. Packages are imported in child processes, which takes some ten seconds. Of W&B's key only its presence is told.

Each line begins with ok, note (a run starts, but something is worth knowing) or fail; "->" says what to do.
Exit code: 0 when a default run could start, 1 when not.
"""
RUNS = """\
One line for each run folder at any depth below FOLDER (default: runs), oldest first.

state   running, completed, failed or preempted, as the run wrote it; killed: it says running, but no process holds
        its lock any more (resume=auto run_dir=... goes on with it)
step    steps done of those asked for         reward  mean training reward of the last reported step
eval    last evaluation reward                hash    equal for runs that train the same, seed included

Exit code: 0, or 2 when FOLDER is not there.
"""
COLUMNS = ("run", "state", "step", "reward", "eval", "algo", "hash")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when it is missing or torn."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def locked(folder: Path) -> bool:
    """Whether a live process holds the run's lock."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def algo_of(config: Path) -> str | None:
    """The algorithm in a run's config.yaml; None without one."""
    from omegaconf import OmegaConf  # 0.1 s that --help need not take
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        return str(OmegaConf.select(OmegaConf.load(config), "algo.name"))
    except (OSError, YAMLError, OmegaConfBaseException):
        return None


def last_evaluation(metrics: Path) -> float | None:
    """The last finite ``eval/reward`` in metrics.jsonl; a torn last line is passed over."""
    found = None
    try:
        lines = [line for line in metrics.read_text().splitlines() if '"eval/reward"' in line]
    except OSError:
        return None
    for line in lines:
        try:
            value = json.loads(line)["eval/reward"]
        except ValueError:
            continue
        found = found if value is None else float(value)
    return found


def describe(path: Path, below: Path) -> dict[str, Any]:
    """What ``trimtab runs`` says of one run folder."""
    folder = RunFolder(path, "no")
    status = read_json(folder.status)
    state = status.get("state", "unknown")
    if state == "running" and not locked(path):
        state = "killed"
    return {
        "run": str(path.relative_to(below)),
        "state": state,
        "step": status.get("step"),
        "steps": status.get("steps"),
        "reward": status.get("reward"),
        "eval": last_evaluation(folder.metrics),
        "algo": algo_of(folder.config),
        "hash": status.get("run_id"),
        "error": status.get("error"),
        "host": status.get("host"),
        "started": status.get("started"),
        "updated": status.get("updated"),
    }


def find_runs(below: Path) -> list[dict[str, Any]]:
    """Every run folder at any depth, oldest first."""
    found = [describe(status.parent, below) for status in below.rglob("status.json")]
    return sorted(found, key=lambda run: (run["started"] or 0.0, run["run"]))


def cells(run: dict[str, Any]) -> tuple[str, ...]:
    """One run as the table shows it."""

    def number(value: Any) -> str:
        return "-" if value is None else f"{value:.3f}"

    step = "-" if run["step"] is None else f"{run['step']}/{run['steps']}"
    return (run["run"], run["state"], step, number(run["reward"]), number(run["eval"]),
            run["algo"] or "-", run["hash"] or "-")  # fmt: skip


def table(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The lines of the table; a failed run's error stands below it."""
    rows = [COLUMNS, *(cells(run) for run in runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for i, row in enumerate(rows):
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        if i and runs[i - 1]["error"]:
            yield f"    {runs[i - 1]['error']}"


def runs(options: argparse.Namespace) -> int:
    """``trimtab runs``."""
    below = Path(options.folder).expanduser()
    if not below.is_dir():
        print(f"error: there is no folder {below}; give the one that holds your runs, or start one: python -m run",
              file=sys.stderr)  # fmt: skip
        return REFUSED
    found = find_runs(below)
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(table(found)) if found else f"no runs below {below}")
    return DONE


def doctor(options: argparse.Namespace) -> int:
    """``trimtab doctor``."""
    from trimtab import doctor

    findings = doctor.examine()
    print(doctor.as_json(findings) if options.json else doctor.as_text(findings))
    return DONE if doctor.able(findings) else FAILED


def parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(prog="trimtab", description=ABOUT, formatter_class=raw)
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for name, text, call in (("doctor", DOCTOR, doctor), ("runs", RUNS, runs)):
        command = commands.add_parser(name, description=text, formatter_class=raw)
        command.add_argument("--json", action="store_true", help="one line of JSON instead of text")
        command.set_defaults(call=call)
        if name == "runs":
            command.add_argument("folder", nargs="?", default="runs", metavar="FOLDER", help="where to look")
    truth.add(commands)
    replay.add(commands)
    probe_command.add(commands)
    parity.add(commands)
    compare.add(commands)
    sweep_command.add(commands)
    report_command.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; argparse ends a wrong command line with exit code 2."""
    options = parser().parse_args(arguments)
    try:
        return int(options.call(options))
    except TrimtabError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
