"""``trimtab compare``: the command line."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import ConfigError, TrimtabError
from trimtab.files import write_text

if TYPE_CHECKING:
    from trimtab.report.model import Comparison, Run
    from trimtab.report.sources import Progress

ABOUT = """\
Which setting is better, by how much, and how surely. Reads runs, finds from their configs which settings differ, takes
together the runs that differ only in their seed, and holds each setting against a baseline, seed by seed.

  trimtab compare multirun/2026-01-31_12-00-00              a sweep
  trimtab compare runs --by algo,level                      what else differs is pooled
  trimtab compare SWEEP --baseline algo=decoupled,level=token
  trimtab compare SWEEP --metric train/entropy --last 20
  trimtab compare wandb:ENTITY/PROJECT/GROUP other/wandb    W&B's server, and offline files (.wandb)

PATH: a run's folder, or any folder above some (a sweep's, runs/); a .wandb file or a folder above some;
wandb:ENTITY/PROJECT or wandb:ENTITY/PROJECT/GROUP. Runs that a sweep.json expects and that are not there are listed.

Writes page.html (one file, works offline), settings.csv, runs.csv, summary.md and comparison.json into --out.
"""
READING = """\

How to read it
  score       mean of a run's last k values of the metric, fixed beforehand: never the best step. Only a run that came
              to its end has one; a collapsed run has, and is listed as such.
  interval    95% t interval over seeds; none below two seeds. From 10 runs on also the interquartile mean (bootstrap).
  difference  to the baseline, over the seeds that both have; paired t test, p corrected by Holm for the number of
              comparisons. better, worse: corrected p <= 0.05. undecided: too few seeds, or no difference.
  lost seeds  better and worse must also hold with lost seeds counted: for better the setting's at the worst score of
              all runs and the baseline's at the best, for worse the other way round.
  length      all are scored at the last step that every setting reaches, unless the number of steps is a setting. A run
              that ended before its planned steps has no score, and does not shorten the others.
  problems    failed, missing, unfinished, non-finite, collapsed and superseded runs; settings that lack seeds.
  superseded  of runs with one setting and seed a completed one counts before others, then the last attempt.

Exit code: 0, 1 when something given is wrong (no run, unknown metric, key or baseline), 2 for a command line that can't
be read. What the runs did does not change it.
"""
PAGE = "page.html"
WIDE = 10_000  # characters: no table is as wide


def add(commands: Any) -> None:
    """Hang the command below ``trimtab``."""
    raw = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser("compare", description=ABOUT, epilog=READING, formatter_class=raw)
    command.add_argument("paths", nargs="+", metavar="PATH", help="where runs are; see above")
    command.add_argument("--by", metavar="KEY,KEY", default="", help="settings are told apart by these keys of the "
                         "config (algo, level, optim.lr, …), and pooled over what else differs; default: all that "
                         "differ")  # fmt: skip
    command.add_argument("--metric", metavar="NAME", default="eval/reward",
                         help="default: eval/reward; where no run has it, train/reward")  # fmt: skip
    command.add_argument("--lower", action="store_true", help="smaller values of the metric are better")
    command.add_argument("--last", type=int, metavar="K", help="values that the score is the mean of; default: 3 of "
                         "eval/…, 10 of any other")  # fmt: skip
    command.add_argument("--baseline", metavar="KEY=VALUE,…", help="the setting that others are held against; default: "
                         "algo=standard, else the first")  # fmt: skip
    command.add_argument("--out", type=Path, metavar="DIR", help="default: comparison in the first PATH, with --json "
                         "none")  # fmt: skip
    command.add_argument("--png", action="store_true", help="also figures as PNG (needs matplotlib)")
    command.add_argument("--pdf", action="store_true", help="also figures as PDF (needs matplotlib)")
    command.add_argument("--json", action="store_true", help="comparison.json on standard output instead of the table")
    command.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """``trimtab compare``."""
    from dataclasses import replace

    from trimtab.report.compare import compare
    from trimtab.report.sources import load

    out = folder_of(options)
    if options.png or options.pdf:
        from trimtab.report.png import check_matplotlib

        check_matplotlib()  # before anything is read
    with progress() as report:
        runs = load(options.paths, report)
    by = [key.strip() for key in options.by.split(",") if key.strip()]
    comparison = compare(runs, by, options.metric, options.last, options.baseline, options.lower)
    comparison = replace(comparison, sources=tuple(options.paths))
    written = write(out, comparison, runs, options) if out is not None else []
    if options.json:
        from trimtab.report.tables import as_json

        print(json.dumps(as_json(comparison), allow_nan=False))
    else:
        show(comparison, written)
    return 0


def folder_of(options: argparse.Namespace) -> Path | None:
    """Where the files go; None: nowhere."""
    if options.out is not None:
        return Path(options.out).expanduser()
    if options.json:
        if options.png or options.pdf:
            raise ConfigError("--png and --pdf beside --json need --out DIR: without it nothing is written")
        return None
    first = Path(options.paths[0]).expanduser()
    return first / "comparison" if first.is_dir() else Path("comparison")


def write(out: Path, comparison: Comparison, runs: list[Run], options: argparse.Namespace) -> list[Path]:
    """Write everything; the files, the page first."""
    from trimtab.report.page import page
    from trimtab.report.tables import files

    made = {out / PAGE: page(comparison, runs)} | files(out, comparison, runs)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, text in made.items():
            write_text(path, text)
    except OSError as error:
        raise TrimtabError(f"--out {out} cannot be written ({error}); give another folder") from error
    pictures: list[Path] = []
    if options.png or options.pdf:
        from trimtab.report.png import figures

        pictures = figures(comparison, runs, out, [kind for kind in ("png", "pdf") if vars(options)[kind]])
    return [*made, *pictures]


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar on standard error while runs are read, where a person looks at it."""
    from trimtab.report.sources import quiet
    from trimtab.track.console import SafeConsole, setup_progress

    console = SafeConsole(stderr=True, highlight=False)
    if not console.is_terminal:
        yield quiet
        return
    with setup_progress("reading runs", console) as report:
        yield report


def literal(text: str) -> str:
    """Text that rich takes for text: its markup begins with a bracket and a letter, and a backslash ends that."""
    from trimtab.report.page.text import visible

    return re.sub(r"(\\*)(\[[a-zA-Z#/@])", r"\1\1\\\2", visible(text))


def show(comparison: Comparison, written: list[Path]) -> None:
    """The table on the terminal, problems and notes below it, and where the files are."""
    from trimtab.report.model import Verdict
    from trimtab.report.tables import narrow_text, p_text, verdict_text
    from trimtab.track.console import SafeConsole, summary_table

    marks = {Verdict.better: "[green]better[/]", Verdict.worse: "[red]worse[/]"}
    rows = {}
    for row in comparison.rows:
        seeds = str(len(row.scores)) if not row.lost else f"{len(row.scores)} of {row.expected}"
        word = marks.get(row.difference.verdict) or verdict_text(row, comparison.baseline)
        values = " ".join(row.setting.values.values()) or row.setting.label  # the keys stand above them
        rows[literal(values if values not in rows else row.setting.label)] = (
            row.rank, seeds, narrow_text(row.interval), narrow_text(row.difference.interval, sign=True),
            p_text(row.difference.p_corrected), word,
        )  # fmt: skip
    columns = (
        literal(" ".join(comparison.keys) or "setting"),
        "rank",
        "seeds",
        literal(comparison.metric),
        "difference",
        "p",
        "",
    )
    footer = [f"score: mean of the last {comparison.last} values of {comparison.metric}; ± 95% t interval; p corrected "
              "by Holm"]  # fmt: skip
    if comparison.at is not None:
        footer.append(f"scored at step {comparison.at}, the last that every setting reaches")
    for row in comparison.rows:
        told = row.difference.claim or row.lost
        if told:
            word = verdict_text(row, comparison.baseline)
            footer.append(f"{row.setting.label}: {'untested' if word == '–' else word} ({told})")
    footer += [f"{problem.kind}: {problem.run}: {problem.text}" for problem in comparison.problems]
    footer += [f"note: {note}" for note in comparison.notes]
    footer += (
        [f"wrote {written[0]}", f"and {', '.join(path.name for path in written[1:])} beside it"] if written else []
    )
    console = SafeConsole(highlight=False)
    if not console.is_terminal:  # what reads a pipe or a file has no width to break lines at
        console = SafeConsole(highlight=False, width=WIDE)
    summary_table(rows, columns, [plain(line) for line in footer], console)


def plain(line: str) -> str:
    """One line of visible text."""
    from trimtab.report.page.text import visible

    return visible(line).replace("\n", " ")
