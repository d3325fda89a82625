"""Text that may stand in a page whatever it holds, and numbers as people read them."""

from __future__ import annotations

import html
import json
import math
import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

MINUS, DASH, THIN = "\u2212", "\u2013", "\u202f"

# What would be invisible, change the order of what stands around it, or isn't text at all.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)


def visible(value: object) -> str:
    """Text in which controls show: NUL as ␀, an escape as ␛, a bidi override as ⟨U+202E⟩, a lone surrogate likewise."""
    return UNSEEN.sub(_picture, str(value))


def _picture(found: re.Match[str]) -> str:
    code = ord(found.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\u27e8U+{code:04X}\u27e9"


def esc(value: object) -> str:
    """For HTML text and quoted attributes; stacked accents beyond four are cut, as they would cover what is around."""
    return html.escape(_unstack(visible(value)), quote=True)


def _unstack(text: str) -> str:
    if text.isascii():
        return text
    kept, run = [], 0
    for character in text:
        run = run + 1 if unicodedata.combining(character) else 0
        if run <= 4:
            kept.append(character)
    return "".join(kept)


def embed(value: object) -> str:
    """JSON for a script element: ASCII, nothing in it can end the element; non-finite numbers must be None already."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def short(text: str, most: int) -> str:
    """At most ``most`` characters, the middle left out."""
    text = visible(text)
    if len(text) <= most:
        return text
    head = (most - 1) * 2 // 3
    return text[:head] + "…" + text[len(text) - (most - 1 - head) :]


# -- numbers ---------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 3) -> str:
    """``digits`` significant digits, without needless powers of ten; a dash for what isn't there."""
    if value is None or math.isnan(value):
        return DASH
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(power)}".replace("-", MINUS)
    places = digits - 1 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{min(max(places, 0), 6)}f}".replace("-", MINUS)


def fixed(value: float | None, places: int, sign: bool = False) -> str:
    """``places`` decimals, so that a column lines up; ``sign``: with + too."""
    if value is None or not math.isfinite(value):
        return number(value)
    if abs(value) >= 1e6:
        return number(value)
    text = f"{value:+.{places}f}" if sign else f"{value:.{places}f}"
    return text.replace("-", MINUS)


def places(values: Sequence[float]) -> int:
    """Decimals that tell the values apart: three significant digits of their spread."""
    finite = [v for v in values if math.isfinite(v)]
    spread = max(finite) - min(finite) if finite else 0.0
    spread = spread or max((abs(v) for v in finite), default=1.0) or 1.0
    return min(max(2 - math.floor(math.log10(spread)), 0), 6)


def bounds(low: float | None, high: float | None, decimals: int, sign: bool = False) -> str:
    """``0.51 to 0.73``; empty where there is no interval."""
    return "" if low is None or high is None else f"{fixed(low, decimals, sign)} to {fixed(high, decimals, sign)}"


def p_value(p: float | None) -> str:
    """``p = 0.012`` or ``p < 0.001``."""
    if p is None or math.isnan(p):
        return DASH
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}" if p < 0.01 else f"p = {p:.2f}"


def big(value: float) -> str:
    """``1.24 M``."""
    if not math.isfinite(value):
        return number(value)
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{number(value / size)}{THIN}{name}"
    return number(value) if value != int(value) else str(int(value)).replace("-", MINUS)


def duration(seconds: float) -> str:
    """``3 h 12 min``, ``48 s``."""
    if not math.isfinite(seconds):
        return number(seconds)
    if seconds < 120:
        return f"{number(seconds)}{THIN}s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes}{THIN}min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{THIN}h {minutes:02d}{THIN}min" if hours < 48 else f"{number(hours / 24)}{THIN}d"


def count(n: int, one: str, many: str = "") -> str:
    """``1 run``, ``3 runs``."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def aligned(ticks: Sequence[float]) -> list[str]:
    """Ticks with as many decimals as their distance needs; thousands as 2k, millions as 1.5M."""
    if len(ticks) < 2:
        return [number(tick) for tick in ticks]
    top = max(map(abs, ticks))
    size, unit = next(((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e4, "k")) if top >= s), (1.0, ""))
    size = 1e3 if unit == "k" else size
    gaps = [(b - a) / size for a, b in pairwise(ticks)]
    step = min(gaps)
    decimals = next((d for d in range(7) if abs(round(step, d) - step) < 1e-6 * abs(step)), 6)
    if top and top < 1e-4:
        return [f"{tick:.4g}".replace("-", MINUS) for tick in ticks]
    return [fixed(tick / size, decimals) + (unit if tick else "") for tick in ticks]
