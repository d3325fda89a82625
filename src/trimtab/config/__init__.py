"""Configuration: schema, composing, rules, resolving. Nothing here imports torch."""

from __future__ import annotations

from trimtab.config.compose import compose, compose_config, prepare
from trimtab.config.convert import from_dict, read_yaml, sweep_from_dict, to_dict, to_spec, to_sweep_spec, to_yaml
from trimtab.config.explain import COMPOSE_ERRORS, explain, job_overrides, raised_in, spelled, typed_overrides
from trimtab.config.folder import in_sweep, refuse_launcher, with_run_dir
from trimtab.config.groups import CONF, recipes
from trimtab.config.help import text as help_text
from trimtab.config.many import compose_many
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
    "compose_many",
    "config_hash",
    "doubtful",
    "explain",
    "from_dict",
    "help_text",
    "ignored",
    "in_sweep",
    "job_overrides",
    "methods",
    "notes",
    "prepare",
    "raised_in",
    "read_yaml",
    "recipes",
    "refuse_launcher",
    "register",
    "resolve",
    "spelled",
    "sweep_from_dict",
    "to_dict",
    "to_spec",
    "to_sweep_spec",
    "to_yaml",
    "typed_overrides",
    "with_run_dir",
]  # fmt: skip
