"""The same figures as one HTML page that needs no network: a plot for each step of the inner loop, and a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from trimtab.truth.measure import Estimate
from trimtab.truth.scatter import colours, place_labels, points, short, span, ticks

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 560, 74, 14, 16, 48

STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5d6b7a; --line: #d9dfe6; --back: #ffffff; --mark: #eef3f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --soft: #9aa8b6; --line: #36424e; --back: #12181f; --mark: #1e2832; }
  svg text.label, td.name { filter: brightness(1.5); } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
  max-width: 1080px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } p { color: var(--soft); max-width: 75ch; }
svg { width: 100%; height: auto; max-width: 860px; display: block; } svg text { font-size: 12px; fill: var(--ink); }
svg path { stroke-width: .7; opacity: .7; }
svg .axis { stroke: var(--line); } svg circle { cursor: default; }
svg text.label { font-size: 11px; } svg .on { stroke: var(--ink); stroke-width: 2; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .22rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:nth-child(2), td:nth-child(2) { text-align: left; } th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible, nav button:focus-visible { outline: 2px solid; outline-offset: 2px; }
tr:hover, tr.on { background: var(--mark); }
nav button { font: inherit; padding: .25rem .8rem; margin: 0 .3rem 1rem 0; border: 1px solid var(--line);
  background: var(--back); color: var(--ink); border-radius: 6px; cursor: pointer; }
nav button[aria-pressed=true] { background: var(--ink); color: var(--back); }
section[hidden] { display: none; }
"""
SCRIPT = """
const sections = [...document.querySelectorAll('section')], buttons = [...document.querySelectorAll('nav button')];
buttons.forEach((b, i) => b.onclick = () => {
  sections.forEach((s, j) => s.hidden = i !== j);
  buttons.forEach((c, j) => c.setAttribute('aria-pressed', i === j)); });
for (const head of document.querySelectorAll('th button')) head.onclick = () => {
  const th = head.parentElement, at = th.cellIndex, body = th.closest('table').tBodies[0];
  const up = th.getAttribute('aria-sort') !== 'ascending';
  for (const other of th.parentElement.cells) other.removeAttribute('aria-sort');
  th.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  const key = row => { const v = row.cells[at].dataset.v; return at === 1 ? v : parseFloat(v); };
  body.append(...[...body.rows].sort((a, b) => (key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0) * (up ? 1 : -1))); };
for (const section of sections) {
  const light = (names, on) => {
    for (const row of section.querySelectorAll('tbody tr')) if (names.includes(row.dataset.n))
      row.classList.toggle('on', on);
    for (const dot of section.querySelectorAll('circle')) if (dot.dataset.n.split(' ').some(n => names.includes(n)))
      dot.classList.toggle('on', on); };
  for (const el of section.querySelectorAll('circle, tbody tr')) {
    el.onmouseenter = () => light(el.dataset.n.split(' '), true);
    el.onmouseleave = () => light(el.dataset.n.split(' '), false); } }
"""
HEADS = (
    ("#", "number on the plot"),
    ("method", "preset, or the name given"),
    ("bias", "L2 norm of expectation - exact gradient"),
    ("sd", "square root of the variance (trace of the covariance) of one sequence's gradient"),
    ("mse", "bias² + variance of one sequence"),
    ("cosine", "of expectation and exact gradient"),
    ("crossover", "sequences in a batch at which bias² equals the variance of their mean"),
    ("kept tokens", "expected share of tokens that are kept"),
    ("kept rows", "probability that a sequence keeps a token"),
    ("bias, kept", "bias if rejected tokens (or rows) leave the denominator, in a large batch"),
)


def page(found: Mapping[int, Mapping[str, Estimate]], title: str, about: str) -> str:
    """The page's text."""
    steps = list(found)
    buttons = "".join(
        f'<button aria-pressed="{"true" if i == 0 else "false"}">inner step {step}</button>'
        for i, step in enumerate(steps)
    )
    sections = "".join(
        f"<section{' hidden' if i else ''}>{_plot(found[step], step)}{_table(found[step])}</section>"
        for i, step in enumerate(steps)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<p>{escape(about)}</p><nav>{buttons}</nav>{sections}<script>{SCRIPT}</script></body></html>\n"
    )


def _plot(found: Mapping[str, Estimate], step: int) -> str:
    spots, colour = points(found), colours(list(found))
    numbers = {name: i + 1 for i, name in enumerate(found)}
    x_range = span([p.x for p in spots], least=-0.03 * (max(p.x for p in spots) or 1.0))
    y_range = span([p.y for p in spots])
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x_of(x: float) -> float:
        return LEFT + (x - x_range[0]) / (x_range[1] - x_range[0]) * (right - LEFT)

    def y_of(y: float) -> float:
        return bottom - (y - y_range[0]) / (y_range[1] - y_range[0]) * (bottom - TOP)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="bias and deviation at inner step {step}">']
    for x in ticks(*x_range):
        parts.append(f'<line class="axis" x1="{x_of(x):.1f}" x2="{x_of(x):.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x_of(x):.1f}" y="{bottom + 17}" text-anchor="middle">{x:.3g}</text>')
    for y in ticks(*y_range):
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y_of(y) + 4:.1f}" text-anchor="end">{y:.3g}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 10}" text-anchor="middle">bias (L2 norm)</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">'
                 "standard deviation of one sequence's gradient</text>")  # fmt: skip
    dots = [(x_of(p.x), y_of(p.y)) for p in spots]
    texts = [short(p.names, numbers) for p in spots]
    placed = place_labels(dots, [6.4 * len(text) for text in texts], 12, (LEFT, TOP, right, bottom))
    for spot, text, (x, y), label in zip(spots, texts, dots, placed, strict=True):
        ink, ids = colour[spot.names[0]], " ".join(str(numbers[name]) for name in spot.names)
        told = escape("\n".join(f"{numbers[name]} {name}" for name in spot.names))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{ink}" data-n="{ids}"><title>{told}\n'
                     f"bias {spot.x:.4g}, sd {spot.y:.4g}</title></circle>")  # fmt: skip
        if label.joint is not None:
            parts.append(f'<path d="M{x:.1f} {y:.1f}L{label.joint[0]:.1f} {label.joint[1]:.1f}" stroke="{ink}"/>')
        place = f'x="{label.left:.1f}" y="{label.middle + 4:.1f}"'
        parts.append(f'<text class="label" {place} style="fill:{ink}">{text}</text>')
    return "".join(parts) + "</svg>"


def _table(found: Mapping[str, Estimate]) -> str:
    colour = colours(list(found))
    heads = "".join(f'<th scope="col" title="{escape(what)}"><button>{name}</button></th>' for name, what in HEADS)
    rows = []
    for i, (name, at) in enumerate(found.items()):
        values = (at.bias, math.sqrt(at.variance), at.mse, at.cosine, at.crossover,
                  at.kept.tokens, at.kept.rows, at.kept.bias)  # fmt: skip
        cells = "".join(f'<td data-v="{v if math.isfinite(v) else 1e300}">{_number(v)}</td>' for v in values)
        rows.append(f'<tr data-n="{i + 1}"><td data-v="{i + 1}">{i + 1}</td>'
                    f'<td class="name" data-v="{escape(name)}" style="color:{colour[name]}">{escape(name)}</td>'
                    f"{cells}</tr>")  # fmt: skip
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "∞" if value > 0 else "–"
    return "0" if abs(value) < 1e-12 else f"{value:.4g}"
