"""One self-contained HTML page of a comparison: ``page(comparison, runs)``."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from trimtab.report.model import Comparison, Run
from trimtab.report.page.about import differences, how
from trimtab.report.page.data import curves_of, data
from trimtab.report.page.figures import compute, legend, multiples, parallel, scatter
from trimtab.report.page.samples import samples
from trimtab.report.page.svg import tag
from trimtab.report.page.table import problems, table
from trimtab.report.page.text import count, embed, esc
from trimtab.report.page.verdict import headline, standing, verdicts
from trimtab.report.page.view import View, everywhere, metric_of, section, view

__all__ = ["page"]


def page(comparison: Comparison, runs: Sequence[Run], title: str = "") -> str:
    """The page as text, to be written as UTF-8; it needs no network and no other file. ``title``: else the metric's."""
    v = view(comparison, runs)
    curves = curves_of(v)
    tabs = {
        "result": ("Result", verdicts(v) + table(v) + problems(v)),
        "curves": ("Curves", _explorer(v)),
        "health": ("Diagnostics", scatter(v) + multiples(v, curves)),
        "choices": ("Settings", parallel(v) + compute(v) + differences(v)),
        "samples": ("Samples", samples(v)),
        "method": ("Method", how(v)),
    }
    title = title or metric_of(comparison.metric).title
    css, script = _own("page.css") + _colours(v), _own("page.js")
    # 'none' for all else: the page cannot load, send or embed anything, whatever a name in it tries.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(css)}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f'<link rel="icon" href="data:,"><title>{esc(title)}: trimtab compare</title><style>{css}</style>'
    )
    embedded = f'<script type="application/json" id="data">{embed(data(v, curves))}</script>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>'
        f'<a class="skip" href="#main">Skip to the result</a>{_header(v, title)}{_main(v, tabs)}'
        f'<div id="tip" role="tooltip" hidden></div><p id="say" class="unseen" aria-live="polite"></p>'
        f"{embedded}<script>{script}</script></body></html>\n"
    )


def _own(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _colours(v: View) -> str:
    """A class for each setting: colour (on light and on dark ground) and dash."""
    rules, system = list[str](), list[str]()
    for label, i in v.index.items():
        look = v.look(label)
        dash = look.dash or "none"
        rules.append(f".c{i}{{--c:{look.light};--dash:{dash}}}")
        rules.append(f':root[data-theme="dark"] .c{i}{{--c:{look.dark}}}')
        system.append(f":root:not([data-theme]) .c{i}{{--c:{look.dark}}}")
    rules += ["@media screen and (prefers-color-scheme:dark){", *system, "}"]
    if v.order:  # paper is white whatever the theme
        rules += [
            "@media print{",
            *(f":root[data-theme] .c{i}{{--c:{v.look(s).colour}}}" for s, i in v.index.items()),
            "}",
        ]
    return "\n".join(rules)


def _header(v: View, title: str) -> str:
    found = len(v.comparison.problems)
    text = count(found, "problem") if found else "no problems"
    banner = tag("a", text, href="#problems", class_="alarm" if found else "fine")
    theme = tag("button", "Theme: system", type="button", id="theme")
    return tag(
        "header",
        tag("div", tag("span", esc(title), class_="kicker"), banner, theme, class_="bar"),
        tag("h1", headline(v)),
        tag("p", standing(v), class_="standing"),
        tag(
            "p",
            f"Injected mismatch: {esc(everywhere(v))}, in every run, on purpose: a setting, not a finding.",
            class_="warning banner",
        )
        if everywhere(v)
        else "",
    )


def _main(v: View, tabs: dict[str, tuple[str, str]]) -> str:
    buttons, panels = [], []
    for i, (key, (text, body)) in enumerate(tabs.items()):
        buttons.append(
            tag("button", text, type="button", role="tab", id=f"tab-{key}", aria_controls=key,
                aria_selected="true" if i == 0 else "false", tabindex=0 if i == 0 else -1)
        )  # fmt: skip
        panels.append(tag("div", body, id=key, role="tabpanel", aria_labelledby=f"tab-{key}", class_="panel"))
    bar = tag("nav", tag("div", *buttons, role="tablist", aria_label="Parts of the comparison"), class_="tabs")
    figures = tag("div", legend(v), id="legend", class_="panel-part") if v.order else ""
    return bar + tag("main", figures, *panels, id="main", tabindex=-1)


def _explorer(v: View) -> str:
    """The large figure that page.js draws."""
    pick = tag("label", "Metric ", tag("select", id="metric")) + tag("label", "Against ", tag("select", id="axis"))
    boxes = "".join(
        tag("label", f'<input type="checkbox" id="{id_}"{" checked" if on else ""}> {text}')
        for id_, text, on in (("bands", "bands", True), ("single", "single runs", False), ("log", "log scale", False))
    )
    figure = tag("div", id="explorer", class_="figure")
    none = "<noscript><p>This figure needs JavaScript; those under Diagnostics do not.</p></noscript>"
    lead = ("Mean over seeds, with its 95% t interval; a line breaks where a run ends before others. "
            "Arrow keys in the figure read off values.")  # fmt: skip
    return section("explore", "Curves", tag("div", pick, boxes, class_="controls"), none, figure, lead=lead)
