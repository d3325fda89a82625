"""``trimtab truth``: the command line, and the glue from names of presets to methods."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import ConfigError, TrimtabError
from trimtab.truth.recipe import MEANING, STRENGTH, Gap, Recipe

if TYPE_CHECKING:
    from trimtab.truth.enumerate import Enumeration
    from trimtab.truth.measure import Estimate, Named
    from trimtab.truth.problem import Problem

ABOUT = """\
What each correction costs, exactly. For a policy so small that every sequence it can write is listed, the gradient that
training wants (the on-policy one) and, for each method, the expectation, bias, variance and mean squared error of the
gradient it takes from one sequence of the rollout policy. Nothing is sampled: float64, by enumeration.

  trimtab truth                                             every preset on a built-in problem
  trimtab truth --mismatch staleness --methods verl/bypass_pg_is,trl/token_truncate
  trimtab truth --method "mine=algo=reinforce level=sequence mis.tis_upper_bound=3"
  trimtab truth --problem FILE.json --json                  your own problem; figures on standard output

Writes truth.json, truth.html, truth.png and problem.json (the problem, as --problem reads it) into --out.
Exit code: 0, 1 when something given is wrong, 2 for a command line that can't be read.

mismatch and --strength:
"""
FORMAT = """\

FILE.json: an object with
  symbols   k, the number of symbols; they are 0 ... k-1
  length    T, most symbols in a sequence
  eos       the symbol that ends a sequence, or null
  prompts   a list of objects: weight (a number), rollout, proximal, current (each maps every prefix to k logits; "-inf"
            in rollout: never sampled), advantage (maps every whole sequence to a number)
Prefixes and sequences are symbols joined by spaces, "" is the empty prefix; a sequence ends at eos or at T.

Out (--json): methods -> name -> expectation and target (gradients of the objective in the current logits: prompts in
order, prefixes sorted as text, concatenated), bias (L2 norm of their difference), variance (trace of the covariance of
one sequence's gradient: prompt drawn in proportion to its weight, sequence from the rollout), mse = bias^2 + variance.
The loss is minus the sum over a sequence's tokens, without a denominator; the objective is the sum over prompts of
weight times expected advantage. What a method takes from a whole batch (mean weight, M2PO) is that of an infinite one.
later_steps holds the same for the steps of the inner loop after the first one.
"""


def describe() -> str:
    """The text of --help."""
    rows = (f"  {gap.value:<12} {MEANING[gap]} (default {STRENGTH[gap]:g})\n" for gap in Gap if gap is not Gap.none)
    return ABOUT + "".join(rows) + FORMAT


def add(commands: Any) -> None:
    """Hang the command below ``trimtab``."""
    raw = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser("truth", description=describe(), formatter_class=raw)
    command.add_argument("--problem", metavar="FILE", type=Path, help="a problem of your own (format above)")
    built = command.add_argument_group("the built-in problem")
    built.add_argument("--mismatch", choices=[gap.value for gap in Gap], help="default: logit_noise")
    built.add_argument("--strength", type=float, metavar="X", help="how strong; see above")
    built.add_argument("--symbols", type=int, metavar="K", help="default: 3")
    built.add_argument("--length", type=int, metavar="T", help="most symbols in a sequence; default: 4")
    built.add_argument("--eos", metavar="SYMBOL", help="the symbol that ends a sequence, or none; default: 0")
    built.add_argument("--prompts", type=int, metavar="P", help="default: 2")
    built.add_argument("--seed", type=int, metavar="S", help="default: 0")
    command.add_argument("--steps", metavar="N,N", help="steps of the inner loop (exact-gradient ascent from current) "
                         "to look at; default: 0,1,2,4, for a file 0")  # fmt: skip
    command.add_argument("--step-size", type=float, default=2.0, metavar="X", help="of the inner loop; default: 2")
    command.add_argument("--methods", metavar="A,B", help="presets; default: all")
    command.add_argument("--method", action="append", default=[], metavar="NAME=OVERRIDES",
                         help="one more method: overrides of python -m run, between spaces")  # fmt: skip
    command.add_argument("--out", type=Path, metavar="DIR", help="default: truth, with --json none")
    command.add_argument("--no-png", action="store_true", help="draw no truth.png (which needs matplotlib)")
    command.add_argument("--json", action="store_true", help="one line of JSON on standard output instead of the table")
    command.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="applied to every method: loss.clip_low=0.1")
    command.set_defaults(call=run)


# -- what is asked ---------------------------------------------------------------------------------------------------


def recipe_of(options: argparse.Namespace) -> Recipe:
    """The built-in problem that the options describe."""
    names = ("mismatch", "strength", "symbols", "length", "eos", "prompts", "seed")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.problem is not None and given:
        raise ConfigError(f"--{next(iter(given))} is for the built-in problem; --problem={options.problem} has its "
                          "own; give one of the two")  # fmt: skip
    if "mismatch" in given:
        given["mismatch"] = Gap(given["mismatch"])
    if "eos" in given:
        given["eos"] = _eos(given["eos"])
    return Recipe(**given)


def _eos(typed: str) -> int | None:
    if typed in ("none", "null"):
        return None
    if not (typed.isascii() and typed.isdigit()):
        raise ConfigError(f"--eos={typed} is no symbol; allowed: none, or a number from 0 up")
    return int(typed)


def steps_of(options: argparse.Namespace) -> list[int]:
    """The steps of the inner loop to look at, ascending."""
    typed = options.steps if options.steps is not None else ("0" if options.problem else "0,1,2,4")
    parts = [part.strip() for part in typed.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) <= 1000 for part in parts):
        raise ConfigError(f"--steps={typed} must be whole numbers from 0 to 1000 between commas, such as --steps=0,1,4")
    return sorted({int(part) for part in parts})


def methods_of(options: argparse.Namespace, report: Any) -> list[Named]:
    """Every method asked for, composed and resolved as ``python -m run`` would."""
    from trimtab.config import compose
    from trimtab.config.groups import recipes
    from trimtab.spec import MethodSpec
    from trimtab.truth.measure import Named

    known = list(recipes())
    asked = known if options.methods is None and not options.method else []
    if options.methods is not None:
        asked = [name.strip() for name in options.methods.split(",") if name.strip()]
        for name in asked:
            if name not in known:
                raise ConfigError(f"--methods: there is no preset {name!r}; allowed: {', '.join(known)}; a method of "
                                  'your own: --method "NAME=OVERRIDES"')  # fmt: skip
    wanted = {name: [f"preset={name}"] for name in asked}
    for typed in options.method:
        name, equals, overrides = typed.partition("=")
        if not (name.strip() and equals):
            raise ConfigError(f'--method={typed!r} must be NAME=OVERRIDES, such as --method "mine=level=sequence"')
        if name.strip() in (*wanted, *known):
            raise ConfigError(f"--method: {name.strip()!r} is a preset or another method already; give it a name of "
                              f'its own, such as --method "my-{name.strip()}={overrides}"')  # fmt: skip
        wanted[name.strip()] = _words(overrides)
    if not wanted:
        raise ConfigError("--methods names no method; leave it out for all presets")
    found = []
    for i, (name, overrides) in enumerate(wanted.items()):
        report(i, len(wanted), name)
        try:
            spec = compose([*overrides, *options.overrides])
        except TrimtabError as error:
            raise ConfigError(f"method {name}: {error}") from error
        found.append(Named(name, MethodSpec(spec.algo, spec.mis, spec.loss)))
    report(len(wanted), len(wanted), "")
    return found


def _words(overrides: str) -> list[str]:
    try:
        return shlex.split(overrides)
    except ValueError as error:
        raise ConfigError(f"--method: {overrides!r} is no list of overrides ({error}); mend the quotes") from error


# -- what is told ----------------------------------------------------------------------------------------------------


def as_plain(at: Estimate, left_out: Sequence[str]) -> dict[str, Any]:
    """One estimate as JSON holds it; what is not a number there is null."""
    return {
        "expectation": at.expectation.tolist(),
        "target": at.target.tolist(),
        "bias": at.bias,
        "variance": at.variance,
        "mse": at.mse,
        "cosine": at.cosine if math.isfinite(at.cosine) else None,
        "crossover": at.crossover if math.isfinite(at.crossover) else None,
        "kept": {"tokens": at.kept.tokens, "rows": at.kept.rows, "bias": at.kept.bias},
        "left_out": list(left_out),
    }


def document(
    listed: Enumeration, found: Mapping[int, Mapping[str, Estimate]], left_out: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """What truth.json holds: the first step's methods, the steps after it, and what each coordinate is."""
    steps = [
        {"step": step, "methods": {name: as_plain(at, left_out[name]) for name, at in estimates.items()}}
        for step, estimates in found.items()
    ]
    symbols = listed.logits_PV.shape[1]
    coordinates = [[prompt, prefix, symbol] for prompt, prefix in listed.labels for symbol in range(symbols)]
    return {**steps[0], "later_steps": steps[1:], "coordinates": coordinates, "sequences": len(listed.words)}


def about(options: argparse.Namespace, recipe: Recipe, listed: Enumeration) -> str:
    """One line on the problem."""
    if options.problem is not None:
        return f"{options.problem.name}: {len(listed.words)} sequences"
    strength = STRENGTH[recipe.mismatch] if recipe.strength is None else recipe.strength
    return (f"{recipe.mismatch.value} {strength:g}: {recipe.prompts} prompts, {recipe.symbols} symbols, length "
            f"{recipe.length}, {len(listed.words)} sequences, seed {recipe.seed}, inner step size "
            f"{options.step_size:g}")  # fmt: skip


def table(found: Mapping[int, Mapping[str, Estimate]]) -> list[str]:
    """A line a method: bias and standard deviation at each step; what is kept and the crossover at the first one."""
    first = next(iter(found.values()))

    def cells(name: str) -> list[str]:
        biases = ("0" if e[name].bias < 1e-12 else f"{e[name].bias:.3g}" for e in found.values())
        spreads = (f"{math.sqrt(e[name].variance):.3g}" for e in found.values())
        far = "never" if first[name].crossover == math.inf else f"{first[name].crossover:,.0f}"
        return [name, *biases, *spreads, f"{first[name].kept.tokens:.1%}", far]

    rows = [["method", *(f"bias {s}" for s in found), *(f"sd {s}" for s in found), "kept", "crossover"]]
    rows += [cells(name) for name in first]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows]  # fmt: skip


def show(found: Mapping[int, Mapping[str, Estimate]], left_out: Mapping[str, Sequence[str]], lines: list[str]) -> None:
    """The table, and what it leaves out."""
    from trimtab.track.console import SafeConsole

    step = next(iter(found))
    notes = [f"bias and sd (of one sequence's gradient) at each step of the inner loop; at step {step}: kept, the "
             "share of tokens, and crossover, the batch at which bias^2 equals the variance of its mean."]  # fmt: skip
    for key in sorted({key for keys in left_out.values() for key in keys}):
        names = ", ".join(name for name, keys in left_out.items() if key in keys)
        notes.append(f"{key} is left out, as it wants something else than the advantage: {names}")
    console = SafeConsole(highlight=False)
    for line in (*table(found), *notes, *lines):
        console.print(line, markup=False, soft_wrap=True)


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
    """``trimtab truth``."""
    recipe, steps = recipe_of(options), steps_of(options)
    if not (math.isfinite(options.step_size) and options.step_size >= 0):
        raise ConfigError(f"--step-size={options.step_size} must be a finite number from 0 up, such as --step-size=2")
    from trimtab.track.console import SafeConsole, setup_progress
    from trimtab.truth.enumerate import enumerate_problem
    from trimtab.truth.generate import generate
    from trimtab.truth.measure import left_out, measure_all
    from trimtab.truth.plot import check_matplotlib
    from trimtab.truth.problem import read_problem

    folder = options.out if options.out is not None or options.json else Path("truth")
    if folder is not None and not options.no_png:
        check_matplotlib()
    problem = generate(recipe) if options.problem is None else read_problem(options.problem)
    listed = enumerate_problem(problem)
    aside = SafeConsole(highlight=False, stderr=True)
    with setup_progress("composing", aside) as report:
        methods = methods_of(options, report)
    with setup_progress("measuring", aside) as report:
        found = measure_all(listed, methods, steps, options.step_size, report)
    partly = {named.name: left_out(named.method) for named in methods}
    plain = document(listed, found, partly)
    if folder is not None:
        save(folder, found, plain, problem, about(options, recipe, listed), png=not options.no_png)
    if options.json:
        print(json.dumps(plain, allow_nan=False))
    else:
        show(found, partly, [about(options, recipe, listed), f"written to {folder}/"])
    sys.stdout.flush()
    return 0


def save(
    folder: Path,
    found: Mapping[int, Mapping[str, Estimate]],
    plain: Mapping[str, Any],
    problem: Problem,
    line: str,
    *,
    png: bool,
) -> None:
    """truth.json, problem.json, truth.html, and truth.png if asked."""
    from trimtab.truth.page import page
    from trimtab.truth.plot import draw
    from trimtab.truth.problem import as_json

    title = "Bias and variance of each correction, exactly"
    write(folder, {
        "truth.json": json.dumps(plain, allow_nan=False) + "\n",
        "problem.json": json.dumps(as_json(problem), indent=1) + "\n",
        "truth.html": page(found, title, f"{line}. Each method's gradient from one sequence of the rollout policy, "
                           "against the gradient from the current policy's own; by enumeration in float64."),
    })  # fmt: skip
    if png:
        draw(found, folder / "truth.png", f"{title}\n{line}")
