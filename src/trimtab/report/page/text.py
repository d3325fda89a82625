"""Text that may stand in a page whatever it holds, and numbers as people read them."""

from __future__ import annotations

import html
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

MINUS, DASH, THIN = "\u2212", "\u2013", "\u202f"
BEYOND = 1e15
"""From here on powers of ten: letters for thousands end with T."""

# What would be invisible, change the order of what stands around it, or isn't text at all.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)


CONTROLS = (
    "NUL", "SOH", "STX", "ETX", "EOT", "ENQ", "ACK", "BEL", "BS", "HT", "LF", "VT", "FF", "CR", "SO", "SI", "DLE",
    "DC1", "DC2", "DC3", "DC4", "NAK", "SYN", "ETB", "CAN", "EM", "SUB", "ESC", "FS", "GS", "RS", "US",
)  # fmt: skip


def visible(value: object) -> str:
    """Text in which controls show: an escape as ⟨ESC⟩, a bidi override as ⟨U+202E⟩, a lone surrogate likewise.

    Spelled out, as few fonts have the pictures of U+2400 on, and a box says nothing.
    """
    return UNSEEN.sub(_picture, str(value))


def _picture(found: re.Match[str]) -> str:
    code = ord(found.group())
    told = CONTROLS[code] if code < 0x20 else "DEL" if code == 0x7F else f"U+{code:04X}"
    return f"\u27e8{told}\u27e9"


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


def shorts(texts: Sequence[str], most: int) -> dict[str, str]:
    """Each text shortened; what would be alike then is numbered."""
    made: dict[str, str] = {}
    for text in dict.fromkeys(texts):
        made[text] = short(text, most)
    alike = Counter(made.values())
    seen = Counter[str]()
    for text, shortened in made.items():
        if alike[shortened] > 1:
            seen[shortened] += 1
            made[text] = f"{shortened} #{seen[shortened]}"
    return made


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
    if abs(value) >= BEYOND:
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
    """Ticks with as many decimals as tell them apart; 20k, 1.5M; 2e101 and 5e−7 beyond. No two are the same."""
    top = max(map(abs, ticks), default=0.0)
    if top and not 1e-4 <= top < BEYOND:
        return _apart(ticks, lambda tick, decimals: power(tick, decimals))
    size, unit = next(((s, u) for b, s, u in UNITS if top >= b), (1.0, ""))
    return _apart(ticks, lambda tick, decimals: fixed(tick / size, decimals) + (unit if tick else ""))


UNITS = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))


def _apart(ticks: Sequence[float], told: Callable[[float, int], str]) -> list[str]:
    """The fewest decimals with which evenly set ticks read as evenly set, and as different."""
    step = min((b - a for a, b in pairwise(ticks)), default=0.0)
    made: list[str] = []
    for decimals in range(17):
        made = [told(tick, decimals) for tick in ticks]
        off = max((abs(_read(text) - tick) for text, tick in zip(made, ticks, strict=True)), default=0.0)
        if len(set(made)) == len(made) and off <= (
            0.01 * step if step > 0 else 0.005 * max(map(abs, ticks), default=0)
        ):
            break
    return made


def _read(text: str) -> float:
    """Back to a number."""
    size = next((size for _, size, unit in UNITS if text.endswith(unit)), 1.0)
    return float(text.rstrip("kMGT").replace(MINUS, "-")) * size


def power(value: float, decimals: int = 0) -> str:
    """``2.5e101``: never a plus or zeros before the exponent."""
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.{decimals}e}".partition("e")
    return f"{mantissa}e{int(exponent)}".replace("-", MINUS)


def plain(value: float) -> str:
    """A mark of a log scale: ``0.05``, ``200``, ``1e6``."""
    return f"{value:g}".replace("-", MINUS) if 1e-4 <= abs(value) < 1e5 else power(value)
