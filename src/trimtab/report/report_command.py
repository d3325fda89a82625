"""``trimtab report``: the command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError

ABOUT = """\
The comparison of a sweep (trimtab compare) as a report in W&B: the summary with its paired statistics, a curve with its
band for each setting, reward against mismatch KL, parallel coordinates, parameter importance, and the runs beside
each other.

  trimtab report SWEEP                what would be saved, as JSON, into SWEEP/comparison/report.json
  trimtab report SWEEP --save         create the report, or update the one that was saved before; prints its address

The runs are those of W&B with the sweep's name as their group; trimtab sweep sync SWEEP uploads what is missing there.
The report's id and address are kept in SWEEP/wandb_report.json.

Exit code: 0, 1 when something given is wrong or W&B refuses, 2 for a command line that can't be read.
"""


def add(commands: Any) -> None:
    """Hang the command below ``trimtab``."""
    command = commands.add_parser("report", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("sweep", metavar="SWEEP", help="a sweep's folder, or any folder above run folders")
    what = command.add_mutually_exclusive_group()
    what.add_argument("--save", action="store_true", help="create or update the report on the server")
    what.add_argument("--dry-run", action="store_true", help="write its spec, without server or key (the default)")
    command.add_argument("--out", type=Path, metavar="FILE", help="of --dry-run; default: SWEEP/comparison/report.json")
    command.add_argument("--title", metavar="TEXT", help="default: the sweep's name")
    command.add_argument("--project", metavar="NAME", help="instead of the runs' tracker.project")
    command.add_argument("--entity", metavar="NAME", help="instead of the runs' tracker.entity")
    command.add_argument("--by", metavar="KEY,KEY", default="", help="as in trimtab compare")
    command.add_argument("--metric", metavar="NAME", default="eval/reward", help="as in trimtab compare")
    command.add_argument("--lower", action="store_true", help="as in trimtab compare")
    command.add_argument("--last", type=int, metavar="K", help="as in trimtab compare")
    command.add_argument("--baseline", metavar="KEY=VALUE,…", help="as in trimtab compare")
    command.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """``trimtab report``."""
    from trimtab.files import write_text
    from trimtab.report import wandb_report
    from trimtab.report.command import progress
    from trimtab.report.compare import compare
    from trimtab.report.sources import load
    from trimtab.track.console import SafeConsole

    sweep = Path(options.sweep).expanduser()
    if not sweep.is_dir():
        raise TrimtabError(f"there is no folder {options.sweep}; give a sweep's folder")
    with progress() as report:
        runs = load([str(sweep)], report)
    by = [key.strip() for key in options.by.split(",") if key.strip()]
    comparison = compare(runs, by, options.metric, options.last, options.baseline, options.lower)
    place = wandb_report.place_of(runs, options.project, options.entity)
    title = options.title or f"{sweep.resolve().name}: comparison by {comparison.metric}"
    console = SafeConsole(highlight=False)
    if options.save:
        url, fresh = wandb_report.save(comparison, runs, place, title, sweep)
        console.print(f"{'created' if fresh else 'updated'} {url}", markup=False, soft_wrap=True)
        return 0
    out = (options.out or sweep / "comparison" / "report.json").expanduser()
    spec = wandb_report.spec_of(wandb_report.build(comparison, runs, place, title))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(spec, indent=1) + "\n")
    except OSError as error:
        raise TrimtabError(f"{out} cannot be written ({error.strerror}); give another file with --out") from error
    console.print(f"written to {out}; --save sends it to W&B", markup=False, soft_wrap=True)
    return 0
