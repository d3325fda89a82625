"""Configuration: schema, composing, rules, resolving. Nothing here imports torch."""

from __future__ import annotations

from trimtab.config.compose import compose, compose_config, prepare
from trimtab.config.convert import from_dict, read_yaml, to_dict, to_spec, to_yaml
from trimtab.config.explain import COMPOSE_ERRORS, explain, job_overrides, raised_in, typed_overrides
from trimtab.config.folder import with_run_dir
from trimtab.config.groups import CONF, recipes
from trimtab.config.help import text as help_text
from trimtab.config.methods import methods
from trimtab.config.notes import doubtful, ignored, notes
from trimtab.config.resolve import config_hash, resolve
from trimtab.config.rules import check
from trimtab.config.schema import register

__all__ = [
    "COMPOSE_ERRORS",
    "CONF",
    "check",
    "compose",
    "compose_config",
    "config_hash",
    "doubtful",
    "explain",
    "from_dict",
    "help_text",
    "ignored",
    "job_overrides",
    "methods",
    "notes",
    "prepare",
    "raised_in",
    "read_yaml",
    "recipes",
    "register",
    "resolve",
    "to_dict",
    "to_spec",
    "to_yaml",
    "typed_overrides",
    "with_run_dir",
]  # fmt: skip
