"""conf/: every choice composes, says what it means, and a wrong word is answered with the right ones."""

from __future__ import annotations

import itertools
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from trimtab.config import CONF, compose, compose_config, config_hash, explain, register, resolve, to_spec
from trimtab.config.groups import choices, group_names, recipes
from trimtab.config.help import groups_table, text
from trimtab.config.keys import options
from trimtab.config.preflight import combinations, composed
from trimtab.config.rejection import EXAMPLE
from trimtab.errors import ConfigError
from trimtab.spec import (
    Aggregate,
    Algo,
    Denominator,
    Engine,
    Level,
    OverTokens,
    Pair,
    RejectSpec,
    RejectTerms,
    RunSpec,
    Statistic,
    TisMode,
)


@pytest.fixture(scope="module", autouse=True)
def one_hydra() -> Iterator[None]:
    """Hydra set up once: composing is then twice as fast."""
    register()
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        yield


NEEDS = {
    "policy=hf": ["policy.path=some/model"],
    "rollout=replay": [f"rollout.path={Path(__file__).parent}"],
    "task=jsonl": [f"task.path={__file__}"],
    "task=hf": ["task.path=some/data"],
    "task=custom": ["task.path=json.decoder:c"],
    "task=reasoning_gym": ["task.generator=basic_arithmetic"],
    "task=arithmetic_chat": ["policy=smollm2"],
    "mismatch=logit_noise": ["rollout=transformers"],
}
CHOICES = [f"{group}={choice}" for group in group_names() if group != "preset" for choice in choices(group)]


def test_the_defaults_of_conf_are_the_defaults_of_spec() -> None:
    assert to_spec(compose_config([])) == RunSpec()


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes(choice: str) -> None:
    spec = compose([choice, *NEEDS.get(choice, [])])
    assert len(config_hash(spec)) == 16


def test_the_groups_are_those_of_the_contract() -> None:
    wanted = "algo tis_mode level rs veto loss advantage mismatch rollout policy task optim tracker preset debug"
    assert sorted(group_names()) == sorted([*wanted.split(), "sweep", "launcher"])


@pytest.mark.slow
@pytest.mark.parametrize("pair", list(itertools.combinations(("algo", "tis_mode", "level", "rs", "veto"), 2)), ids=str)
def test_every_pair_of_choices_composes(pair: tuple[str, str]) -> None:
    for first, second in itertools.product(*(choices(group) for group in pair)):
        spec = compose([f"{pair[0]}={first}", f"{pair[1]}={second}"])
        assert resolve(spec) == spec


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")) + sorted(CONF.glob("[sl]*/*.yaml")), ids=str)
def test_every_file_explains_itself(path: Path) -> None:
    assert "#" in path.read_text().replace("# @package", "")


@pytest.mark.parametrize("path", sorted(CONF.glob("*/*.yaml")), ids=str)
def test_no_choice_looks_like_a_number_or_a_truth(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.stem), str) or path.stem == "off"


@pytest.mark.parametrize(
    ("group", "keys"),
    [
        ("level=geometric", ["mis.tis_level=geometric"]),
        ("tis_mode=off", ["mis.tis_mode=off"]),
        ("rs=sequence", ["mis.use_rs=true", "mis.rs_level=sequence"]),
        ("veto=at_1e-5", ["mis.rs_veto_threshold=1e-5"]),
        ("tis_mode=zero", ["mis.tis_mode=zero"]),
        ("algo=on_policy", ["algo.name=on_policy"]),
        ("algo=reinforce", ["algo.name=bypass", "loss.name=reinforce"]),
        (
            "loss=gspo",
            ["loss.ratio_level=sequence", "loss.aggregate=sequence_mean", "loss.clip_low=3e-4", "loss.clip_high=4e-4"],
        ),
        ("loss=luspo", ["loss.ratio_level=sequence", "loss.aggregate=sequence_sum", "loss.sum_constant=1"]),
        ("loss=dppo_kl", ["loss.name=dppo_kl", "loss.clip_low=0.05", "loss.clip_high=0.05", "loss.ratio_cap=20"]),
        ("loss=dapo", ["loss.clip_high=0.28"]),
    ],
)
def test_a_choice_means_the_same_as_its_keys(group: str, keys: list[str]) -> None:
    assert compose([group]) == compose(keys) != compose([])


def test_preset_miles_default_and_what_wins_over_it() -> None:
    mis = compose(["preset=miles/default"]).mis
    assert (mis.tis_mode, mis.tis_level, mis.tis_upper_bound, mis.tis_batch_normalize) == (
        TisMode.truncate, Level.token, 2.0, True,
    )  # fmt: skip
    assert (mis.use_rs, mis.rs_level, mis.rs_lower_bound, mis.rs_upper_bound, mis.rs_veto_threshold) == (
        True, Level.token, 0.5, 2.0, 1e-4,
    )  # fmt: skip
    changed = compose(
        ["tis_mode=mask", "preset=miles/default", "veto=none", "mis.tis_upper_bound=3", "loss.kl_coef=0.1"]
    )
    assert (changed.mis.tis_mode, changed.mis.tis_lower_bound, changed.mis.tis_upper_bound) == (TisMode.mask, 0.5, 3.0)
    assert changed.mis.rs_veto_threshold is None and changed.mis.rs_upper_bound == 3.0
    assert (changed.loss.denominator, changed.loss.reject_terms) == (Denominator.kept, RejectTerms.all)


def test_choices_that_choose_for_other_groups_give_way() -> None:
    assert compose(["debug=smoke"]).rollout.engine is Engine.transformers
    assert compose(["debug=smoke", "rollout=vllm"]).rollout.engine is Engine.vllm
    assert (
        compose(["policy=smollm2"]).task.stop == "\n"
        and compose(["policy=smollm2", "task=arithmetic"]).task.stop is None
    )


def test_metrics_only_goes_with_algo() -> None:
    spec = compose(["algo=bypass", "algo.metrics_only=true", "rs=token", "loss=dr_grpo"])
    assert (spec.algo.name, spec.algo.metrics_only, spec.loss.aggregate) == (Algo.bypass, True, Aggregate.sequence_sum)
    assert spec.loss.sum_constant == 8.0


WRONG = [
    ("level=geo", "level=geo is refused; allowed: geometric, sequence, token; for example level=geometric"),
    (
        "algo=ppo",
        "algo=ppo is refused; allowed: bypass, decoupled, on_policy, reinforce, standard; for example algo=on_policy",
    ),
    (
        "tis_mode=3",
        "tis_mode=3 is refused; allowed: clip, mask, off, truncate, unbounded, zero; for example tis_mode=clip",
    ),
    (
        "veto=1e-4",
        "veto=0.0001 is refused; allowed: at_1e-4, at_1e-5, at_1e-6, none; for example veto=at_1e-4 "
        "(any other number: mis.rs_veto_threshold=0.0001)",
    ),
    ("rs=null", "rs=null is refused; allowed: geometric, none, sequence, token; for example rs=none"),
    (
        "preset=pipelinerl",
        "preset=pipelinerl is refused; allowed: abeja, none, pipelinerl/conventions, pipelinerl/gspo, "
        "pipelinerl/ppo, pipelinerl/reinforce, areal/…, miles/…, nemo_rl/…, prime_rl/…, slime/…, trimtab/…, trl/…, "
        "verl/…; for example preset=pipelinerl/ppo",
    ),
    (
        "shadow=miles/defualt",
        "shadow=miles/defualt is refused; allowed: all, a preset, or a list of presets (python -m run --help names "
        "them); for example shadow=miles/default",
    ),
    ("shadow={a:1}", "shadow={a:1} is refused; allowed: all, a preset, or a list of presets; for example shadow=all"),
    (
        "shadow=a,b",
        "shadow=a,b: several values make a sweep; add -m to run all of them, or put [] around a list",
    ),
    (
        "mis.reject=3",
        "mis.reject=3 is refused; allowed: a list of rules such as "
        "{statistic:k3,level:sequence,over_tokens:mean,upper:0.01}; for example "
        "'mis.reject=[{statistic:k3,level:sequence,over_tokens:mean,upper:0.01}]'",
    ),
    (
        "mis.reject=[{statistic:k9,upper:1}]",
        "mis.reject: statistic=k9 is refused; allowed: ratio, k1, k2, k3, abs, mult_error, prob_diff; "
        "for example statistic=k3",
    ),
    (
        "mis.reject=[{over_tokens:men,upper:1}]",
        "mis.reject: over_tokens=men is refused; allowed: sum, mean, max, every or null; for example over_tokens=mean",
    ),
    (
        "mis.reject=[{uper:1}]",
        "mis.reject: uper is no part of a rule; did you mean upper? A rule has: statistic, level, over_tokens, lower, "
        "upper, inverse, clamp, sign, pair",
    ),
    (
        "mis.tis_level=tokens",
        "mis.tis_level=tokens is refused; allowed: token, sequence, geometric; for example mis.tis_level=token",
    ),
    ("steps=1e9", "steps=1000000000.0 is refused; allowed: a whole number; for example steps=300"),
    ("steps=1.5", "steps=1.5 is refused; allowed: a whole number; for example steps=300"),
    ("optim.lr=fast", "optim.lr=fast is refused; allowed: a number; for example optim.lr=0.0003"),
    ("mis.use_rs=maybe", "mis.use_rs=maybe is refused; allowed: true, false; for example mis.use_rs=false"),
    ("loss.dual_clip=x", "loss.dual_clip=x is refused; allowed: a number or null; for example loss.dual_clip=1.0"),
    (
        "optim.betas=0.9",
        "optim.betas=0.9 is refused; allowed: a list of numbers; for example optim.betas=[0.9,0.99]",
    ),
    (
        "task.options={a:1}",
        "task.options={a:1} is refused; allowed: +task.options.NAME=VALUE for each; for example +task.options.a=1",
    ),
    (
        "mis.tis_levl=token",
        "mis.tis_levl is no option; did you mean mis.tis_level or mis.rs_level or mis.tis_mode? mis has: tis_mode, "
        "tis_level, tis_lower_bound, tis_upper_bound, tis_batch_normalize, use_rs, rs_level, rs_lower_bound, "
        "rs_upper_bound, rs_veto_threshold, reject, m2_threshold, log_ratio_clamp, numerator",
    ),
    ("mis=token", "mis is a section, not an option; set its keys, such as mis.tis_mode=…"),
    (
        "level=token,geometric",
        "level=token,geometric: several values make a sweep; add -m to run all of them, or put [] around a list",
    ),
    (
        "steps",
        "steps: not an override (missing EQUAL at '<EOF>'); write KEY=VALUE, and quote what has spaces or brackets",
    ),
    (
        "+mis.extra=1",
        "mis.extra is no option (added with +?); allowed: tis_mode, tis_level, tis_lower_bound, tis_upper_bound, "
        "tis_batch_normalize, use_rs, rs_level, rs_lower_bound, rs_upper_bound, rs_veto_threshold, reject, "
        "m2_threshold, log_ratio_clamp, numerator; leave it out",
    ),
    ("~steps", "~steps: an option cannot be deleted; set a value, for example steps=300"),
    ("~mis.tis_mode", "~mis.tis_mode: an option cannot be deleted; set a value, for example mis.tis_mode=truncate"),
    ("~loss.dual_clip", "~loss.dual_clip: an option cannot be deleted; set a value, for example loss.dual_clip=null"),
    ("~mis", "~mis: a section cannot be deleted; set its keys, such as mis.tis_mode=…"),
    ("~algo", "~algo: a group cannot be deleted; set a choice, for example algo=decoupled"),
    ("~sweep", "~sweep: a group cannot be deleted; set a choice, for example sweep=null"),
    (
        "algo=[standard,bypass]",
        "algo=[standard,bypass] is refused; allowed: one of bypass, decoupled, on_policy, reinforce, standard; "
        "for a sweep: -m algo=standard,bypass",
    ),
    (
        "algo=[standard]",
        "algo=[standard] is refused; allowed: one of bypass, decoupled, on_policy, reinforce, standard; "
        "for example algo=standard",
    ),
    (
        "algo=[]",
        "algo=[] is refused; allowed: one of bypass, decoupled, on_policy, reinforce, standard; "
        "for example algo=decoupled",
    ),
    ("run_dir=/tmp/日本é", "run_dir=/tmp/日本é: its characters need quotes; write 'run_dir=\"/tmp/日本é\"'"),
    ("run_dir=/tmp/x=1", "run_dir=/tmp/x=1: its characters need quotes; write 'run_dir=\"/tmp/x=1\"'"),
    ("run_dir=it's", 'run_dir=it\'s: its characters need quotes; write "run_dir=\\"it\'s\\""'),
    ("run_dir=a[b", "run_dir=a[b: its characters need quotes; write 'run_dir=\"a[b\"'"),
]


@pytest.mark.parametrize("group", sorted(group_names()))
def test_no_group_takes_a_list(group: str) -> None:
    first = choices(group)[0]
    with pytest.raises(ConfigError, match=rf"^{group}=\[{first},{first}\] is refused; allowed: one of "):
        compose([f"{group}=[{first},{first}]"])


def test_a_rejection_rule_is_typed_as_the_messages_show_it() -> None:
    words = shlex.split(EXAMPLE)
    assert compose(words).mis.reject == [
        RejectSpec(Statistic.k3, Level.sequence, OverTokens.mean, upper=0.01, pair=Pair.proximal_rollout)
    ]
    assert compose(["preset=verl/decoupled_geo_rs", "mis.reject=[]"]).mis.reject == []
    assert compose(["preset=prime_rl/dppo", *words]).mis.reject == [
        RejectSpec(Statistic.k3, Level.sequence, OverTokens.mean, upper=0.01, pair=Pair.current_rollout)
    ]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("all", recipes()),
        ("[all]", recipes()),
        ("miles/default", ("miles/default",)),
        ("[verl/disabled,miles/default,verl/disabled]", ("verl/disabled", "miles/default")),
        ("[]", ()),
    ],
)
def test_shadow_is_a_list_of_presets(given: str, shown: tuple[str, ...]) -> None:
    assert compose([f"shadow={given}"]).shadow == list(shown)


def test_options_that_are_lists_stay_lists_and_what_was_added_may_go() -> None:
    needs = ["task=custom", "task.path=json.decoder:c"]
    spec = compose([*needs, "+task.options.a=[1,2.0]", "optim.betas=[0.9,0.95]", "tracker.tags=[x,y]"])
    assert (spec.task.options, spec.optim.betas) == ({"a": [1, 2.0]}, [0.9, 0.95])
    assert compose([*needs, "+task.options.a=1", "~task.options.a"]).task.options == {}


@pytest.mark.parametrize(
    "value", ["/tmp/日本é", "it's", "/tmp/x=1", "a[b", 'say "it"', "$x it's", "back\\it's", "both\"it's"]
)
def test_the_quoted_form_works_in_a_shell(value: str) -> None:
    shown = explain(ValueError("no"), [f"run_dir={value}"]).rpartition("; write ")[2]
    done = subprocess.run(["sh", "-c", f"printf %s {shown}"], capture_output=True, text=True, check=True)
    assert compose([done.stdout]).run_dir == value


@pytest.mark.parametrize(("override", "message"), WRONG)
def test_a_wrong_word_is_answered_with_the_right_ones(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("override", "start"), [("levl=token", "level"), ("lr=1", "optim.lr"), ("top_p=1", "rollout.top_p")]
)
def test_a_key_without_its_section_is_found(override: str, start: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"is no option and no group; did you mean .*{start}.*\? Options: seed, steps"
    ):
        compose([override])


def test_every_wrong_override_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["steps=x", "level=geo", "seed=1"])
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["steps=x", "level=geo"]


def test_a_fault_that_no_override_has_keeps_its_own_words() -> None:
    assert explain(ValueError("a yaml file is broken"), ["seed=1"]) == "a yaml file is broken"


def test_help_names_every_group_and_choice() -> None:
    shown = text().split()
    assert all(line.rstrip() == line and len(line) <= 120 for line in groups_table().splitlines())
    for group in group_names():
        assert group in shown
        for choice in choices(group):
            assert choice in shown or f"{choice}*" in shown
    assert "mis.rs_veto_threshold" in shown and options()["optim.lr"].help in text()


def test_the_combinations_of_a_sweep() -> None:
    runs = combinations({"level": "token,sequence"}, ["seed=0,1", "steps=3"])
    assert runs == [[f"level={lv}", f"seed={s}", "steps=3"] for lv in ("token", "sequence") for s in (0, 1)]
    runs = combinations({"level": "token,sequence"}, ["level=geometric"])
    assert runs == [["level=geometric"]]


@pytest.mark.parametrize("study", choices("sweep"))
def test_every_study_can_start(study: str) -> None:
    sweeper = yaml.safe_load((CONF / "sweep" / f"{study}.yaml").read_text())["hydra"]["sweeper"]
    params = sweeper["params"]
    if study.startswith("optuna"):  # its sweeper chooses within intervals: their ends
        params = {key: value.removeprefix("interval(").rstrip(")") for key, value in params.items()}
    runs = combinations(params, [f"sweep={study}", "seed=0"], sweeper.get("points"))
    assert len(runs) > 1 and composed(runs).faults == []


def test_every_bad_combination_is_told_and_shared_folders_too() -> None:
    runs = [["level=token"], ["level=geo"], ["rollout.batch_size=9"], ["run_dir=a"], ["run_dir=a", "seed=1"]]
    assert [line.partition(": ")[0] for line in composed(runs).faults] == [
        "level=geo", "rollout.batch_size=9", "run_dir=a seed=1",
    ]  # fmt: skip
