"""The tables of presets in docs/methods.md; ``python tests/docs/presets_table.py`` makes them from conf/preset."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from trimtab.config import compose
from trimtab.config.groups import CONF, recipes
from trimtab.config.methods import methods
from trimtab.spec import Algo, Level, LossName, MethodSpec, OverTokens, Pair, RejectSpec, RunSpec, Sign, TisMode

METHODS = CONF.parent / "docs" / "methods.md"
BEGIN, END = "<!-- made from conf/preset: begin -->\n", "<!-- made from conf/preset: end -->"
ROWS = {OverTokens.sum: "sum of", OverTokens.mean: "mean", OverTokens.max: "largest", OverTokens.every: "every token's"}


def comment(name: str) -> str:
    """What stands at the head of the preset's file."""
    lines = (CONF / "preset" / f"{name}.yaml").read_text().splitlines()[1:]
    head = [line.removeprefix("#").strip() for line in lines[: lines.index("defaults:")]] if "defaults:" in lines else [
        line.removeprefix("#").strip() for line in lines if line.startswith("#")]  # fmt: skip
    return " ".join(head).replace("|", "\\|")


def number(x: float | None) -> str:
    return "" if x is None else f"{x:g}"


def weight(method: MethodSpec) -> str:
    mis = method.mis
    if mis.tis_mode is TisMode.off:
        bypass = method.algo.name is Algo.bypass and method.loss.name is not LossName.reinforce
        return "in the ratio" if bypass else "–"
    bounds = {
        TisMode.truncate: f" ≤ {number(mis.tis_upper_bound)}",
        TisMode.clip: f" in {number(mis.tis_lower_bound)} … {number(mis.tis_upper_bound)}",
        TisMode.mask: f" {number(mis.tis_lower_bound)} … {number(mis.tis_upper_bound)}, else rejected",
        TisMode.zero: f" {number(mis.tis_lower_bound)} … {number(mis.tis_upper_bound)}, else 0",
    }.get(mis.tis_mode, "")
    return f"{mis.tis_level.value}{bounds}{', normalised' if mis.tis_batch_normalize else ''}"


def rule(spec: RejectSpec, base: Pair) -> str:
    """A rule in words, such as ``mean k3 ≤ 0.01``; its policies where they are not the algorithm's."""
    over = "" if spec.over_tokens is None else f"{ROWS[spec.over_tokens]} "
    if spec.statistic.value == "ratio" and spec.over_tokens in (OverTokens.sum, OverTokens.mean):
        over = "product of " if spec.over_tokens is OverTokens.sum else "geometric mean "
    low = "" if spec.lower is None else f"{number(spec.lower)} ≤ "
    high = "" if spec.upper is None else f" ≤ {number(spec.upper)}"
    inverse, sign = " (inverse)" if spec.inverse else "", "" if spec.sign is Sign.any else f" where A {spec.sign.value}"
    pair = "" if spec.pair in (None, base) else f" of {str(spec.pair.value).replace('_', '/')}"
    return f"{low}{over}{spec.statistic.value}{pair}{inverse}{high}{sign}"


def rejection(method: MethodSpec) -> str:
    mis = method.mis
    found = list[str]()
    if mis.use_rs:
        name = {Level.token: "ratio", Level.sequence: "product of ratio", Level.geometric: "geometric mean ratio"}
        found.append(f"{number(mis.rs_lower_bound)} ≤ {name[mis.rs_level]} ≤ {number(mis.rs_upper_bound)}")
    base = Pair.proximal_rollout if method.algo.name is Algo.decoupled else Pair.current_rollout
    found += [rule(spec, base) for spec in mis.reject]
    if mis.rs_veto_threshold is not None:
        found.append(f"veto {mis.rs_veto_threshold:g}")
    if mis.m2_threshold is not None:
        found.append(f"M2PO {mis.m2_threshold:g}")
    return "; ".join(found) or "–"


def denominators(method: MethodSpec) -> str:
    loss = method.loss
    return f"{loss.aggregate.value}, {loss.denominator.value}"


def table(run: RunSpec) -> str:
    """One section a system: where it was read, then a line a preset."""
    made, lines = methods(recipes(), run), list[str]()
    for system, names in groupby(recipes(), key=lambda name: name.partition("/")[0]):
        lines += [f"### {system}", ""]
        if (CONF / "preset" / system / "conventions.yaml").is_file():
            lines += [f"`{system}/conventions`, no method by itself: {comment(f'{system}/conventions')}", ""]
        lines += ["| preset | algo | loss | weight | keeps what has | mean over, counting | what it is |",
                  "|---|---|---|---|---|---|---|"]  # fmt: skip
        for name in names:
            method = made[name]
            algo = method.algo.name.value + (", metrics only" if method.algo.metrics_only else "")
            cells = (f"`{name}`", algo, method.loss.name.value, weight(method), rejection(method), denominators(method),
                     comment(name))  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def held(page: str) -> str:
    """What the page has between its marks."""
    return page.partition(BEGIN)[2].partition(END)[0]


def main(page: Path = METHODS) -> None:
    before, mark, rest = page.read_text().partition(BEGIN)
    page.write_text(before + mark + table(compose([])) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
