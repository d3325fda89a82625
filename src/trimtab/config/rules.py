"""Rules that a schema cannot state: ranges, and what two options must agree on. Every violation is reported."""

from __future__ import annotations

import math
import os
import re
from typing import Callable, Iterable, Iterator, Optional, Sequence

from trimtab.config.explain import closest
from trimtab.config.groups import recipes
from trimtab.config.keys import options, value_of, with_values, written
from trimtab.config.places import is_data, is_file, is_importable, is_model
from trimtab.config.ranges import RANGES, ranges, wrong
from trimtab.config.rejection import rejection
from trimtab.config.resolve import resolve
from trimtab.config.rules_rollout import RULES as ROLLOUT
from trimtab.errors import ConfigError
from trimtab.spec import (
    Aggregate,
    Algo,
    Attention,
    Baseline,
    Device,
    Dtype,
    Level,
    LogprobsMode,
    LossName,
    Match,
    Numerator,
    Overlong,
    PolicyKind,
    PromptStyle,
    RunSpec,
    TaskName,
    TisMode,
)

Rule = Callable[[RunSpec], Iterator[str]]

MAY_BE_EMPTY = ("run_dir", "task.system")  # a folder named by the time; a system message in place of the model's own
MAY_BE_BLANK = ("task.system", "task.stop", "task.pattern")


def texts(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """(key, violation) of every text that is empty, which null says when it is meant."""
    for key, option in options().items():
        value = value_of(spec, key)
        if option.type is not str or value is None or (value if key in MAY_BE_BLANK else value.strip()):
            continue
        if value or key not in MAY_BE_EMPTY:
            null = ", or null" if option.optional else ""
            mend = f"{key}={written(option.default) or 'NAME'}"
            yield key, f"{key}={value!r} is refused; allowed: a text that is not empty{null}; for example {mend}"


def full_support(spec: RunSpec) -> Iterator[str]:
    """The trainer scores the whole vocabulary at the rollout's temperature, so the engine must report just that."""
    rollout = spec.rollout
    why = "while the trainer scores the full vocabulary"
    if rollout.top_p != 1:
        yield wrong("rollout.top_p", rollout.top_p, f"1 {why}", "rollout.top_p=1")
    if rollout.top_k != 0:
        yield wrong("rollout.top_k", rollout.top_k, f"0 (off) {why}", "rollout.top_k=0")
    if rollout.logprobs_mode is LogprobsMode.raw and rollout.temperature != 1:
        allowed = f"processed at rollout.temperature={written(rollout.temperature)}, or raw at rollout.temperature=1"
        yield wrong("rollout.logprobs_mode", rollout.logprobs_mode, allowed, "rollout.logprobs_mode=processed")


def batches(spec: RunSpec) -> Iterator[str]:
    """Whole groups in a batch, whole rows in a minibatch, and groups large enough for their baseline."""
    rows, group, parts = spec.rollout.batch_size, spec.rollout.group_size, spec.optim.minibatches
    baseline = spec.advantage.baseline
    if rows % group:
        up = -(-rows // group) * group
        mend = f"rollout.batch_size={up if up in RANGES['rollout.batch_size'] else up - group}"
        yield wrong("rollout.batch_size", rows, f"multiples of rollout.group_size={group}", mend)
    if rows % parts:
        halves = [d for d in range(1, math.isqrt(rows) + 1) if rows % d == 0]
        nearest = min(halves + [rows // d for d in halves], key=lambda d: (abs(d - parts), d))
        yield wrong(
            "optim.minibatches", parts, f"divisors of rollout.batch_size={rows}", f"optim.minibatches={nearest}"
        )
    if group < 2 and baseline is not Baseline.none:
        allowed = f">= 2 with advantage.baseline={baseline.name}, whose advantages would all be 0"
        yield wrong("rollout.group_size", group, allowed, "rollout.group_size=8")


def numerator(spec: RunSpec) -> Iterator[str]:
    """Bypass has no proximal policy of its own; decoupled is defined by weighting with it."""
    algo, given = spec.algo.name, spec.mis.numerator
    if algo in (Algo.bypass, Algo.on_policy) and given is Numerator.proximal:
        yield wrong(
            "mis.numerator",
            given,
            f"current with algo={algo.name}, which skips the forward that scores the proximal policy",
            "mis.numerator=current (or algo=decoupled)",
        )
    if algo is Algo.decoupled and given is Numerator.current:
        allowed = "proximal with algo=decoupled, whose PPO ratio covers current/proximal already"
        yield wrong("mis.numerator", given, allowed, "mis.numerator=proximal (or algo=on_policy)")


def bounds(spec: RunSpec) -> Iterator[str]:
    """lower < upper, and 1 lies within: equal log-probs must give a weight of 1 and keep everything."""
    mis = spec.mis
    pairs = (
        ("tis", mis.tis_level, mis.tis_lower_bound, mis.tis_upper_bound, mis.tis_mode is TisMode.truncate),
        ("rs", mis.rs_level, mis.rs_lower_bound, mis.rs_upper_bound, False),
    )
    for stage, level, lower, upper, only_upper in pairs:
        if upper is None or (lower is None and not only_upper):
            continue  # this stage is off
        low, high = f"mis.{stage}_lower_bound", f"mis.{stage}_upper_bound"
        good = _example(stage, level)
        if lower is not None and not lower < upper:
            yield wrong(low, lower, f"less than {high}={written(upper)}", good)
        elif lower is not None and lower > 1:
            yield wrong(low, lower, "<= 1, so that equal log-probs (a weight of 1) are kept as they are", good)
        elif upper < 1:
            yield wrong(high, upper, ">= 1, so that equal log-probs (a weight of 1) are kept as they are", good)


def _example(stage: str, level: Level) -> str:
    lower, upper = (0.999, 1.001) if level is Level.geometric else (0.5, 2)
    return f"mis.{stage}_lower_bound={lower} mis.{stage}_upper_bound={upper}"


def reach(spec: RunSpec) -> Iterator[str]:
    """A weight's safety clamp leaves room for its bounds; else they would never bite."""
    mis, clamp = spec.mis, spec.mis.log_ratio_clamp
    if clamp is None or mis.tis_mode not in (TisMode.truncate, TisMode.clip):
        return
    farthest = max(abs(math.log(b)) for b in (mis.tis_lower_bound or 1.0, mis.tis_upper_bound or 1.0))
    if farthest > clamp:
        allowed = f">= {farthest:.4g}, which the bounds of the weights reach, or null"
        yield wrong("mis.log_ratio_clamp", clamp, allowed, "mis.log_ratio_clamp=null")


def losses(spec: RunSpec) -> Iterator[str]:
    """What only some losses can do, and what needs whole groups."""
    loss, mis = spec.loss, spec.mis
    if loss.name is LossName.vespo and mis.tis_mode is not TisMode.off and mis.tis_level is not Level.token:
        allowed = "token with loss.name=vespo, which multiplies the weights of a response's tokens itself"
        yield wrong("mis.tis_level", mis.tis_level, allowed, "mis.tis_level=token")
    if loss.name is LossName.ppo_clip and loss.ratio_cap is not None and loss.ratio_cap < 1 + loss.clip_high:
        allowed = f">= {written(1 + loss.clip_high)}, the upper bound of loss.clip_high={written(loss.clip_high)}"
        yield wrong("loss.ratio_cap", loss.ratio_cap, allowed, f"loss.ratio_cap={written(2 * (1 + loss.clip_high))}")
    if loss.aggregate is Aggregate.group_mean and spec.optim.minibatches > 1:
        allowed = f"token_mean, sequence_mean, sequence_sum with optim.minibatches={spec.optim.minibatches}, which cut "
        allowed += "the groups that group_mean takes its mean over"
        yield wrong("loss.aggregate", loss.aggregate, allowed, "optim.minibatches=1 (or loss.aggregate=token_mean)")


def overlong(spec: RunSpec) -> Iterator[str]:
    """The reward falls over a last part of what a response may be long."""
    buffer, longest = spec.advantage.overlong_buffer, spec.rollout.max_tokens
    if spec.advantage.overlong is Overlong.punish and not 0 < buffer <= longest:
        allowed = f">= 1 and <= rollout.max_tokens={longest} with advantage.overlong=punish"
        mend = f"advantage.overlong_buffer={max(1, longest // 5)}"
        yield wrong("advantage.overlong_buffer", buffer, allowed, mend)


def shadow(spec: RunSpec) -> Iterator[str]:
    """Presets by name."""
    for name in spec.shadow:  # resolved: a list
        if name not in recipes():
            close = closest(written(name), recipes())
            yield wrong("shadow", name, "all, a preset, or a list of presets (python -m run --help names them)",
                        f"shadow={close}")  # fmt: skip


def policy(spec: RunSpec) -> Iterator[str]:
    """What the model needs, and which attention runs where."""
    chosen = spec.policy
    if chosen.kind is PolicyKind.hf and not chosen.path:
        yield wrong("policy.path", chosen.path, "a model folder or a hub name with policy=hf",
                    "policy.path=./my-model (or policy=smollm2)")  # fmt: skip
    elif chosen.kind is PolicyKind.hf and chosen.path and not is_model(chosen.path):
        yield wrong("policy.path", chosen.path, "a model folder that exists, or a hub name with policy=hf",
                    "policy.path=./my-model (or policy=smollm2)")  # fmt: skip
    if chosen.kind is PolicyKind.tiny and chosen.warmup_accuracy and spec.task.style is PromptStyle.chat:
        yield wrong("task.style", spec.task.style, "plain, few_shot with policy=tiny, which is warmed up on texts",
                    "task.style=plain (or policy=smollm2)")  # fmt: skip
    if chosen.attention is Attention.flash_attention_2:
        if chosen.device is Device.cpu:
            yield wrong("policy.attention", chosen.attention, "sdpa, eager on a CPU", "policy.attention=sdpa")
        elif chosen.dtype is Dtype.float32:
            yield wrong("policy.attention", chosen.attention, "sdpa, eager with policy.dtype=float32",
                        "policy.dtype=bfloat16 (or policy.attention=sdpa)")  # fmt: skip


def task(spec: RunSpec) -> Iterator[str]:
    """What each task needs to find its problems."""
    chosen, path = spec.task, spec.task.path
    if chosen.name is TaskName.jsonl:
        if not path or not is_file(path):
            allowed = f"a file {'that exists,' if path else 'of JSON lines'} with task=jsonl"
            yield wrong("task.path", path, allowed, "task.path=problems.jsonl")
        if chosen.eval_path is not None and not is_file(chosen.eval_path):
            yield wrong("task.eval_path", chosen.eval_path, "a file that exists, with task=jsonl, or null",
                        "task.eval_path=null")  # fmt: skip
    if chosen.name is TaskName.hf and (not path or not is_data(path)):
        allowed = "a dataset's folder or file that exists, or a hub name" if path else "a dataset's folder or name"
        yield wrong("task.path", path, f"{allowed} with task=hf", "task.path=openai/gsm8k")
    if chosen.name is TaskName.custom:
        if not _is_import_path(path):
            yield wrong("task.path", path, "package.module:name with task=custom", "task.path=my_package.task:make")
        elif path and not is_importable(path):
            allowed = "package.module:name of a package that is here or installed, with task=custom"
            yield wrong("task.path", path, allowed, "task.path=my_package.task:make")
    if chosen.name is TaskName.reasoning_gym and not chosen.generator:
        yield wrong("task.generator", chosen.generator, "the name of a generator with task=reasoning_gym",
                    "task.generator=basic_arithmetic")  # fmt: skip


def pattern(spec: RunSpec) -> Iterator[str]:
    """A pattern that compiles and has a group to compare."""
    given = spec.task.pattern
    fault = _fault(given) if given else ""
    if spec.task.match is Match.regex and fault is not None:
        why = fault and f" ({fault})"
        yield wrong("task.pattern", given, f"a regular expression with one group when task.match=regex{why}",
                    "'task.pattern=\"answer: (.*)\"' (or task.match=exact)")  # fmt: skip


def _fault(given: str) -> Optional[str]:
    try:
        return None if re.compile(given).groups else "no group"
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)


def _is_import_path(path: Optional[str]) -> bool:
    module, _, name = (path or "").partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def betas(spec: RunSpec) -> Iterator[str]:
    """AdamW takes two decay rates."""
    given = spec.optim.betas
    if len(given) != 2 or not all(0 <= b < 1 for b in given):
        yield wrong("optim.betas", given, "two numbers >= 0 and < 1", "optim.betas=[0.9,0.99]")


def vespo(spec: RunSpec) -> Iterator[str]:
    """An exponent and a rate for each sign of the advantage."""
    for key, given in (("positive", spec.loss.vespo_positive), ("negative", spec.loss.vespo_negative)):
        if len(given) != 2 or not all(0 < x < math.inf for x in given):
            good = written(options()[f"loss.vespo_{key}"].default)
            yield wrong(f"loss.vespo_{key}", given, "two numbers > 0, exponent and rate", f"loss.vespo_{key}={good}")


def resume(spec: RunSpec) -> Iterator[str]:
    """A word, or a folder that is there."""
    if spec.resume not in ("no", "auto") and not os.path.isdir(os.path.expanduser(spec.resume)):
        yield wrong("resume", spec.resume, "no, auto, or an existing run or checkpoint folder", "resume=auto")


# What each option may hold is judged as given, even where nothing reads it; agreement only where options are in force.
AS_GIVEN: tuple[Rule, ...] = (betas, vespo, full_support, batches, resume)
IN_FORCE: tuple[Rule, ...] = (
    shadow, numerator, bounds, reach, rejection, losses, overlong, *ROLLOUT, policy, task, pattern,
)  # fmt: skip


def check(spec: RunSpec, without: Sequence[Rule] = ()) -> None:
    """Raise ConfigError with one line for each violation; a value that is refused by itself is not told again.

    ``without``: rules to leave out.
    """
    refused = dict([*ranges(spec), *texts(spec)])
    sane = with_values(spec, {key: options()[key].default for key in refused})
    resolved = resolve(sane)
    found = [line for rule in AS_GIVEN if rule not in without for line in rule(sane)]
    found += [line for rule in IN_FORCE if rule not in without for line in rule(resolved)]
    lines = [*refused.values(), *(line for line in found if not _speaks_of(line, refused))]
    if lines:
        raise ConfigError("\n".join(lines))


def _speaks_of(line: str, keys: Iterable[str]) -> bool:
    judged = line.partition("; for example")[0]
    return any(re.search(rf"(?<![\w.]){re.escape(key)}=", judged) for key in keys)
