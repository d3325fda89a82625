"""What is wrong with a set of overrides, in words: closest key, allowed values, the override that mends it."""

from __future__ import annotations

import re
import shlex
from difflib import get_close_matches
from traceback import walk_tb
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trimtab.config.groups import choices, defaults, group_names
from trimtab.config.keys import NAMED, Option, all_options, all_sections, fields_of, option_of, written
from trimtab.config.rejection import EXAMPLE
from trimtab.config.schema import everything, item_of, twin
from trimtab.spec import RejectSpec
from trimtab.spec.launch import ClusterSpec, ResourceSpec, RuleSpec

ADDED = re.compile(r"^\+(launch\.(?:clusters|classes))\.([^.=\s]+)\.(\w+)=(.*)$", re.DOTALL)
# What Hydra raises for a config it refuses; ValueError for veto=1e-4 or veto=null, which are no names of choices;
# OverflowError for a whole number that no float can hold.
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError, OverflowError, AssertionError)


def explain(error: Exception, overrides: Sequence[str], sweep: bool = False) -> str:
    """One line for each override that is wrong; Hydra's own words when none of them is (a fault in a yaml file).

    ``sweep``: several values for a key are allowed.
    """
    found = [line for text in overrides for line in judge(text, sweep)]
    if found:
        return "\n".join(found)
    if "hydra/sweeper/optuna" in str(error):
        return "sweep=optuna_bounds needs the Optuna sweeper: pip install -e '.[optuna]'"
    cause = f"\n{error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    return f"{error}{cause}"


def raised_in(function: Callable[..., Any], error: BaseException) -> bool:
    """Whether ``error`` came out of ``function``, and not out of Hydra around it."""
    return any(frame.f_code is function.__code__ for frame, _ in walk_tb(error.__traceback__))


def typed_overrides() -> tuple[list[str], bool]:
    """The overrides on the command line, and whether they make a sweep."""
    args = get_args_parser().parse_args()
    return args.overrides, args.multirun or any(text.startswith("sweep=") for text in args.overrides)


def spelled(overrides: Sequence[str]) -> list[str]:
    """What Hydra is given: ``+launch.clusters.NAME.KEY=VALUE`` as a dict; it cannot make NAME on the way to KEY."""
    return [ADDED.sub(r"+\1={\2:{\3:\4}}", text) for text in overrides]


def impossible(overrides: Sequence[str]) -> list[str]:
    """One line for each override that Hydra takes and no run can mean: a deletion, a list of a group's choices."""
    return [line for text in overrides if _deletes_or_lists(_parsed(text)) for line in judge(text, sweep=True)]


def _deletes_or_lists(override: Optional[Override]) -> bool:
    if override is None or override.is_sweep_override():
        return False
    return override.is_delete() or (override.key_or_group in group_names() and isinstance(override.value(), list))


def _parsed(text: str) -> Optional[Override]:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def job_overrides() -> list[str]:
    """The overrides of the job that runs now, as typed: what they refer to with ${} is not looked up."""
    return as_typed(HydraConfig.get().overrides.task)


def as_typed(overrides: Any) -> list[str]:
    """The texts of Hydra's list of overrides, whose own iteration would resolve ${} against Hydra's options."""
    texts: Any = OmegaConf.to_container(overrides, resolve=False)
    return [str(text) for text in texts]


def judge(text: str, sweep: bool = False) -> list[str]:
    """What is wrong with one override, a line each; empty when nothing is."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        return [_unreadable(text, str(error).splitlines()[0])]
    key = override.key_or_group
    if key.split("/")[0].split(".")[0] == "hydra":
        return []
    if override.is_delete():
        return _deletion(key)
    if override.is_sweep_override() and not sweep:
        return [f"{text}: several values make a sweep; add -m to run all of them, or put [] around a list"]
    if override.is_choice_sweep():
        return [line for value in override.sweep_string_iterator() for line in judge(f"{key}={value}", sweep)]
    if override.is_sweep_override():
        return []
    if key in group_names():
        return _choice(key, override.value())
    option = option_of(key)
    if option is not None and key not in all_options():
        return _named(key, override.value())
    return _unknown(key) if option is None else _value(option, override.value(), override.is_add())


def _unreadable(text: str, reason: str) -> str:
    key, _, value = text.partition("=")
    for inside in (f'"{value}"', f"'{value}'", '"' + value.replace('"', '\\"') + '"'):
        again = _parsed(f"{key}={inside}")
        if again is not None and not again.is_sweep_override() and again.value() == value != "":
            return f"{text}: its characters need quotes; write {_for_shell(f'{key}={inside}')}"
    return f"{text}: not an override ({reason}); write KEY=VALUE, and quote what has spaces or brackets"


def _for_shell(text: str) -> str:
    if "'" in text and not set(text) & set("$`!\\"):
        return '"' + text.replace('"', '\\"') + '"'
    return shlex.quote(text)


def _deletion(key: str) -> list[str]:
    if key in group_names():
        return [f"~{key}: a group cannot be deleted; set a choice, for example {key}={written(defaults()[key])}"]
    if key in all_sections():
        return [f"~{key}: a section cannot be deleted; set its keys, such as {_first(key)}=…"]
    option = option_of(key)
    if option is None:
        return [] if key.startswith(FREE) else _unknown(key)
    default = written(option.default) or '""'
    return [f"~{key}: an option cannot be deleted; set a value, for example {key}={default}"]


def _choice(group: str, value: Any) -> list[str]:
    allowed = choices(group)
    if isinstance(value, list):
        names = [str(v) for v in value if str(v) in allowed]
        mend = f"for example {group}={(names or [written(defaults()[group])])[0]}"
        if len(names) > 1:
            mend = f"for a sweep: -m {group}={','.join(names)}"
        return [f"{group}={written(value)} is refused; allowed: one of {_listed(group, '')}; {mend}"]
    if value is not None and str(value) in allowed:
        return []
    close = closest(str(value), allowed)
    line = f"{group}={written(value)} is refused; allowed: {_listed(group, close)}; for example {group}={close}"
    if group == "veto" and isinstance(value, float):
        line += f" (any other number: mis.rs_veto_threshold={written(value)})"
    return [line]


def closest(given: str, allowed: Sequence[str]) -> str:
    """The allowed name most like ``given``; of its family (before the slash) if it names one, the default of that."""
    if f"{given}/default" in allowed:
        return f"{given}/default"
    family = [name for name in allowed if name.partition("/")[0] == given.partition("/")[0]]
    found = get_close_matches(given, family or allowed, 1, 0.3)
    return (found or family or list(allowed))[0]


def _listed(group: str, close: str) -> str:
    """A group's choices; of many in families, the families, and all of the one that ``close`` is of."""
    allowed = choices(group)
    families = [name.partition("/")[0] for name in allowed if "/" in name]
    if not families:
        return ", ".join(allowed)
    mine = [name for name in allowed if "/" not in name or name.partition("/")[0] == close.partition("/")[0]]
    return ", ".join([*mine, *(f"{f}/…" for f in dict.fromkeys(families) if f != close.partition("/")[0])])


def _value(option: Option, value: Any, added: bool) -> list[str]:
    key, given = option.key, written(value)
    if isinstance(value, dict) and str(option.type) == str(Dict[str, Any]) and not added:
        first = next(iter(value), "name")
        return [f"{key}={given} is refused; allowed: +{key}.NAME=VALUE for each; for example +{key}.{first}=1"]
    if isinstance(value, dict) and option.type is Any:
        return [f"{key}={given} is refused; allowed: {KINDS[str(Any)]}; for example {key}=all"]
    if isinstance(value, dict) and key in NAMED and all(isinstance(one, dict) for one in value.values()):
        return [line for name, one in value.items() for f in one for line in _named(f"{key}.{name}.{f}", one[f])]
    item = item_of(option.type)
    if item is not None and isinstance(value, list) and all(isinstance(one, dict) for one in value):
        fields = {one.key: one for one in fields_of(item)}
        return [line for one in value for line in _item(key, one, fields, item)]
    return _judged(option, value, everything(), _example(item))


def _named(key: str, value: Any) -> list[str]:
    """What is wrong with a field of a cluster or a class of resources."""
    node, _, field = key.rpartition(".")
    kind = NAMED[node.rpartition(".")[0]]
    found = {option.key: option for option in fields_of(kind)}.get(field)
    return _unknown(key) if found is None else _judged(found, value, twin(kind), None, f"{node}.")


def _example(item: Optional[type]) -> Optional[str]:
    """How a list of such items is typed."""
    return EXAMPLE if item is RejectSpec else RULES if item is RuleSpec else None


def _item(key: str, given: Dict[str, Any], fields: Mapping[str, Option], item: type) -> list[str]:
    """One line for each field of a list's item that is none, or has a value that it cannot have."""
    lines = []
    for name, value in given.items():
        if name in fields:
            lines += [f"{key}: {line}" for line in _judged(fields[name], value, twin(item), None)]
        else:
            close = "".join(f"; did you mean {found}?" for found in get_close_matches(str(name), fields, 1, 0.5))
            lines.append(f"{key}: {name} is no part of a rule{close or '.'} A rule has: {', '.join(fields)}")
    return lines


def _judged(option: Option, value: Any, schema: type, example: Optional[str], prefix: str = "") -> list[str]:
    key, given = prefix + option.key, written(value)
    if option.type is int and isinstance(value, float):
        given = repr(value)  # 1e9 written short would look like a whole number
    try:
        OmegaConf.update(OmegaConf.structured(schema), option.key, value)
        return []
    except OverflowError:
        allowed = "a finite number"
    except OmegaConfBaseException:
        allowed = ", ".join(option.choices) or KINDS.get(str(option.type), str(option.type))
    if option.optional:
        allowed += " or null"
    if example is None and option.choices:
        default = written(option.default) if option.default is not None else option.choices[0]
        example = f"{key}={(get_close_matches(given, option.choices, 1, 0.3) or [default])[0]}"
    elif example is None and str(option.type) in NAMES:
        example = NAMES[str(option.type)]
    elif example is None:
        example = f"{key}={written(option.default) if option.default is not None else EXAMPLES[option.type]}"
    return [f"{key}={given} is refused; allowed: {allowed}; for example {example}"]


KINDS = {
    str(bool): "true, false",
    str(int): "a whole number",
    str(float): "a number",
    str(str): "a text",
    str(List[float]): "a list of numbers",
    str(List[str]): "a list of texts",
    str(Dict[str, Any]): "names and values",
    str(Any): "all, a preset, or a list of presets",
    str(List[RejectSpec]): "a list of rules such as {statistic:k3,level:sequence,over_tokens:mean,upper:0.01}",
    str(List[RuleSpec]): "a list of rules such as {when:{policy.kind:smollm2},use:large}",
    str(Dict[str, ClusterSpec]): "clusters by name, set as launch.clusters.NAME.KEY, + in front for a new NAME",
    str(Dict[str, ResourceSpec]): "classes by name, set as launch.classes.NAME.KEY, + in front for a new NAME",
}
RULES = "'launch.rules=[{when:{policy.kind:smollm2},use:large}]'"
NAMES = {
    str(Dict[str, ClusterSpec]): "+launch.clusters.mine.partition=gpu",
    str(Dict[str, ResourceSpec]): "+launch.classes.large.gpus=1",
}
FREE = "task.options."  # names below it are the user's own
EXAMPLES = {float: "1.0", str: "text"}


def _unknown(key: str) -> list[str]:
    node, _, name = key.rpartition(".")
    if kind := NAMED.get(node.rpartition(".")[0]):
        fields = [option.key for option in fields_of(kind)]
        near = "".join(f"; did you mean {node}.{one}?" for one in get_close_matches(name, fields, 1, 0.5)) or "."
        return [f"{key} is no option{near} {node} has: {', '.join(fields)}"]
    close = get_close_matches(key, [*all_options(), *group_names()], 3, 0.6)
    close += [k for k in all_options() if k.rpartition(".")[2] == name and k not in close][:3]
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    if node in all_sections():
        allowed = ", ".join(k.removeprefix(node + ".") for k in all_options() if k.startswith(node + "."))
        return [f"{key} is no option{hint} {node} has: {allowed}"]
    if key in all_sections():
        return [f"{key} is a section, not an option; set its keys, such as {_first(key)}=…"]
    tops = ", ".join([*(k for k in all_options() if "." not in k), *all_sections()])
    return [f"{key} is no option and no group{hint} Options: {tops}. Groups: {', '.join(group_names())}"]


def _first(section: str) -> str:
    return next(key for key in all_options() if key.startswith(section + "."))
