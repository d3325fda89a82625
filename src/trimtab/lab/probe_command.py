"""``trimtab probe``: the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ABOUT = """\
How far the rollout engine's probabilities are from the trainer's, for the same tokens. The engine samples responses as
in a run of the same overrides, the trainer scores the sampled tokens, and the two are compared, token by token.

  trimtab probe                                          the default run's engine and model, on its task's prompts
  trimtab probe preset=abeja policy=smollm2              bfloat16 on both sides, long answers to built-in questions
  trimtab probe policy=hf policy.path=./my-model rollout.dtype=bfloat16 rollout.max_tokens=256
                rollout.max_model_len=512 --prompts questions.txt --responses 32
  trimtab probe policy=smollm2 rollout.kv_cache_dtype=fp8 --json
  trimtab probe rollout.dtype=bfloat16 --weights runs/mine       what that run has trained, from its newest checkpoint

OVERRIDES are those of python -m run. What only concerns training has no effect here; a truncated support and raw
log-probs, which a run refuses, are measured.

  share |dp| ...   dp = p(trainer) - p(engine): share of tokens below 0.001, from 0.01, 0.05, 0.1 on, and the largest
  d                log p(trainer) - log p(engine) in nats: mean, std, quantiles
  k1, k3, chi2     E[-log w], E[w - 1 - log w], E[w^2] - 1 of the weights w of tokens, of responses (sequence), and of
                   the geometric mean over a response; ESS = (sum w)^2 / (n sum w^2)
  entropy, length  the gap by the entropy of the position, and of a response's first tokens

Intervals are bootstrapped over responses (1000 resamples by the run's seed). Writes probe.html (figures), probe.json,
figures.csv, curves.csv and tokens.csv (a line for each token) into --out.
Exit code: 0, 1 when something given is wrong, 2 for a command line that can't be read. The size of the gap doesn't
change it; trimtab parity looks for its cause.
"""
RESPONSES = 64


def add(commands: Any) -> None:
    """Hang the command below ``trimtab``."""
    raw = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser("probe", description=ABOUT, formatter_class=raw)
    command.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for python -m run: policy=, rollout.*=")
    add_prompts(command)
    add_weights(command)
    command.add_argument("--out", type=Path, metavar="DIR", help="default: probe, with --json none")
    command.add_argument("--json", action="store_true", help="one line of JSON on standard output instead of the table")
    command.set_defaults(call=run)


def add_prompts(command: argparse.ArgumentParser) -> None:
    """The options that say what is sampled."""
    command.add_argument("--prompts", metavar="SOURCE", help="builtin, task, a text file with a question a line, or a "
                         ".jsonl file with task.prompt_key; default: task for policy=tiny, else builtin")  # fmt: skip
    command.add_argument("--responses", type=_count, metavar="N", help="at least so many in all, spread over the "
                         f"prompts; default: {RESPONSES}, of built-in questions one each")  # fmt: skip


def add_weights(command: argparse.ArgumentParser) -> None:
    """The option that says whose weights are looked at."""
    command.add_argument("--weights", type=Path, metavar="RUN_DIR", help="start both sides from this run's newest "
                         "checkpoint, or this checkpoint; default: from where runs begin")  # fmt: skip


def _count(typed: str) -> int:
    if not (typed.isascii() and typed.isdigit() and 1 <= int(typed) <= 10**6):
        raise argparse.ArgumentTypeError(f"{typed} is no number of responses; allowed: 1 to 1000000")
    return int(typed)


def asked(options: argparse.Namespace, default: str) -> tuple[str, int]:
    """(source, responses): as given, or what makes sense."""
    from trimtab.lab.prompts import BUILTIN, QUESTIONS

    source = options.prompts if options.prompts is not None else default
    usual = len(QUESTIONS) if source == BUILTIN else RESPONSES
    return source, options.responses if options.responses is not None else usual


def write(folder: Path, files: dict[str, str]) -> None:
    """Texts by name into a folder; ConfigError where that can't be."""
    from trimtab.errors import ConfigError
    from trimtab.files import write_text

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text(folder / name, text)
    except OSError as error:
        raise ConfigError(f"--out={folder} cannot be written to ({error.strerror}); give another folder") from error


def show(lines: Sequence[str]) -> None:
    """Lines on standard output, whatever is in them."""
    from trimtab.track.console import SafeConsole

    console = SafeConsole(highlight=False)
    for text in lines:
        console.print(text, markup=False, soft_wrap=True)


def run(options: argparse.Namespace) -> int:
    """``trimtab probe``."""
    from trimtab.lab.bench import compose_to_measure, opened

    spec = compose_to_measure(options.overrides)
    from trimtab.lab import tables
    from trimtab.lab.page import page
    from trimtab.lab.probe import probe
    from trimtab.lab.prompts import default_source
    from trimtab.track.console import SafeConsole, setup_progress

    aside = SafeConsole(highlight=False, stderr=True)
    source, responses = asked(options, default_source(spec))
    with opened(spec, options.weights) as bench:
        probed = probe(bench, source, responses, lambda title: setup_progress(title, aside), options.overrides)
    plain = tables.document(probed)
    out = options.out if options.out is not None or options.json else Path("probe")
    if out is not None:
        write(out, {
            "probe.html": page(probed),
            "probe.json": json.dumps(plain, allow_nan=False) + "\n",
            "figures.csv": tables.figures_csv(probed),
            "curves.csv": tables.curves_csv(probed),
            "tokens.csv": tables.tokens_csv(probed),
        })  # fmt: skip
    if options.json:
        print(json.dumps(plain, allow_nan=False))
    else:
        show([*tables.as_text(probed), "", f"written to {out}/"])
    sys.stdout.flush()
    return 0
