"""The frame of the laboratory's pages: one HTML file without a script, in the look of the comparison's page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from trimtab.report.colours import PALETTE
from trimtab.report.page.svg import tag
from trimtab.report.page.text import esc
from trimtab.report.page.view import section

__all__ = ["chart", "document", "figure", "section", "table"]


def document(title: str, heading: str, standing: Sequence[str], body: str, css: str = "") -> str:
    """The page as text. ``title``, ``heading``, ``standing`` are plain text, ``body`` is HTML.

    Colours: class c0, c1, … of an element sets ``--c`` to the palette's. Nothing in the page can run, load or send.
    """
    style = _css() + _colours() + css
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f'<link rel="icon" href="data:,"><title>{esc(title)}</title><style>{style}</style>'
    )
    top = tag(
        "header",
        tag("div", tag("span", esc(title), class_="kicker"), class_="bar"),
        tag("h1", esc(heading)),
        *(tag("p", esc(line), class_="standing") for line in standing),
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body><a class="skip" href="#main">Skip to the result</a>'
        f"{top}{tag('main', body, id='main', tabindex=-1)}</body></html>\n"
    )


def chart(drawn: Sequence[str], width: int, height: int, about: str) -> str:
    """A drawing with its description for who cannot see it."""
    return tag("svg", *drawn, viewBox=f"0 0 {width} {height}", class_="chart", role="img", aria_label=about)


def figure(caption: str, *charts: str, note: str = "") -> str:
    """Drawings under the name of their vertical axis."""
    below = tag("p", esc(note), class_="note") if note else ""
    return tag("div", tag("p", esc(caption), class_="yname"), *charts, below, class_="figure")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", html: bool = False) -> str:
    """A table: first column to the left, the others to the right. ``html``: cells are HTML already."""
    shown = (lambda text: text) if html else esc
    heads = (tag("th", esc(text), scope="col", class_="num" if i else None) for i, text in enumerate(head))
    lines = [
        tag("tr", tag("th", shown(row[0]), scope="row"), *(tag("td", shown(text), class_="num") for text in row[1:]))
        for row in rows
    ]
    top = tag("caption", esc(caption)) if caption else ""
    made = tag("table", top, tag("thead", tag("tr", *heads)), tag("tbody", *lines), class_="plain")
    return tag("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption or head[0])


def _css() -> str:
    look = resources.files("trimtab.report.page").joinpath("page.css").read_text(encoding="utf-8")
    return look + resources.files(__package__).joinpath("lab.css").read_text(encoding="utf-8")


def _colours() -> str:
    light = "".join(f".c{i}{{--c:{pair[0]};--dash:none}}" for i, pair in enumerate(PALETTE))
    dark = "".join(f".c{i}{{--c:{pair[1]}}}" for i, pair in enumerate(PALETTE))
    return f"{light}\n@media screen and (prefers-color-scheme:dark){{{dark}}}\n"
