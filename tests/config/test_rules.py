"""Each rule: what was given, what is allowed, and an override that really mends it."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from trimtab.config import check, from_dict, to_dict
from trimtab.config.keys import options, with_values
from trimtab.config.rules import RANGES
from trimtab.errors import ConfigError
from trimtab.spec import RunSpec


def spec_of(*overrides: str) -> RunSpec:
    """A spec from dotted overrides, without Hydra."""
    return from_dict(OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides))))  # type: ignore[arg-type]


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(spec_of(*overrides))
    return str(caught.value).splitlines()


CASES = [
    (["steps=0"], "steps=0 is refused; allowed: >= 1; for example steps=300"),
    (["seed=-1"], "seed=-1 is refused; allowed: >= 0 and <= 4294967295; for example seed=0"),
    (["optim.lr=0"], "optim.lr=0 is refused; allowed: > 0; for example optim.lr=0.0003"),
    (["checkpoint.keep=1"], "checkpoint.keep=1 is refused; allowed: >= 2; for example checkpoint.keep=2"),
    (
        ["mis.rs_veto_threshold=1.0"],
        "mis.rs_veto_threshold=1 is refused; allowed: > 0 and < 1; for example mis.rs_veto_threshold=0.0001",
    ),
    (["loss.dual_clip=1"], "loss.dual_clip=1 is refused; allowed: > 1; for example loss.dual_clip=3"),
    (["loss.clip_low=1.5"], "loss.clip_low=1.5 is refused; allowed: > 0 and <= 1; for example loss.clip_low=0.2"),
    (["loss.clip_high=0"], "loss.clip_high=0 is refused; allowed: > 0; for example loss.clip_high=0.2"),
    (["rollout.temperature=0"], "rollout.temperature=0 is refused; allowed: > 0; for example rollout.temperature=1"),
    (
        ["mis.tis_mode=clip", "mis.tis_lower_bound=2", "mis.tis_upper_bound=2"],
        "mis.tis_lower_bound=2 is refused; allowed: less than mis.tis_upper_bound=2; "
        "for example mis.tis_lower_bound=0.5 mis.tis_upper_bound=2",
    ),
    (
        ["mis.use_rs=true", "mis.rs_level=geometric", "mis.rs_lower_bound=3"],
        "mis.rs_lower_bound=3 is refused; allowed: less than mis.rs_upper_bound=1.001; "
        "for example mis.rs_lower_bound=0.999 mis.rs_upper_bound=1.001",
    ),
    (
        ["mis.tis_upper_bound=0.5"],
        "mis.tis_upper_bound=0.5 is refused; allowed: >= 1, so that equal log-probs (a weight of 1) are kept as they "
        "are; for example mis.tis_lower_bound=0.5 mis.tis_upper_bound=2",
    ),
    (
        ["mis.use_rs=true", "mis.rs_lower_bound=1.5", "mis.rs_upper_bound=3"],
        "mis.rs_lower_bound=1.5 is refused; allowed: <= 1, so that equal log-probs (a weight of 1) are kept as they "
        "are; for example mis.rs_lower_bound=0.5 mis.rs_upper_bound=2",
    ),
    (
        ["algo.name=bypass", "mis.numerator=proximal"],
        "mis.numerator=proximal is refused; allowed: current with algo=bypass, which skips the forward that scores the "
        "proximal policy; for example mis.numerator=current (or algo=decoupled)",
    ),
    (
        ["mis.numerator=current"],
        "mis.numerator=current is refused; allowed: proximal with algo=decoupled, whose PPO ratio covers "
        "current/proximal already; for example mis.numerator=proximal (or algo=reinforce)",
    ),
    (
        ["rollout.logprobs_mode=raw", "rollout.temperature=0.7"],
        "rollout.logprobs_mode=raw is refused; allowed: processed at rollout.temperature=0.7, or raw at "
        "rollout.temperature=1; for example rollout.logprobs_mode=processed",
    ),
    (
        ["rollout.top_p=0.9"],
        "rollout.top_p=0.9 is refused; allowed: 1 while the trainer scores the full vocabulary; "
        "for example rollout.top_p=1",
    ),
    (
        ["rollout.top_k=20"],
        "rollout.top_k=20 is refused; allowed: 0 (off) while the trainer scores the full vocabulary; "
        "for example rollout.top_k=0",
    ),
    (
        ["rollout.batch_size=100", "rollout.group_size=8"],
        "rollout.batch_size=100 is refused; allowed: multiples of rollout.group_size=8; "
        "for example rollout.batch_size=104",
    ),
    (
        ["optim.minibatches=5"],
        "optim.minibatches=5 is refused; allowed: divisors of rollout.batch_size=128; for example optim.minibatches=4",
    ),
    (
        ["rollout.group_size=1"],
        "rollout.group_size=1 is refused; allowed: >= 2 with advantage.baseline=group_mean, whose advantages would all "
        "be 0; for example rollout.group_size=8",
    ),
    (
        ["mismatch.kind=logit_noise", "mismatch.strength=0.1"],
        "mismatch.kind=logit_noise is refused; allowed: none with rollout=vllm; only rollout=transformers samples from "
        "noisy logits; for example rollout=transformers (or mismatch=none)",
    ),
    (
        ["rollout.max_tokens=256"],
        "rollout.max_tokens=256 is refused; allowed: less than rollout.max_model_len=256, which holds the prompt too; "
        "for example rollout.max_model_len=640",
    ),
    (
        ["rollout.engine=replay"],
        "rollout.path=null is refused; allowed: a run folder, or one of Parquet files, with rollout=replay; "
        "for example rollout.path=runs/NAME",
    ),
    (
        ["policy.kind=hf"],
        "policy.path=null is refused; allowed: a model folder or a hub name with policy=hf; "
        "for example policy.path=./my-model (or policy=smollm2)",
    ),
    (
        ["task.style=chat"],
        "task.style=chat is refused; allowed: plain, few_shot with policy=tiny, which is warmed up on texts; "
        "for example task.style=plain (or policy=smollm2)",
    ),
    (
        ["policy.attention=flash_attention_2", "policy.device=cpu"],
        "policy.attention=flash_attention_2 is refused; allowed: sdpa, eager on a CPU; "
        "for example policy.attention=sdpa",
    ),
    (
        ["policy.attention=flash_attention_2"],
        "policy.attention=flash_attention_2 is refused; allowed: sdpa, eager with policy.dtype=float32; "
        "for example policy.dtype=bfloat16 (or policy.attention=sdpa)",
    ),
    (
        ["task.name=jsonl"],
        "task.path=null is refused; allowed: a file of JSON lines with task=jsonl; "
        "for example task.path=problems.jsonl",
    ),
    (
        ["task.name=custom", "task.path=my_task.py"],
        "task.path=my_task.py is refused; allowed: package.module:name with task=custom; "
        "for example task.path=my_package.task:make",
    ),
    (
        ["task.name=reasoning_gym"],
        "task.generator=null is refused; allowed: the name of a generator with task=reasoning_gym; "
        "for example task.generator=basic_arithmetic",
    ),
    (
        ["task.name=jsonl", "task.path=x", "task.match=regex"],
        "task.pattern=null is refused; allowed: a regular expression with one group when task.match=regex; "
        "for example 'task.pattern=\"answer: (.*)\"' (or task.match=exact)",
    ),
    (
        ["optim.betas=[0.9]"],
        "optim.betas=[0.9] is refused; allowed: two numbers >= 0 and < 1; for example optim.betas=[0.9,0.99]",
    ),
    (
        ["resume=atuo"],
        "resume=atuo is refused; allowed: no, auto, or an existing run or checkpoint folder; for example resume=auto",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), CASES)
def test_the_message_and_its_mend(overrides: list[str], message: str) -> None:
    assert refused(*overrides) == [message]
    mend = re.sub(r" \(or .*\)$", "", message.rpartition("for example ")[2])
    keys = {"rollout": "rollout.engine", "task": "task.name"}  # a group's choice is a key for from_dict
    mended = [f"{keys.get(k, k)}={v}" for k, _, v in (m.partition("=") for m in shlex.split(mend))]
    check(spec_of(*overrides, *mended))


def test_a_bound_on_policy_hf_and_its_alternative() -> None:
    check(spec_of("policy.kind=hf", "policy.path=some/model", "task.style=chat"))
    check(spec_of("rollout.group_size=1", "rollout.batch_size=8", "advantage.baseline=none"))
    check(spec_of("rollout.logprobs_mode=raw"))


@pytest.mark.parametrize("key", RANGES)
def test_nan_and_infinity_are_never_in_range(key: str) -> None:
    if options()[key].type is not float:
        return
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ConfigError, match=re.escape(key)):
            check(with_values(RunSpec(), {key: value}))


def test_every_number_has_a_range() -> None:
    numbers = [key for key, option in options().items() if option.type in (int, float)]
    assert sorted(set(numbers) - set(RANGES)) == ["rollout.top_k", "rollout.top_p"]  # full_support has these


def test_every_default_is_in_range_and_every_example_mends() -> None:
    check(RunSpec())
    for key, allowed in RANGES.items():
        value: Any = allowed.example or options()[key].default
        assert value in allowed, key


def test_all_violations_are_told_together() -> None:
    lines = refused("steps=0", "rollout.top_p=0.5", "rollout.batch_size=9", "policy.kind=hf", "mis.numerator=current")
    assert [line.partition("=")[0] for line in lines] == [
        "steps", "rollout.top_p", "rollout.batch_size", "mis.numerator", "policy.path",
    ]  # fmt: skip


def test_an_option_that_is_not_in_force_agrees_with_everything() -> None:
    check(spec_of("algo.name=standard", "mis.numerator=current", "mis.tis_upper_bound=0.5"))
    check(spec_of("policy.kind=tiny", "task.name=custom", "task.path=a.b:c", "task.style=chat"))


def test_an_existing_folder_may_be_resumed(tmp_path: Path) -> None:
    check(with_values(RunSpec(), {"resume": str(tmp_path)}))


def test_the_spec_is_checked_not_changed() -> None:
    spec = spec_of("algo.name=standard")
    before = to_dict(spec)
    check(spec)
    assert to_dict(spec) == before
