"""README.md, docs/methods.md and docs/truth.md against the code: options, choices, presets, every figure shown."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from docs.consoles import PAGES, printed, sessions
from docs.presets_table import METHODS, held, table

from trimtab.config import compose
from trimtab.config.groups import CONF, choices, recipes
from trimtab.config.keys import options
from trimtab.spec import AdvantageSpec, AlgoSpec, LossSpec, MisSpec, OverTokens, Pair, RejectSpec, Sign, Statistic

PAGE = METHODS.read_text()
ROOT = CONF.parent


def test_methods_tells_of_every_option_and_choice_of_a_method() -> None:
    keys = [key for key in options() if key.split(".")[0] in ("algo", "mis", "loss", "advantage")]
    names = [name for key in keys for name in options()[key].choices]
    assert len(keys) > 50 and len(names) > 60
    assert [key for key in keys if f"`{key}`" not in PAGE] == []
    assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_methods_tells_of_every_part_of_a_rejection_rule() -> None:
    rule = [field.name for field in fields(RejectSpec)]
    chosen = [member.value for kind in (Statistic, OverTokens, Sign, Pair) for member in kind]
    assert [name for name in [*rule, *chosen] if f"`{name}`" not in PAGE] == []


def test_methods_names_no_option_that_there_is_not() -> None:
    sections = {"algo": AlgoSpec, "mis": MisSpec, "loss": LossSpec, "advantage": AdvantageSpec}
    named = re.findall(r"`(algo|mis|loss|advantage)\.(\w+)", PAGE)
    assert len(named) > 50
    known = {section: {field.name for field in fields(spec)} for section, spec in sections.items()}
    assert sorted({f"{section}.{key}" for section, key in named if key not in known[section]}) == []


@pytest.mark.parametrize("group", ["algo", "tis_mode", "level", "rs", "veto", "loss", "advantage"])
def test_methods_names_every_choice_of_a_group(group: str) -> None:
    assert [name for name in choices(group) if f"`{name}`" not in PAGE and f"`{group}={name}`" not in PAGE] == []


def test_the_tables_of_presets_are_those_made_from_the_presets() -> None:
    assert held(PAGE) == table(compose([])), "run: python tests/docs/presets_table.py"
    assert [name for name in recipes() if f"| `{name}` |" not in PAGE] == []


SESSIONS = [(page, *session) for page in PAGES for session in sessions(page)]


@pytest.mark.parametrize(
    ("page", "command", "shown"),
    [pytest.param(*s, marks=[pytest.mark.slow] if i else []) for i, s in enumerate(SESSIONS)],
)
def test_the_figures_shown_are_those_that_the_command_prints(page: Path, command: str, shown: str) -> None:
    assert shown == printed(command), "run: python tests/docs/consoles.py"


@pytest.mark.parametrize("page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
