"""conf/preset: what each recipe of each system resolves to, told three ways: by hand, by the golden file, by Hydra."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from goldens.presets import table
from hydra.core.global_hydra import GlobalHydra

from trimtab.config import CONF, compose, compose_config, ignored, methods, prepare, recipes, register, to_spec
from trimtab.config.groups import choices
from trimtab.errors import ConfigError
from trimtab.spec import (
    AdvantageKl,
    Aggregate,
    Algo,
    Denominator,
    KlEstimator,
    KlImportance,
    Level,
    LossName,
    MethodSpec,
    MisSpec,
    OverTokens,
    Pair,
    Proximal,
    RatioLevel,
    RejectSpec,
    RejectTerms,
    RolloutSpec,
    RunSpec,
    Sign,
    Statistic,
    TisMode,
)


@pytest.fixture(scope="module", autouse=True)
def one_hydra() -> Iterator[None]:
    register()
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@pytest.fixture(scope="module")
def all_methods() -> Mapping[str, MethodSpec]:
    return methods(recipes(), RunSpec())


# -- the ways to a method agree --------------------------------------------------------------------------------------


# One of each shape in every run of the suite; the rest, at a fifth of a second each, where slow tests run.
SHAPES = (
    "none", "slime/conventions", "miles/default", "areal/loglinear", "nemo_rl/force_on_policy", "pipelinerl/reinforce",
    "prime_rl/dppo", "trl/off_policy_mask", "verl/decoupled_seq_is_rs", "trimtab/unbiased",
)  # fmt: skip
NAMES = [pytest.param(name, marks=() if name in SHAPES else pytest.mark.slow) for name in choices("preset")]


@pytest.mark.parametrize("name", NAMES)
def test_composed_without_hydra_as_with_it(name: str, all_methods: Mapping[str, MethodSpec]) -> None:
    typed = [f"preset={name}"]
    config = compose_config(typed)
    spec = prepare(config, typed)
    if name in recipes():
        assert all_methods[name] == MethodSpec(spec.algo, spec.mis, spec.loss)
    assert ignored(to_spec(config), typed) == []


def test_a_hundred_methods_in_a_second() -> None:
    methods(recipes(), RunSpec())  # read the files once
    best = math.inf
    for _ in range(3):
        start = time.process_time()
        methods(recipes(), RunSpec())
        best = min(best, time.process_time() - start)
    assert len(recipes()) > 70 and best < 1.0


def test_only_the_runs_longest_response_reaches_a_method() -> None:
    spec = RunSpec(rollout=RolloutSpec(max_tokens=77), mis=MisSpec(tis_mode=TisMode.mask))
    loss = methods(["trimtab/unbiased"], spec)["trimtab/unbiased"].loss
    assert (loss.aggregate, loss.sum_constant) == (Aggregate.sequence_sum, 77.0)
    assert methods(["verl/disabled"], spec) == methods(["verl/disabled"], RunSpec())


@pytest.mark.parametrize("name", ["none", "miles/conventions", "miles/defualt"])
def test_what_is_no_recipe_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"there is no preset {name}; did you mean \w+/\w+\?"):
        methods([name], RunSpec())


def test_the_golden_file() -> None:
    held = json.loads((Path(__file__).parents[1] / "goldens" / "presets.json").read_text())
    now = table()
    assert sorted(held) == sorted(now) == sorted(recipes())
    assert [name for name in now if now[name] != held[name]] == [], "see tests/goldens/presets.py"


@pytest.mark.parametrize("path", sorted((CONF / "preset").rglob("*.yaml")), ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_file_says_whose_it_is_and_states_its_groups(path: Path) -> None:
    package, said, *_ = text = path.read_text().splitlines()
    assert package == "# @package _global_" and said.startswith("# ") and all(len(line) <= 120 for line in text)
    family, entries = path.parent.name, yaml.safe_load(path.read_text()).get("defaults", [])
    if family == "preset" or path.stem == "conventions":
        return
    stated = [key for entry in entries if isinstance(entry, dict) for key in entry]
    assert stated == [f"override /{group}" for group in ("algo", "tis_mode", "level", "rs", "veto")]
    assert family == "trimtab" or entries[0] == f"/preset/{family}/conventions"


def test_each_convention_cites_its_source_at_a_commit() -> None:
    cited = {
        "verl": "verl-project/verl at 1dda039b", "miles": "radixark/miles at 31f1ca96",
        "slime": "THUDM/slime at 624b824a", "nemo_rl": "NVIDIA-NeMo/RL at 7ea279ab",
        "trl": "huggingface/trl at f2cd5771", "areal": "inclusionAI/AReaL at 4aef98d8",
        "pipelinerl": "ServiceNow/PipelineRL at 58d39345", "prime_rl": "PrimeIntellect-ai/prime-rl at 559b4477",
    }  # fmt: skip
    for system, source in cited.items():
        text = (CONF / "preset" / system / "conventions.yaml").read_text().replace("\n# ", " ")
        assert source in text, system
    assert {name.partition("/")[0] for name in recipes()} == {*cited, "trimtab"}


# -- by hand, from what each system does -----------------------------------------------------------------------------

TWO, POP = (None, 2.0), (0.5, 5.0)
GEO, SUM = ("seq_mean_k1", 0.999, 1.001), ("seq_sum_k1", 0.5, 2.0)
K3 = ("seq_mean_k3", None, 0.01)
# RolloutCorrectionConfig: rollout_is, rollout_is_threshold, rollout_rs with its threshold, bypass_mode, loss_type
VERL: dict[str, tuple[str | None, tuple[float | None, float] | None, tuple[Any, ...] | None, bool, str]] = {
    "decoupled_token_is": ("token", TWO, None, False, "ppo_clip"),
    "decoupled_seq_is": ("sequence", TWO, None, False, "ppo_clip"),
    "decoupled_token_icepop": ("token", POP, None, False, "ppo_clip"),
    "decoupled_seq_is_rs": ("sequence", TWO, SUM, False, "ppo_clip"),
    "decoupled_geo_rs": (None, None, GEO, False, "ppo_clip"),
    "decoupled_geo_rs_seq_tis": ("sequence", TWO, GEO, False, "ppo_clip"),
    "decoupled_geo_rs_token_tis": ("token", TWO, GEO, False, "ppo_clip"),
    "decoupled_k3_rs": (None, None, K3, False, "ppo_clip"),
    "decoupled_k3_rs_seq_tis": ("sequence", TWO, K3, False, "ppo_clip"),
    "decoupled_k3_rs_token_tis": ("token", TWO, K3, False, "ppo_clip"),
    "bypass_ppo_clip": (None, None, None, True, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (None, None, GEO, True, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (None, None, K3, True, "ppo_clip"),
    "bypass_pg_is": ("sequence", TWO, None, True, "reinforce"),
    "bypass_pg_token_icepop": ("token", POP, None, True, "reinforce"),
    "bypass_pg_geo_rs": (None, None, GEO, True, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": ("sequence", TWO, GEO, True, "reinforce"),
    "bypass_pg_geo_rs_token_tis": ("token", TWO, GEO, True, "reinforce"),
    "disabled": (None, None, None, False, "ppo_clip"),
}


def test_verl_has_all_its_presets() -> None:
    assert sorted(f"verl/{name}" for name in VERL) == [name for name in recipes() if name.startswith("verl/")]
    assert len(VERL) == 19


@pytest.mark.parametrize("name", VERL)
def test_verl(name: str, all_methods: Mapping[str, MethodSpec]) -> None:
    weight, threshold, rejection, bypass, loss_type = VERL[name]
    method = all_methods[f"verl/{name}"]
    mis, loss = method.mis, method.loss
    corrects = weight is not None or rejection is not None
    decoupled = Algo.decoupled if corrects else Algo.standard
    assert method.algo.name is (Algo.bypass if bypass else decoupled) and not method.algo.metrics_only
    assert loss.name is LossName[loss_type]
    assert loss.dual_clip == (3.0 if loss_type == "ppo_clip" else None)
    assert (loss.clip_low, loss.clip_high, loss.kl_coef, loss.log_ratio_clamp) == (0.2, 0.2, 0.0, 20.0)
    assert loss.aggregate is Aggregate.token_mean
    # the mask is rewritten before the loss of decoupled, and made in the forward of bypass
    kept = rejection is not None and not bypass
    assert loss.denominator is (Denominator.kept if kept else Denominator.all)
    if weight is None:
        assert mis.tis_mode is TisMode.off
    else:
        assert threshold is not None
        assert mis.tis_mode is (TisMode.truncate if threshold[0] is None else TisMode.zero)
        assert mis.tis_level is Level[weight]
        assert ((mis.tis_lower_bound, mis.tis_upper_bound), mis.log_ratio_clamp) == (threshold, 20.0)
    assert not mis.tis_batch_normalize and not mis.use_rs and mis.rs_veto_threshold is None
    pair = Pair.current_rollout if bypass else Pair.proximal_rollout
    assert mis.reject == ([] if rejection is None else [verl_rule(*rejection, pair)])


def verl_rule(option: str, lower: float | None, upper: float, pair: Pair) -> RejectSpec:
    """k1's bounds are on mu/pi, so inverse; the log-ratio of each token is clamped at 20."""
    _, over, estimator = option.split("_")
    k1 = estimator == "k1"
    statistic = Statistic.ratio if k1 else Statistic[estimator]
    return RejectSpec(statistic, Level.sequence, OverTokens[over], lower, upper, k1, 20.0, Sign.any, pair)


def test_verl_rejects_every_term_where_it_rewrites_the_mask() -> None:
    assert compose(["preset=verl/decoupled_geo_rs", "loss.kl_coef=0.1"]).loss.reject_terms is RejectTerms.all
    assert compose(["preset=verl/bypass_pg_geo_rs", "loss.kl_coef=0.1"]).loss.reject_terms is RejectTerms.policy


# mode, level, lower, upper, normalised | rs level, lower, upper | veto | clamp
MIS = {
    "miles/default": ("truncate", "token", None, 2.0, True, ("token", 0.5, 2.0), 1e-4, 20.0),
    "miles/truncate": ("truncate", "token", None, 2.0, False, None, None, 20.0),
    "miles/clip": ("clip", "token", 0.5, 2.0, False, None, None, 20.0),
    "miles/mask": ("mask", "token", 0.5, 2.0, False, None, None, 20.0),
    "miles/geometric": ("clip", "geometric", 0.9999, 1.0001, False, ("geometric", 0.9999, 1.0001), 1e-4, 20.0),
    "miles/tis": ("truncate", "token", None, 2.0, False, None, None, None),
    "miles/icepop": ("zero", "token", 0.5, 2.0, False, None, None, None),
    "miles/metrics_only": ("truncate", "token", None, 2.0, False, None, None, 20.0),
    "miles/reinforce": ("truncate", "token", None, 2.0, False, None, None, 20.0),
    "slime/default": ("truncate", "token", None, 2.0, True, ("token", 0.5, 2.0), 1e-4, 20.0),
    "slime/mask": ("mask", "token", 0.5, 2.0, False, None, None, 20.0),
    "slime/tis": ("truncate", "token", None, 2.0, False, None, None, None),
    "slime/icepop": ("zero", "token", 0.5, 2.0, False, None, None, None),
    "nemo_rl/importance": ("unbounded", "token", None, None, False, None, None, None),
    "nemo_rl/sequence_importance": ("unbounded", "sequence", None, None, False, None, None, None),
    "nemo_rl/tis": ("truncate", "token", None, 2.0, False, None, None, None),
    "nemo_rl/icepop": ("zero", "token", 0.5, 5.0, False, None, None, None),
    "nemo_rl/seq_mask_tis": ("unbounded", "token", None, None, False, None, None, None),
    "nemo_rl/force_on_policy": ("unbounded", "token", None, None, False, None, None, None),
    "trl/token_truncate": ("truncate", "token", None, 3.0, False, None, None, None),
    "trl/token_mask": ("zero", "token", 0.0, 3.0, False, None, None, None),
    "trl/sequence_truncate": ("truncate", "sequence", None, 3.0, False, None, None, None),
    "trl/sequence_mask": ("zero", "sequence", 0.0, 3.0, False, None, None, None),
    "trl/off_policy_mask": ("zero", "sequence", 0.0, 3.0, False, None, None, None),
    "areal/decoupled": ("unbounded", "token", None, None, False, None, None, None),
    "areal/token_clamp": ("truncate", "token", None, 5.0, False, None, None, None),
    "areal/sequence_clamp": ("truncate", "geometric", None, 5.0, False, None, None, None),
    "areal/sequence_mask": ("unbounded", "geometric", None, None, False, None, None, None),
    "areal/sequence_sum_mask": ("unbounded", "geometric", None, None, False, None, None, None),
    "areal/k3_mask": ("unbounded", "token", None, None, False, None, None, None),
    "pipelinerl/reinforce": ("truncate", "token", None, 1.2, False, None, None, None),
    "prime_rl/legacy_token": ("unbounded", "token", None, None, False, None, None, None),
    "prime_rl/legacy_sequence": ("truncate", "sequence", None, 10.0, False, None, None, None),
}


@pytest.mark.parametrize("name", MIS)
def test_weights_rejection_sampling_and_veto(name: str, all_methods: Mapping[str, MethodSpec]) -> None:
    mode, level, lower, upper, normalised, rs, veto, clamp = MIS[name]
    mis = all_methods[name].mis
    assert (mis.tis_mode, mis.tis_level) == (TisMode[mode], Level[level])
    assert (mis.tis_lower_bound, mis.tis_upper_bound, mis.tis_batch_normalize) == (lower, upper, normalised)
    found = (mis.rs_level.name, mis.rs_lower_bound, mis.rs_upper_bound) if mis.use_rs else None
    assert (found, mis.rs_veto_threshold, mis.log_ratio_clamp) == (rs, veto, clamp)


SEQUENCE, MEAN = Level.sequence, OverTokens.mean
PROXIMAL, CURRENT = Pair.proximal_rollout, Pair.current_rollout
OLDER = [  # keep low <= ratio <= high, of tokens, of the geometric mean, of every token of the response
    RejectSpec(Statistic.ratio, Level.token, None, 0.125, 8.0, pair=CURRENT),
    RejectSpec(Statistic.ratio, SEQUENCE, MEAN, 0.1, 10.0, pair=CURRENT),
]
REJECT = {
    "miles/opsm": [
        RejectSpec(Statistic.k1, SEQUENCE, MEAN, -1e-4, None, sign=Sign.negative, pair=Pair.current_proximal)
    ],
    "trl/off_policy_mask": [
        RejectSpec(Statistic.k1, SEQUENCE, MEAN, None, 0.5, inverse=True, sign=Sign.negative, pair=CURRENT)
    ],
    "nemo_rl/seq_mask_tis": [RejectSpec(Statistic.ratio, SEQUENCE, MEAN, 0.999, 1.002, pair=PROXIMAL)],
    "nemo_rl/seq_logprob_error": [RejectSpec(Statistic.mult_error, SEQUENCE, MEAN, None, 2.0, pair=PROXIMAL)],
    "areal/token_mask": [RejectSpec(Statistic.ratio, Level.token, None, None, 5.0, pair=PROXIMAL)],
    "areal/sequence_mask": [RejectSpec(Statistic.ratio, SEQUENCE, MEAN, None, 5.0, pair=PROXIMAL)],
    "areal/sequence_sum_mask": [RejectSpec(Statistic.ratio, SEQUENCE, OverTokens.sum, None, 5.0, pair=PROXIMAL)],
    "areal/sequence_max_mask": [RejectSpec(Statistic.ratio, SEQUENCE, OverTokens.max, None, 5.0, pair=PROXIMAL)],
    "areal/k1_mask": [RejectSpec(Statistic.k1, SEQUENCE, MEAN, None, 0.1, pair=PROXIMAL)],
    "areal/k2_mask": [RejectSpec(Statistic.k2, SEQUENCE, MEAN, None, 0.1, pair=PROXIMAL)],
    "areal/k3_mask": [RejectSpec(Statistic.k3, SEQUENCE, MEAN, None, 0.1, inverse=True, pair=PROXIMAL)],
    "prime_rl/dppo": [
        RejectSpec(Statistic.prob_diff, Level.token, None, None, 0.2, sign=Sign.positive, pair=CURRENT),
        RejectSpec(Statistic.prob_diff, Level.token, None, -0.2, None, sign=Sign.nonpositive, pair=CURRENT),
    ],
    "prime_rl/ipo": [RejectSpec(Statistic.prob_diff, Level.token, None, -0.1, 0.1, pair=CURRENT)],
    "prime_rl/legacy_token": [
        *OLDER, RejectSpec(Statistic.ratio, SEQUENCE, OverTokens.every, None, 100.0, pair=CURRENT)
    ],
    "prime_rl/legacy_two_sided": [
        *OLDER, RejectSpec(Statistic.ratio, SEQUENCE, OverTokens.every, 0.01, 100.0, pair=CURRENT)
    ],
}  # fmt: skip


def test_rejection_rules(all_methods: Mapping[str, MethodSpec]) -> None:
    assert {name: all_methods[name].mis.reject for name in REJECT} == REJECT
    assert all_methods["areal/m2po"].mis.m2_threshold == 0.04


# algo, loss, ratio level, aggregate, constant, denominator, log-ratio clamp
LOSS = {
    "miles/default": ("decoupled", "ppo_clip", "token", "sequence_mean", None, "kept", 20.0),
    "miles/bypass": ("bypass", "ppo_clip", "token", "sequence_mean", None, "all", 20.0),
    "miles/standard": ("standard", "ppo_clip", "token", "sequence_mean", None, "all", 20.0),
    "miles/reinforce": ("bypass", "reinforce", "token", "sequence_mean", None, "all", 20.0),
    "miles/opsm": ("decoupled", "ppo_clip", "token", "sequence_mean", None, "all", 20.0),
    "slime/default": ("decoupled", "ppo_clip", "token", "sequence_mean", None, "all", None),
    "nemo_rl/tis": ("decoupled", "ppo_clip", "token", "token_mean", None, "all", None),
    "nemo_rl/seq_logprob_error": ("decoupled", "ppo_clip", "token", "token_mean", None, "kept", None),
    "nemo_rl/sequence_importance": ("decoupled", "ppo_clip", "sequence", "sequence_mean", None, "all", None),
    "nemo_rl/reinforce": ("decoupled", "reinforce", "token", "token_mean", None, "all", None),
    "nemo_rl/force_on_policy": ("on_policy", "ppo_clip", "token", "token_mean", None, "all", None),
    "trl/sequence_mask": ("decoupled", "ppo_clip", "token", "token_mean", None, "all", None),
    "trl/off_policy_mask": ("decoupled", "ppo_clip", "token", "token_mean", None, "all", None),
    "areal/token_mask": ("decoupled", "ppo_clip", "token", "token_mean", None, "all", None),
    "areal/m2po": ("decoupled", "ppo_clip", "token", "token_mean", None, "kept", None),
    "pipelinerl/ppo": ("bypass", "ppo_clip", "token", "sequence_sum", 1.0, "all", None),
    "pipelinerl/gspo": ("bypass", "ppo_clip", "sequence", "sequence_sum", 1.0, "all", None),
    "pipelinerl/reinforce": ("bypass", "reinforce", "token", "sequence_sum", 1.0, "all", None),
    "prime_rl/dppo": ("bypass", "importance", "token", "token_mean", None, "all", None),
    "prime_rl/ipo": ("bypass", "importance", "token", "token_mean", None, "all", None),
    "prime_rl/legacy_token": ("bypass", "reinforce", "token", "token_mean", None, "all", 20.0),
    "prime_rl/legacy_sequence": ("bypass", "reinforce", "token", "sequence_mean", None, "all", 20.0),
}


@pytest.mark.parametrize("name", LOSS)
def test_loss_and_denominators(name: str, all_methods: Mapping[str, MethodSpec]) -> None:
    algo, loss_name, ratio, aggregate, constant, denominator, clamp = LOSS[name]
    method, loss = all_methods[name], all_methods[name].loss
    assert (method.algo.name, loss.name, loss.ratio_level) == (Algo[algo], LossName[loss_name], RatioLevel[ratio])
    assert (loss.aggregate, loss.sum_constant) == (Aggregate[aggregate], constant)
    assert (loss.denominator, loss.log_ratio_clamp) == (Denominator[denominator], clamp)


def test_terms_beside_the_policy_term(all_methods: Mapping[str, MethodSpec]) -> None:
    nemo = all_methods["nemo_rl/tis"].loss
    assert (nemo.kl_coef, nemo.kl_value, nemo.kl_gradient) == (0.01, KlEstimator.k3, KlEstimator.k3)
    assert (nemo.kl_importance, nemo.kl_input_clamp, nemo.kl_clamp) == (KlImportance.current_live, 20.0, 10.0)
    pipeline = all_methods["pipelinerl/ppo"].loss
    assert (pipeline.kl_coef, pipeline.kl_gradient, pipeline.kl_input_clamp) == (0.1, KlEstimator.k3, 10.0)
    assert all_methods["pipelinerl/gspo"].loss.kl_coef == 0.0
    assert (
        all_methods["prime_rl/dppo"].loss.log_ratio_penalty
        == all_methods["prime_rl/ipo"].loss.log_ratio_penalty
        == 1e-3
    )
    older = all_methods["prime_rl/legacy_token"].loss
    assert (older.log_ratio_penalty, older.advantage_kl) == (0.0, AdvantageKl.none)
    assert all(m.loss.kl_coef == 0 for n, m in all_methods.items() if not n.startswith(("nemo_rl", "pipelinerl")))


def test_what_only_one_recipe_has(all_methods: Mapping[str, MethodSpec]) -> None:
    guessed = [name for name, method in all_methods.items() if method.algo.proximal is Proximal.loglinear]
    measured = [name for name, method in all_methods.items() if method.algo.metrics_only]
    assert (guessed, measured) == (["areal/loglinear"], ["miles/metrics_only", "trimtab/measure"])


# -- miles' page: a preset and the user's keys -----------------------------------------------------------------------


def bounds(*overrides: str) -> tuple[float | None, ...]:
    mis = compose([*overrides]).mis
    return mis.tis_lower_bound, mis.tis_upper_bound, mis.rs_lower_bound, mis.rs_upper_bound


def test_the_users_keys_and_groups_win_over_miles_default() -> None:
    spec = compose(["preset=miles/default", "mis.tis_mode=clip", "mis.tis_level=geometric"])
    mis = spec.mis
    assert (spec.algo.name, mis.tis_mode, mis.tis_level) == (Algo.decoupled, TisMode.clip, Level.geometric)
    assert (mis.tis_lower_bound, mis.tis_upper_bound, mis.tis_batch_normalize) == (0.5, 2.0, True)
    assert (mis.use_rs, mis.rs_level, mis.rs_veto_threshold) == (True, Level.token, 1e-4)
    groups = compose(["preset=miles/default", "tis_mode=clip", "level=geometric"])
    assert groups == spec == compose(["level=geometric", "tis_mode=clip", "preset=miles/default"])


@pytest.mark.parametrize(
    ("tis_level", "rs_level"),
    [(Level.token, Level.geometric), (Level.sequence, Level.token), (Level.geometric, Level.sequence)],
)
def test_bounds_of_rejection_fall_back_to_those_of_the_weights_at_any_level(tis_level: Level, rs_level: Level) -> None:
    levels = [f"mis.tis_level={tis_level.name}", f"mis.rs_level={rs_level.name}"]
    clip = ["preset=miles/default", "mis.tis_mode=clip", *levels]
    assert bounds(*clip) == (0.5, 2.0, 0.5, 2.0)
    assert bounds(*clip, "mis.tis_upper_bound=3") == (0.5, 3.0, 0.5, 3.0)
    assert bounds(*clip, "mis.tis_lower_bound=null", "mis.tis_upper_bound=4") == (0.25, 4.0, 0.25, 4.0)
    assert bounds(*clip, "mis.rs_lower_bound=0.1", "mis.rs_upper_bound=9") == (0.5, 2.0, 0.1, 9.0)
    assert bounds("preset=miles/truncate", "mis.use_rs=true", *levels, "mis.tis_upper_bound=4") == (
        None, 4.0, 0.25, 4.0,
    )  # fmt: skip


def test_what_the_page_of_miles_switches() -> None:
    assert compose(["preset=miles/default", "mis.use_rs=false"]).mis.rs_upper_bound is None
    vetoed = compose(["preset=miles/truncate", "mis.rs_veto_threshold=1e-6"]).mis  # independent of IS and RS
    assert (vetoed.use_rs, vetoed.rs_veto_threshold) == (False, 1e-6)
    masked = compose(["preset=miles/default", "mis.tis_mode=mask", "mis.tis_batch_normalize=false"]).mis
    assert (masked.tis_mode, masked.tis_lower_bound, masked.tis_batch_normalize) == (TisMode.mask, 0.5, False)
