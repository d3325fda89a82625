"""``trimtab parity``: the command line."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trimtab.lab.probe_command import add_weights

ABOUT = """\
Finds why the rollout engine's log-probs differ from the trainer's, before any correction is switched on: a ladder of
controlled comparisons. A plain reference (transformers, float32, one row at a time, float64 log-softmax) says which
side is off; where one is, everything it may be instead is tried until a reading of its figures fits.

  trimtab parity                                          the default run's engine and model
  trimtab parity policy=smollm2 rollout.dtype=bfloat16
  trimtab parity rollout=transformers rollout.temperature=0.7 rollout.logprobs_mode=raw
  trimtab parity mismatch=stale mismatch.strength=1 --json

OVERRIDES are those of python -m run; what a run refuses (raw log-probs at T other than 1, a truncated support) is
diagnosed. Nothing is trained, no file of a run is touched.

  semantics        raw or processed log-probs, temperature, support, penalties, end tokens, shifts, prompts' ids
  inference path   batches and their order, prefix caching, chunked prefill, scheduling, graphs, KV-cache dtype
  weights          made-up updates, each handed over and verified by scoring; what was left behind is named
  numerics         dtypes, fp32 heads, attention, log-softmax

Verdicts: equal within noise; rounding (what the dtypes explain); differs by x +- y; not in use; not testable here, and
why. x marks a rung that differs, . one that only shows again what an earlier one found. Writes parity.html,
parity.json and parity.csv into --out.
Exit code: 0 when nothing differs, 1 when something does or what was given is wrong, 2 for a command line that can't be
read.
"""


def add(commands: Any) -> None:
    """Hang the command below ``trimtab``."""
    raw = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser("parity", description=ABOUT, formatter_class=raw)
    command.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for python -m run: policy=, rollout.*=")
    command.add_argument(
        "--prompts",
        metavar="SOURCE",
        help="builtin, task, a text file with a question a line, or a "
        ".jsonl file with task.prompt_key; default: task for policy=tiny, else builtin",
    )
    for name, what in (
        ("number", "prompts sampled from"),
        ("responses", "responses of each prompt"),
        ("tokens", "longest response, at most rollout.max_tokens"),
    ):
        command.add_argument(f"--{name}", type=_count, metavar="N", help=f"{what}; default: by the model's size")
    add_weights(command)
    command.add_argument("--out", type=Path, metavar="DIR", help="default: parity, with --json none")
    command.add_argument("--json", action="store_true", help="one line of JSON on standard output instead of the table")
    command.set_defaults(call=run)


def _count(typed: str) -> int:
    if not (typed.isascii() and typed.isdigit() and 1 <= int(typed) <= 10**5):
        raise argparse.ArgumentTypeError(f"{typed} is no number; allowed: 1 to 100000")
    return int(typed)


def run(options: argparse.Namespace) -> int:
    """``trimtab parity``."""
    from trimtab.lab.bench import compose_to_measure, opened

    spec = compose_to_measure(options.overrides)
    from trimtab.lab.parity import tables
    from trimtab.lab.parity.ladder import about, climb, effort_of
    from trimtab.lab.parity.model import healthy
    from trimtab.lab.parity.page import page
    from trimtab.lab.probe_command import show, write
    from trimtab.lab.prompts import default_source
    from trimtab.track.console import SafeConsole, setup_progress

    aside = SafeConsole(highlight=False, stderr=True)
    source = options.prompts if options.prompts is not None else default_source(spec)
    with opened(spec, options.weights) as bench:
        engine = bench.engine.describe()
        effort = effort_of(bench, options.number, options.responses, options.tokens)
        with setup_progress("climbing", aside) as report:
            rungs = climb(bench, effort, source, report)
    plain = tables.document(rungs, options.overrides, engine)
    out = options.out if options.out is not None or options.json else Path("parity")
    lines = about(spec, effort, source)
    if out is not None:
        write(
            out,
            {
                "parity.html": page(rungs, lines, options.overrides, engine),
                "parity.json": json.dumps(plain, allow_nan=False) + "\n",
                "parity.csv": tables.as_csv(rungs),
            },
        )
    if options.json:
        print(json.dumps(plain, allow_nan=False))
    else:
        show([*tables.as_text(rungs, lines), "", *([f"written to {out}/"] if out is not None else [])])
    sys.stdout.flush()
    return 0 if healthy(rungs) else 1
