"""``trimtab replay``: what other methods would have made of a recorded run's batches; no model, no GPU."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import ConfigError, DataError, TrimtabError

if TYPE_CHECKING:
    from torch import Tensor

    from trimtab.method import Inputs
    from trimtab.recording import RecordedStep
    from trimtab.spec import MethodSpec, RunSpec

ABOUT = """\
What other corrections would have made of a run, from its recorded rollouts: no model, no GPU, some seconds. The figures
are those that shadow=[...] logs in a live run as shadow/<preset>/..., to the last digits.

  trimtab replay runs/mine                                         the run's own method
  trimtab replay runs/mine preset=verl/decoupled_token_is,trl/token_mask
  trimtab replay runs/mine preset=all                              every preset (python -m run --help names them)
  trimtab replay runs/mine preset=trl/token_truncate mis.tis_upper_bound=3
                                                                   overrides beside presets are laid on each of them
  trimtab replay runs/mine level=geometric rs=sequence --json      without a preset the overrides are the method

RUN_DIR is a run's folder: its config.yaml, and the steps in rollouts/*.parquet (rollout.record_every=N records each
N-th). Writes replay.csv (a line for each method and step, then its mean) and replay.md (the means) into --out.

  kept        share of tokens that no rule rejects          kept rows   share of responses with a token left
  ESS         effective sample size of the kept weights, (sum w)^2 / (tokens * sum w^2)
  saturated   share of tokens whose weight a bound has changed; in bypass: whose ratio the loss clips
  weight      mean weight of the kept tokens                pg_loss     the policy term at the step's first update

Means over steps count tokens: each step's kept, ESS, saturated by its tokens, kept rows by its responses, weight by its
kept tokens; pg_loss is the plain mean. The first line is the run's own method, the others stand by ESS, largest first.
Gradients are not here: they need the model (shadow_gradient_every=N in a live run).
Exit code: 0, 1 when something given is wrong, 2 for a command line that can't be read.
"""
METHOD = ("algo", "tis_mode", "level", "rs", "veto", "loss")
"""Groups that make a method, and with mis its sections."""

COLUMNS = ("kept_token_fraction", "kept_seq_fraction", "ess", "saturated_fraction", "weight_mean", "pg_loss")
HEADS = ("kept", "kept rows", "ESS", "saturated", "weight", "pg_loss")
OWN = "run"

Figures = Mapping[str, float]


@dataclass(frozen=True)
class Replayed:
    """One step: each method's figures, and how many tokens and responses they are of."""

    step: int
    tokens: int
    rows: int
    figures: Mapping[str, Figures]


def add(commands: Any) -> None:
    """Hang the command below ``trimtab``."""
    raw = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser("replay", description=ABOUT, formatter_class=raw)
    command.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder with recorded rollouts")
    command.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="preset=A,B or preset=all, and what else a "
                         "method is made of: algo, loss, tis_mode, level, rs, veto, mis.*, loss.*, algo.*")  # fmt: skip
    command.add_argument("--out", type=Path, metavar="DIR", help="default: RUN_DIR/replay, with --json none")
    command.add_argument("--json", action="store_true", help="one line of JSON on standard output instead of the table")
    command.set_defaults(call=run)


# -- what is asked ---------------------------------------------------------------------------------------------------


def split(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The presets, and the other overrides; ConfigError for one that is no part of a method."""
    from trimtab.config import recipes

    presets, overrides = list[str](), list[str]()
    for text in given:
        key, equals, value = text.partition("=")
        if key == "preset" and equals:
            names = [name.strip() for name in value.strip("[]").split(",") if name.strip()]
            if not names:
                raise ConfigError("preset= names no preset; give preset=all, or names between commas")
            presets += recipes() if "all" in names else names
        elif equals and key.lstrip("+").partition(".")[0] in (*METHOD, "mis"):
            overrides.append(text)
        else:
            raise ConfigError(
                f"{text} is no part of a method, and the rest of the run is as recorded; allowed: preset=, "
                f"{'=, '.join(METHOD)}=, algo.*=, mis.*=, loss.*=; for example mis.tis_upper_bound=3"
            )
    return list(dict.fromkeys(presets)), overrides


def methods_of(given: Sequence[str], spec: RunSpec, report: Any) -> dict[str, MethodSpec]:
    """The run's own method, then each one asked for, resolved."""
    from trimtab.config import compose, methods
    from trimtab.spec import MethodSpec

    presets, overrides = split(given)
    own = {OWN: MethodSpec(spec.algo, spec.mis, spec.loss)}
    if not overrides:
        return own | methods(presets, spec)
    methods(presets, spec)  # a wrong name shows at once
    size = f"rollout.max_tokens={spec.rollout.max_tokens}"  # what loss.sum_constant falls back to
    wanted = {name: [f"preset={name}"] for name in presets} or {" ".join(overrides): []}
    for i, (name, preset) in enumerate(wanted.items()):
        report(i, len(wanted), name)
        try:
            made = compose([*preset, *overrides, size])
        except TrimtabError as error:
            raise ConfigError(f"{name}: {error}" if preset else str(error)) from error
        own[name] = MethodSpec(made.algo, made.mis, made.loss)
    report(len(wanted), len(wanted), "")
    return own


# -- what was recorded -----------------------------------------------------------------------------------------------


def proximal_of(recorded: RecordedStep, folder: Path) -> Tensor:
    """The trainer's log-probs of the step's tokens, before its first update."""
    import torch

    rows = [row for row in recorded.proximal_logps if row is not None]
    if len(rows) != len(recorded.samples):
        raise DataError(
            f"{folder}: step {recorded.step} was recorded without the trainer's log-probs (proximal_logps), as "
            "earlier versions did for algo=bypass and algo=reinforce; record the run again with rollout.record_every=1"
        )
    return torch.tensor([x for row in rows for x in row], dtype=torch.float32)


def versions_of(folder: Path) -> dict[int, int]:
    """The policy's version before each logged step."""
    from trimtab.track import read_metrics

    path = folder / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return {1: 0} | {row["step"] + 1: int(row["train/policy_version"]) for row in rows if "train/policy_version" in row}


def inputs_of(recorded: RecordedStep, spec: RunSpec, version: int | None, folder: Path) -> Inputs:
    """The batch as the run's methods saw it. ``version`` of the trained policy; None: the newest in the batch."""
    import torch

    from trimtab.batch import Finish, pack
    from trimtab.train import shadow
    from trimtab.train.advantages import advantages

    batch = pack(recorded.samples, recorded.groups, recorded.rewards)
    cut_B = torch.tensor([sample.finish is Finish.length for sample in recorded.samples], dtype=torch.bool)
    _, dropped_B, _ = advantages(batch, cut_B, spec.advantage, spec.rollout.max_tokens)
    newest = version if version is not None else int(batch.version_N.max()) if batch.tokens else 0
    lag_N = (newest - batch.version_N).clamp(min=0)
    advantage_B = torch.tensor(recorded.advantages, dtype=torch.float32)
    return shadow.inputs_of(batch, advantage_B, dropped_B, lag_N, proximal_of(recorded, folder))


def replay(
    folder: Path, spec: RunSpec, methods: Mapping[str, MethodSpec], steps: Sequence[RecordedStep], report: Any
) -> list[Replayed]:
    """Each recorded step's figures; one without a valid token has none and is left out, as in a live run."""
    from trimtab.method import Shadows

    ask, versions, found = Shadows(methods), versions_of(folder), list[Replayed]()
    for i, recorded in enumerate(steps):
        report(i, len(steps), f"step {recorded.step}")
        inputs = inputs_of(recorded, spec, versions.get(recorded.step), folder)
        tokens = int(inputs.valid_N.sum())
        if tokens:
            rows = int(inputs.row_N[inputs.valid_N].bincount().count_nonzero())
            found.append(Replayed(recorded.step, tokens, rows, ask(inputs)))
    report(len(steps), len(steps), "")
    if not found:
        raise DataError(f"{folder}: none of its {len(steps)} recorded steps holds a token of the policy's own")
    return found


# -- what is told ----------------------------------------------------------------------------------------------------


def means(found: Sequence[Replayed], name: str) -> dict[str, float]:
    """One method's figures over all steps, each weighted by what it is a mean over."""
    mean = dict[str, float]()
    for column in COLUMNS:
        values = [step.figures[name][column] for step in found]
        match column:
            case "kept_seq_fraction":
                weights = [float(step.rows) for step in found]
            case "weight_mean":
                weights = [step.tokens * step.figures[name]["kept_token_fraction"] for step in found]
            case "pg_loss":
                weights = [1.0] * len(found)
            case _:
                weights = [float(step.tokens) for step in found]
        pairs = [(w, x) for w, x in zip(weights, values, strict=True) if w > 0]
        mean[column] = sum(w * x for w, x in pairs) / sum(w for w, _ in pairs) if pairs else 0.0
    return mean


def in_order(found: Sequence[Replayed]) -> dict[str, dict[str, float]]:
    """Means by method: the run's own first, then by ESS, then by name."""
    averaged = {name: means(found, name) for name in found[0].figures}
    names = sorted(averaged, key=lambda name: (name != OWN, -round(averaged[name]["ess"], 9), name))
    return {name: averaged[name] for name in names}


def as_csv(found: Sequence[Replayed], averaged: Mapping[str, Figures]) -> str:
    """A line for each method and step; the method's mean under step ``mean``."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("method", "step", "tokens", *COLUMNS))
    for name, mean in averaged.items():
        for step in found:
            lines.writerow((name, step.step, step.tokens, *(repr(step.figures[name][c]) for c in COLUMNS)))
        lines.writerow((name, "mean", sum(step.tokens for step in found), *(repr(mean[c]) for c in COLUMNS)))
    return text.getvalue()


def table(averaged: Mapping[str, Figures]) -> list[list[str]]:
    """Heads, then a row a method."""
    forms = (".1%", ".1%", ".4f", ".2%", ".4f", ".4g")
    cells = [[format(row[c], form) for c, form in zip(COLUMNS, forms, strict=True)] for row in averaged.values()]
    return [["method", *HEADS], *([name, *row] for name, row in zip(averaged, cells, strict=True))]


def as_markdown(averaged: Mapping[str, Figures], line: str) -> str:
    """The means as a Markdown table under one line of context."""
    head, *rows = table(averaged)
    lines = [f"# {line}", "", f"| {' | '.join(head)} |", f"|---{'|---:' * len(HEADS)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def as_text(averaged: Mapping[str, Figures]) -> list[str]:
    """The table for a terminal."""
    rows = table(averaged)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows]  # fmt: skip


def document(found: Sequence[Replayed], averaged: Mapping[str, Figures]) -> dict[str, Any]:
    """What --json prints; what is not a number there is null."""
    from math import isfinite

    def plain(figures: Figures) -> dict[str, float | None]:
        return {key: value if isfinite(value) else None for key, value in figures.items()}

    steps = [{"step": s.step, "tokens": s.tokens, "methods": {n: plain(f) for n, f in s.figures.items()}}
             for s in found]  # fmt: skip
    return {"methods": {name: plain(figures) for name, figures in averaged.items()}, "steps": steps}


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Texts by name into a folder; ConfigError where that can't be."""
    from trimtab.files import write_text

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text(folder / name, text)
    except OSError as error:
        raise ConfigError(f"--out={folder} cannot be written to ({error.strerror}); give another folder") from error


def run(options: argparse.Namespace) -> int:
    """``trimtab replay``."""
    from trimtab.config import read_yaml

    folder = options.run_dir.expanduser()
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is no run's folder: it has no config.yaml; trimtab runs lists those below runs/")
    split(options.overrides)  # before anything that takes a while
    spec = read_yaml(folder / "config.yaml")
    from trimtab.recording import read_rollouts
    from trimtab.track.console import SafeConsole, setup_progress

    steps = read_rollouts(folder / "rollouts")
    aside = SafeConsole(highlight=False, stderr=True)
    with setup_progress("composing", aside) as report:
        methods = methods_of(options.overrides, spec, report)
    with setup_progress("replaying", aside) as report:
        found = replay(folder, spec, methods, steps, report)
    averaged = in_order(found)
    numbers = f"{len(found)} recorded steps ({found[0].step} to {found[-1].step})"
    line = f"{folder.name}: {numbers}, {sum(step.tokens for step in found)} tokens"
    out = options.out if options.out is not None or options.json else folder / "replay"
    if out is not None:
        write(out, {"replay.csv": as_csv(found, averaged), "replay.md": as_markdown(averaged, line)})
    if options.json:
        print(json.dumps(document(found, averaged), allow_nan=False))
    else:
        console = SafeConsole(highlight=False)
        for text in (*as_text(averaged), line, f"written to {out}/"):
            console.print(text, markup=False, soft_wrap=True)
    sys.stdout.flush()
    return 0
