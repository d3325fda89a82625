"""Each rule: what was given, what is allowed, and an override that really mends it."""

from __future__ import annotations

import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from trimtab.config import check, from_dict, to_dict
from trimtab.config.keys import options, with_values
from trimtab.config.ranges import RANGES
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
    (["steps=0"], "steps=0 is refused; allowed: >= 1 and <= 1000000000; for example steps=300"),
    (["seed=-1"], "seed=-1 is refused; allowed: >= 0 and <= 4294967295; for example seed=0"),
    (["optim.lr=0"], "optim.lr=0 is refused; allowed: > 0; for example optim.lr=0.0003"),
    (
        ["checkpoint.keep=1"],
        "checkpoint.keep=1 is refused; allowed: >= 2 and <= 1000000000; for example checkpoint.keep=2",
    ),
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
        "current/proximal already; for example mis.numerator=proximal (or algo=on_policy)",
    ),
    (
        ["algo.name=on_policy", "mis.numerator=proximal"],
        "mis.numerator=proximal is refused; allowed: current with algo=on_policy, which skips the forward that scores "
        "the proximal policy; for example mis.numerator=current (or algo=decoupled)",
    ),
    (
        ["mis.tis_upper_bound=1e9"],
        "mis.log_ratio_clamp=20 is refused; allowed: >= 20.72, which the bounds of the weights reach, or null; "
        "for example mis.log_ratio_clamp=null",
    ),
    (
        ["mis.tis_mode=clip", "mis.tis_lower_bound=0.1", "mis.log_ratio_clamp=1"],
        "mis.log_ratio_clamp=1 is refused; allowed: >= 2.303, which the bounds of the weights reach, or null; "
        "for example mis.log_ratio_clamp=null",
    ),
    (
        ["mis.log_ratio_clamp=100"],
        "mis.log_ratio_clamp=100 is refused; allowed: > 0 and <= 80; for example mis.log_ratio_clamp=20",
    ),
    (["mis.m2_threshold=0"], "mis.m2_threshold=0 is refused; allowed: > 0; for example mis.m2_threshold=0.04"),
    (["loss.top_entropy=0"], "loss.top_entropy=0 is refused; allowed: > 0 and <= 1; for example loss.top_entropy=1"),
    (
        ["loss.ratio_cap=1.1"],
        "loss.ratio_cap=1.1 is refused; allowed: >= 1.2, the upper bound of loss.clip_high=0.2; "
        "for example loss.ratio_cap=2.4",
    ),
    (
        ["loss.vespo_positive=[1]"],
        "loss.vespo_positive=[1] is refused; allowed: two numbers > 0, exponent and rate; "
        "for example loss.vespo_positive=[2,3]",
    ),
    (
        ["loss.name=vespo", "mis.tis_level=sequence"],
        "mis.tis_level=sequence is refused; allowed: token with loss.name=vespo, which multiplies the weights of a "
        "response's tokens itself; for example mis.tis_level=token",
    ),
    (
        ["loss.aggregate=group_mean", "optim.minibatches=2"],
        "loss.aggregate=group_mean is refused; allowed: token_mean, sequence_mean, sequence_sum with "
        "optim.minibatches=2, which cut the groups that group_mean takes its mean over; for example "
        "optim.minibatches=1 (or loss.aggregate=token_mean)",
    ),
    *(
        (
            ["advantage.overlong=punish", f"advantage.overlong_buffer={buffer}", "rollout.max_tokens=10"],
            f"advantage.overlong_buffer={buffer} is refused; allowed: >= 1 and <= rollout.max_tokens=10 with "
            "advantage.overlong=punish; for example advantage.overlong_buffer=2",
        )
        for buffer in (0, 11)
    ),
    (
        ["shadow=[verl/bypass_pg]"],
        "shadow=verl/bypass_pg is refused; allowed: all, a preset, or a list of presets (python -m run --help names "
        "them); for example shadow=verl/bypass_pg_is",
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
        "mismatch.kind=logit_noise is refused; allowed: none with rollout=vllm; only rollout=transformers can make "
        "this gap; for example rollout=transformers (or mismatch=none)",
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
        ["rollout.batch_size=1000000000000", "optim.minibatches=4"],
        "rollout.batch_size=1000000000000 is refused; allowed: >= 1 and <= 1000000000; "
        "for example rollout.batch_size=128",
    ),
    (
        ["rollout.batch_size=999999937", "rollout.group_size=999999937", "optim.minibatches=600000000"],  # a prime
        "optim.minibatches=600000000 is refused; allowed: divisors of rollout.batch_size=999999937; "
        "for example optim.minibatches=999999937",
    ),
    (
        ["rollout.batch_size=999999999", "rollout.group_size=7"],
        "rollout.batch_size=999999999 is refused; allowed: multiples of rollout.group_size=7; "
        "for example rollout.batch_size=999999994",
    ),
    (
        ["rollout.max_model_len=9000000", "rollout.max_tokens=9000000"],
        "rollout.max_tokens=9000000 is refused; allowed: less than rollout.max_model_len=9000000, which holds the "
        "prompt too; for example rollout.max_tokens=4500000",
    ),
    (
        ["loss.entropy_coef=nan"],
        "loss.entropy_coef=nan is refused; allowed: a finite number; for example loss.entropy_coef=0",
    ),
    (["optim.lr=inf"], "optim.lr=inf is refused; allowed: a finite number > 0; for example optim.lr=0.0003"),
    (
        ["mis.tis_upper_bound=-1"],
        "mis.tis_upper_bound=-1 is refused; allowed: > 0; for example mis.tis_upper_bound=2",
    ),
    (
        ["mis.tis_upper_bound=-1", "mis.use_rs=true"],
        "mis.tis_upper_bound=-1 is refused; allowed: > 0; for example mis.tis_upper_bound=2",
    ),
    (
        ["rollout.engine=replay", "rollout.path=runs/gone"],
        "rollout.path=runs/gone is refused; allowed: a run folder, or one of Parquet files, that exists, with "
        "rollout=replay; for example rollout.path=runs/NAME",
    ),
    *(
        (
            ["policy.kind=hf", f"policy.path={path}"],
            f"policy.path={path} is refused; allowed: a model folder that exists, or a hub name with policy=hf; "
            "for example policy.path=./my-model (or policy=smollm2)",
        )
        for path in ("./gone", "../gone", "/gone", "~/gone", "a/b/gone", "./problems.jsonl")
    ),
    (
        ["task.name=jsonl", "task.path=gone.jsonl"],
        "task.path=gone.jsonl is refused; allowed: a file that exists, with task=jsonl; "
        "for example task.path=problems.jsonl",
    ),
    (
        ["task.name=jsonl", "task.path=x", "task.eval_path=gone.jsonl"],
        "task.eval_path=gone.jsonl is refused; allowed: a file that exists, with task=jsonl, or null; "
        "for example task.eval_path=null",
    ),
    (
        ["task.name=hf", "task.path=./gone"],
        "task.path=./gone is refused; allowed: a dataset's folder or file that exists, or a hub name with task=hf; "
        "for example task.path=openai/gsm8k",
    ),
    (
        ["task.name=custom", "task.path=no_such_module.task:make"],
        "task.path=no_such_module.task:make is refused; allowed: package.module:name of a package that is here or "
        "installed, with task=custom; for example task.path=my_package.task:make",
    ),
    (
        ["task.name=jsonl", "task.path=x", "task.match=regex", "task.pattern=(a"],
        "task.pattern=(a is refused; allowed: a regular expression with one group when task.match=regex (missing ), "
        "unterminated subpattern at position 0); for example 'task.pattern=\"answer: (.*)\"' (or task.match=exact)",
    ),
    (
        ["task.name=jsonl", "task.path=x", "task.match=regex", "task.pattern=a"],
        "task.pattern=a is refused; allowed: a regular expression with one group when task.match=regex (no group); "
        "for example 'task.pattern=\"answer: (.*)\"' (or task.match=exact)",
    ),
    (
        ["resume=atuo"],
        "resume=atuo is refused; allowed: no, auto, or an existing run or checkpoint folder; for example resume=auto",
    ),
]


MEND = "for example 'mis.reject=[{statistic:k3,level:sequence,over_tokens:mean,upper:0.01}]'"
RULES = [
    ((), "{over_tokens:mean}", "a rule with lower, upper or both"),
    ((), "{over_tokens:mean,upper:0.5}", "lower <= 1 <= upper, so that equal log-probs are kept"),
    ((), "{statistic:k3,over_tokens:mean,upper:-1}", "lower <= 0 <= upper, so that equal log-probs are kept"),
    ((), "{statistic:k1,over_tokens:mean,lower:0.1}", "lower <= 0 <= upper, so that equal log-probs are kept"),
    ((), "{over_tokens:mean,upper:2,clamp:0}", "clamp > 0, or null"),
    ((), "{level:token,over_tokens:mean,upper:2}", "over_tokens=null with level=token"),
    ((), "{upper:2}", "over_tokens=sum, mean, max or every with level=sequence"),
    (
        (),
        "{level:geometric,upper:2}",
        "level=token or level=sequence; a geometric mean is level=sequence with over_tokens=mean",
    ),
    ((), "{statistic:k2,over_tokens:mean,lower:0,upper:1}", "lower=null with statistic=k2, which is never below 0"),
    (
        (),
        "{statistic:mult_error,over_tokens:mean,lower:1,upper:2}",
        "lower=null with statistic=mult_error, which is never below 1",
    ),
    (
        (),
        "{statistic:abs,over_tokens:mean,upper:1,inverse:true}",
        "inverse=false with statistic=abs, which is the same for d and -d",
    ),
    (
        (),
        "{statistic:prob_diff,level:token,upper:0.2,clamp:20}",
        "clamp=null with statistic=prob_diff, which is of no log-ratio",
    ),
    *(
        (
            (f"algo.name={algo}",),
            f"{{over_tokens:mean,upper:2,pair:{pair}}}",
            f"pair=current_rollout or null with algo={algo}, which scores no proximal policy",
        )
        for algo in ("bypass", "on_policy")
        for pair in ("proximal_rollout", "current_proximal")
    ),
]


@pytest.mark.parametrize(("others", "given", "allowed"), RULES)
def test_the_message_of_a_rejection_rule_and_its_mend(others: tuple[str, ...], given: str, allowed: str) -> None:
    (line,) = refused_spec(with_rule(spec_of(*others), given))
    assert line.startswith("mis.reject=[{") and line.endswith(f"is refused; allowed: {allowed}; {MEND}")
    check(with_rule(spec_of(*others), "{statistic:k3,level:sequence,over_tokens:mean,upper:0.01}"))


GOOD = [
    "{over_tokens:mean,lower:0.999,upper:1.001,inverse:true,clamp:20}",
    "{over_tokens:every,lower:0.01,upper:100,pair:current_proximal}",
    "{over_tokens:sum,lower:0,upper:2}",
    "{statistic:k3,level:token,upper:0.1,inverse:true}",
    "{statistic:k1,over_tokens:mean,lower:-0.0001,sign:negative,pair:current_rollout}",
    "{statistic:prob_diff,level:token,lower:-0.2,sign:nonpositive}",
    "{statistic:mult_error,over_tokens:mean,upper:1.0}",
]


@pytest.mark.parametrize("given", GOOD)
@pytest.mark.parametrize("others", [(), ("algo.proximal=loglinear",), ("algo.metrics_only=true",)], ids=str)
def test_rules_that_are_accepted(given: str, others: tuple[str, ...]) -> None:
    check(with_rule(spec_of(*others), given))


def test_standard_judges_no_rule() -> None:
    check(with_rule(spec_of("algo.name=standard"), "{upper:0.5}"))


def with_rule(spec: RunSpec, given: str) -> RunSpec:
    """With one rule, written as in an override."""
    rule = {name: yaml.safe_load(value) for name, value in (part.split(":") for part in given.strip("{}").split(","))}
    return from_dict(to_dict(spec) | {"mis": to_dict(spec)["mis"] | {"reject": [rule]}})


def refused_spec(spec: RunSpec) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(spec)
    return str(caught.value).splitlines()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds what the examples of messages name."""
    for folder in ("runs/NAME", "my-model", "my_package"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("problems.jsonl", "x"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("here")
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
    assert sorted(set(numbers) - set(RANGES)) == []


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


TEXTS = [key for key, option in options().items() if option.type is str]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("key", sorted({*TEXTS} - {"run_dir", "task.system"}))
@pytest.mark.parametrize("base", [(), ("task.name=jsonl",), ("task.name=custom",), ("rollout.engine=replay",)], ids=str)
def test_an_empty_text_is_refused(key: str, base: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(with_values(spec_of(*base), {key: ""}))
    (line,) = [found for found in str(caught.value).splitlines() if found.startswith(key)]
    option = options()[key]
    if option.optional:
        assert line == f"{key}='' is refused; allowed: a text that is not empty, or null; for example {key}=null"
    else:
        assert line == f"{key}='' is refused; allowed: a text that is not empty; for example {key}={option.default}"


def test_texts_that_may_be_empty_or_blank() -> None:
    check(with_values(RunSpec(), {"run_dir": "", "task.system": ""}))
    check(with_values(RunSpec(), {"task.stop": " "}))
    for key in ("run_dir", "policy.path", "resume", "tracker.project"):
        with pytest.raises(ConfigError, match=f"{key}='  ' is refused"):
            check(with_values(RunSpec(), {key: "  "}))


def test_every_whole_number_has_an_upper_bound_that_is_told_fast() -> None:
    for key, allowed in RANGES.items():
        if options()[key].type is int:
            for value in (int(allowed.high) + 1, 10**400):
                with pytest.raises(ConfigError) as caught:
                    check(with_values(RunSpec(), {key: value}))
                (line,) = str(caught.value).splitlines()
                assert line.startswith(f"{key}={value} is refused; allowed: {allowed}; for example {key}=")


def test_a_value_out_of_range_is_told_once(here: Path) -> None:
    lines = refused("rollout.max_tokens=-5", "rollout.max_model_len=4", "optim.minibatches=5", "rollout.batch_size=0")
    assert [line.partition("=")[0] for line in lines] == ["rollout.batch_size", "rollout.max_tokens"]
    lines = refused("rollout.temperature=nan", "rollout.logprobs_mode=raw")
    assert [line.partition("=")[0] for line in lines] == ["rollout.temperature"]


def test_a_module_already_imported_or_in_the_standard_library_is_found(here: Path) -> None:
    (here / "single.py").touch()
    for path in ("json:loads", "single:make", "sys:exit", "pytest:main"):
        check(spec_of("task.name=custom", f"task.path={path}"))
    assert "single" not in sys.modules


def test_an_option_that_is_not_in_force_agrees_with_everything() -> None:
    check(spec_of("algo.name=standard", "mis.numerator=current", "mis.tis_upper_bound=0.5"))
    check(spec_of("policy.kind=tiny", "task.name=custom", "task.path=json.decoder:c", "task.style=chat"))


def test_an_existing_folder_may_be_resumed(tmp_path: Path) -> None:
    check(with_values(RunSpec(), {"resume": str(tmp_path)}))


def test_the_spec_is_checked_not_changed() -> None:
    spec = spec_of("algo.name=standard")
    before = to_dict(spec)
    check(spec)
    assert to_dict(spec) == before
