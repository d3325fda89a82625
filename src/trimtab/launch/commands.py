"""``trimtab sweep status|watch|logs|cancel|resume|collect``."""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.errors import DataError
from trimtab.launch import table
from trimtab.launch.files import SweepFolder
from trimtab.launch.follow import PATIENCE, Screen, by_hand, clusters_of, follow, resubmit, submitter, watch
from trimtab.launch.held import let_go
from trimtab.launch.model import RunStatus, Sweep
from trimtab.launch.spread import left
from trimtab.launch.status import Submission, Survey, all_submissions, survey
from trimtab.spec.launch import Backend, SweepSpec

MULTIRUN = Path("multirun")
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
LONG_PATIENCE = 30.0  # seconds that a cluster is given to take a cancel
HELP: Mapping[str, tuple[str, str]] = {
    "status": ("its runs: state, step, reward, why", """\
One line a run, counts on top. States come from squeue, sacct, the run's result.json and its status.json:

The column before it has the training reward, or the objective where a program of one's own knows no reward.

completed   it left a result in the attempt that counts
running     with its step and training reward        pending    in a queue, held or requeued, with SLURM's reason
failed      with the first line of its error         suspended  by SLURM; goes on later
timed_out, preempted, out_of_memory, node_failed, cancelled     how its last job ended
lost        its cluster does not know the job any more, and it left no result
unknown     its cluster cannot be reached: it may be running
unsubmitted no job was made for it yet

Exit code: 0 when each run is completed or on its way, 1 when one failed, ended otherwise, waits for `resume` or is
unknown, 2 for a command line that can't be read."""),
    "watch": ("status, again and again until all have ended", """\
The table in place on a terminal, a line when something changes elsewhere. Ctrl-C ends the watching only. Nothing is
submitted: that does `resume`, or wait=true. Exit code as for status."""),
    "logs": ("what its runs printed", """\
Without RUN the last lines of each run's log, with RUN the whole. -f goes on as the log grows until the run has ended.
--job shows what the job printed around its runs: set-up lines, SLURM's own words, a crash before the run began.
Exit code: 0, 1 when there is no such run or log."""),
    "cancel": ("end its jobs", """\
Every job of the sweep that has not ended, also one that no run needs any more (requeued and held by a controller that
came back); the command that started the sweep, if it lives, starts nothing more. Or only some. A job is ended on its
own cluster, and only when its name there holds the batch's id: numbers are used on several clusters, and again.
Runs save and end; `resume` goes on with them.
A job that carries other runs too is left alone unless all its unfinished runs are chosen, or the job itself is:
--run CLUSTER:JOB ends that one and none of its runs' other jobs.
Exit code: 0, 1 when a job could not be ended or its cluster was not reached."""),
    "resume": ("submit what is missing or failed", """\
Submits the runs that are not completed and have no job: never one that is queued, running or unknown. Failed and
cancelled runs go again, others within launch.retries. A run goes on from its last checkpoint. Config and code are those
of the first submission. A local sweep is carried out here. Exit code: 0, 1 when something could not be submitted or,
for a local sweep, a run failed."""),
    "collect": ("one line of results a run, as CSV and JSON", """\
Writes results.csv and results.json into the sweep's folder (or --out): each distinct run once, with its overrides, its
state and the result of the attempt that counts. Exit code as for status."""),
}  # fmt: skip


def add(below: Any) -> None:
    """Hang the commands below ``trimtab sweep``."""
    made = {}
    for name, call in (("status", run_status), ("watch", run_watch), ("logs", run_logs), ("cancel", run_cancel),
                       ("resume", run_resume), ("collect", run_collect)):  # fmt: skip
        made[name] = command = below.add_parser(
            name, description=HELP[name][1], formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.set_defaults(call=surviving(call))
        command.add_argument("sweep", nargs="?", metavar="SWEEP", help="a sweep's folder; default: newest in multirun/")
        if name != "logs":
            command.add_argument("--json", action="store_true", help="one line of JSON instead of text")
    made["status"].add_argument("--wide", action="store_true", help="whole lines on a terminal, too")
    made["watch"].add_argument("--every", type=_seconds, default=5.0, metavar="S", help="seconds between looks (5)")
    made["logs"].add_argument("run", nargs="?", metavar="RUN", help="name, a part of it that fits one run, or its job")
    made["logs"].add_argument("-f", "--follow", action="store_true", help="go on as the log grows")
    made["logs"].add_argument("--job", action="store_true", help="what the job printed instead of the run")
    made["logs"].add_argument("-n", type=int, metavar="LINES", help="last lines only")
    for name in ("cancel", "resume"):
        made[name].add_argument("--run", action="append", default=[], metavar="RUN", help="only this one; repeatable")
        made[name].add_argument("--dry-run", action="store_true", help="say what would be done")
    only = made["cancel"].add_mutually_exclusive_group()
    only.add_argument("--pending", action="store_true", help="only jobs that have not begun")
    only.add_argument("--failed", action="store_true", help="only jobs in which a run has failed")
    made["resume"].add_argument("--all", action="store_true", help="also what used up its retries")
    made["resume"].add_argument("--wait", action="store_true", help="follow it to its end, like wait=true")
    made["collect"].add_argument("--out", metavar="DIR", help="where to write them; default: the sweep's folder")


def surviving(call: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The same command, quiet when its reader goes away (``… | head``) and after Ctrl-C."""

    def called(options: argparse.Namespace) -> int:
        try:
            code = call(options)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else flushing at exit fails
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return INTERRUPTED

    return called


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("seconds above 0")
    return value


# -- what a command works on -----------------------------------------------------------------------------------------


class Opened:
    """A sweep's folder, its manifest, its options and its clusters."""

    def __init__(self, path: Path, patience: float) -> None:
        self.folder = SweepFolder(path)
        self.sweep: Sweep = self.folder.sweep()
        self.spec: SweepSpec = spec_of(self.sweep)
        self.clusters = clusters_of(self.spec, patience)
        self.name = name_of(self.sweep, self.folder)
        self.jobs = jobs_of(self.folder)

    def survey(self) -> Survey:
        """The runs as they are now."""
        return survey(self.folder, self.clusters)

    def runs(self, given: Sequence[str], runs: Sequence[RunStatus]) -> list[RunStatus]:
        """Those that ``given`` names, all when it names none."""
        return [found for text in given for found in pick(text, runs, self.jobs)] if given else list(runs)


def jobs_of(folder: SweepFolder) -> dict[str, list[Submission]]:
    """The submissions that each job carries out, by ``cluster:12_3``: of every attempt."""
    found: dict[str, list[Submission]] = {}
    for one in (one for of in all_submissions(folder).values() for one in of if one.job):
        found.setdefault(f"{one.batch.cluster}:{one.job}", []).append(one)
    return found


def opened(given: str | None, patience: float = PATIENCE) -> Opened:
    """The sweep at ``given``, or the newest below multirun/. DataError when there is none."""
    if given is not None:
        path = Path(given).expanduser()
        return Opened(path.parent if path.name == "sweep.json" else path, patience)
    found = sorted(MULTIRUN.glob("*/sweep.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise DataError(f"there is no sweep below {MULTIRUN}/; give a sweep's folder, or start one: python -m run -m …")
    return Opened(found[-1].parent, patience)


def spec_of(sweep: Sweep) -> SweepSpec:
    """The options that the sweep was started with."""
    from trimtab.config.convert import sweep_from_dict

    return sweep_from_dict(sweep.launch)


def pick(text: str, runs: Sequence[RunStatus], jobs: Mapping[str, Sequence[Submission]]) -> list[RunStatus]:
    """The run of that name, short name, job, or the only one whose name holds ``text``; ``*`` may stand for several."""
    names = table.short_names([run.run for run in runs])
    inside = {run for one in jobs.get(text, ()) for run, _ in one.batch.slots[one.slot].runs}
    exact = [run for run in runs if text in (run.run.dir, names[run.run.dir]) or run.run.dir in inside]
    if exact:
        return exact
    if any(mark in text for mark in "*?"):
        found = [run for run in runs if fnmatch.fnmatchcase(run.run.dir, text)]
    else:
        found = [run for run in runs if text in run.run.dir]
        if len(found) > 1:
            raise DataError(f"{text} fits {len(found)} runs, {found[0].run.dir} and {found[1].run.dir} among them")
    if not found:
        raise DataError(f"no run is called {text}; trimtab sweep status lists them")
    return found


def name_of(sweep: Sweep, folder: SweepFolder) -> str:
    """What a person calls the sweep."""
    return folder.path.name if sweep.sweep in ("", "sweep") else sweep.sweep


# -- the commands ----------------------------------------------------------------------------------------------------


def run_status(options: argparse.Namespace) -> int:
    """``trimtab sweep status``."""
    at = opened(options.sweep)
    seen = at.survey()
    show(at, seen, options.json, wide=options.wide)
    return table.exit_code(seen.runs)


def show(at: Opened, seen: Survey, as_json: bool, wide: bool = False) -> None:
    """Print the sweep as it is."""
    notes = [*seen.notes, *left(at.spec.launch.clusters, seen.runs)]
    if as_json:
        print(table.as_json(at.name, str(at.folder.path), at.sweep.combinations, seen.runs, notes))
        return
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    print(table.headline(at.name, seen.runs, at.sweep.combinations))
    print(table.progress(seen.runs, plain))
    for note in notes:
        print(f"note: {note}")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() and not wide else None
    print("\n".join(table.lines(seen.runs, width)))


def run_watch(options: argparse.Namespace) -> int:
    """``trimtab sweep watch``."""
    at = opened(options.sweep)
    screen = Screen(at.name, at.sweep.combinations)

    def shown(seen: Survey) -> None:
        if options.json:
            show(at, seen, True)
            sys.stdout.flush()
        else:
            screen(seen)

    try:
        return table.exit_code(watch(at.folder, at.clusters, shown, options.every))
    except KeyboardInterrupt:
        print(f"\nnot watched any more; the sweep goes on: trimtab sweep status {shlex.quote(str(at.folder.path))}")
        return 0


def run_logs(options: argparse.Namespace) -> int:
    """``trimtab sweep logs``."""
    from trimtab.launch import logs

    given, wanted = options.sweep, options.run
    if given is not None and wanted is None and not Path(given).expanduser().exists():
        given, wanted = None, given  # trimtab sweep logs RUN
    at = opened(given)
    runs = at.survey().runs
    chosen = at.runs([wanted], runs) if wanted is not None else runs
    job = at.jobs[wanted][-1] if wanted in at.jobs else None
    return logs.show(at.folder, chosen, at.survey, options, wanted is not None, job)


def run_cancel(options: argparse.Namespace) -> int:
    """``trimtab sweep cancel``."""
    from trimtab.launch.cancel import Choice, cancel

    at = opened(options.sweep, LONG_PATIENCE)
    seen = at.survey()
    jobs = frozenset(text for text in options.run if text in at.jobs)
    wanted = frozenset(run.run.dir for text in options.run if text not in jobs for run in at.runs([text], seen.runs))
    choice = Choice(seen.runs, wanted, jobs, options.pending, options.failed)
    outcome = cancel(at.folder, choice, at.clusters, dry_run=options.dry_run)
    done = {"cancelled": outcome.ended, "failed": [*seen.remarks, *outcome.failed], "left": outcome.left}
    return report(done, options.json, f"nothing of {at.folder.path} to cancel")


def run_resume(options: argparse.Namespace) -> int:
    """``trimtab sweep resume``."""
    at = opened(options.sweep)
    seen = at.survey()
    wanted = at.runs(options.run, seen.runs)
    if not options.dry_run:
        let_go(wanted, at.clusters, lambda line: print(line, file=sys.stderr), Counter())
    chosen, said = by_hand(wanted, at.spec.launch.retries, options.all)
    for line in (*seen.remarks, *said):
        print(f"note: {line}", file=sys.stderr)
    slurm = at.spec.launch.backend is Backend.slurm
    followed = slurm and options.wait and any(run.state.live for run in seen.runs)
    if options.dry_run or not (chosen or followed):
        done = {"resumed" if chosen else "nothing": [run.run.dir for run in chosen]}
        report(done, options.json, f"nothing of {at.folder.path} to submit: {counted(seen.runs)}")
        return 1 if seen.remarks else 0
    return submit(at, chosen, options)


def submit(at: Opened, chosen: Sequence[RunStatus], options: argparse.Namespace) -> int:
    """Submit the chosen runs, or carry them out here."""
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr if options.json else sys.stdout)  # noqa: E731
    if at.spec.launch.backend is Backend.local:
        from trimtab.launch.local import carry_out

        carry_out(at.folder, [run.run for run in chosen], at.spec, say)
    else:
        if chosen:
            resubmit(at.folder, at.spec, chosen, submitter(), say)
        if options.wait:
            screen = Screen(at.name, at.sweep.combinations, sys.stderr if options.json else None)
            follow(at.folder, at.spec, screen, at.clusters, say=say)
    seen = at.survey()
    show(at, seen, options.json)
    names = {run.run.dir for run in (seen.runs if options.wait else chosen)}
    return table.exit_code([run for run in seen.runs if run.run.dir in names])


def run_collect(options: argparse.Namespace) -> int:
    """``trimtab sweep collect``."""
    from trimtab.launch.collect import collected, write

    at = opened(options.sweep)
    seen = at.survey()
    rows = collected(at.folder, seen.runs)
    out = Path(options.out).expanduser() if options.out else at.folder.path
    written = write(out, replace(at.sweep, sweep=at.name), rows)
    if options.json:
        print(written.read_text().strip())
    else:
        print(f"{counted(seen.runs)}; written: {out / 'results.csv'}, {out / 'results.json'}")
    for note in seen.notes:
        print(f"note: {note}", file=sys.stderr)
    return table.exit_code(seen.runs)


def counted(runs: Sequence[RunStatus]) -> str:
    """``4 completed, 3 running``."""
    return ", ".join(f"{n} {state.value}" for state, n in table.counts(runs).items())


def report(done: Mapping[str, Sequence[str]], as_json: bool, nothing: str) -> int:
    """Print what was done, by what it was; 1 when something of it failed."""
    import json

    if as_json:
        print(json.dumps(done, ensure_ascii=False))
    elif not any(done.values()):
        print(nothing)
    else:
        for what, entries in done.items():
            for entry in entries:
                print(f"{what}: {entry}", file=sys.stderr if what == "failed" else sys.stdout)
    return 1 if done.get("failed") else 0
