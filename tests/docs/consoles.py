"""The ``trimtab truth`` sessions that the docs show; ``python tests/docs/consoles.py`` writes what they print."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from trimtab.cli import main as trimtab
from trimtab.config.groups import CONF

PAGES = [CONF.parent / name for name in ("README.md", "docs/methods.md", "docs/truth.md")]
SESSION = re.compile(r"```console\n\$ (trimtab truth(?:[^\n]*\\\n)*[^\n]*)\n(.*?)```", re.DOTALL)
ASIDE = ("bias and sd", "left out", "written to")


def sessions(page: Path) -> Iterator[tuple[str, str]]:
    """(command, what the page says it prints)."""
    yield from SESSION.findall(page.read_text())


def printed(command: str) -> str:
    """The command's table and the line on its problem; it writes its files elsewhere."""
    words = shlex.split(command.replace("\\\n", ""))[1:]
    out = io.StringIO()
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = trimtab([*words, "--no-png", "--out", folder])
    assert code == 0, command
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "".join(f"{line}\n" for line in lines if not line.startswith(ASIDE))


def main() -> None:
    for page in PAGES:
        page.write_text(SESSION.sub(lambda m: f"```console\n$ {m[1]}\n{printed(m[1])}```", page.read_text()))


if __name__ == "__main__":
    main()
