"""Configurations that do the same have one hash, those that differ have two; resolving twice changes nothing more."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from config.specs import spec_of

from trimtab.config import config_hash, ignored, resolve
from trimtab.config.keys import with_values
from trimtab.config.resolve import UNHASHED
from trimtab.spec import (
    AdvantageKl,
    Algo,
    Denominator,
    Engine,
    KlEstimator,
    KlImportance,
    Level,
    LogprobsMode,
    LossName,
    Match,
    Mismatch,
    Numerator,
    Overlong,
    OverTokens,
    Pair,
    PolicyKind,
    PromptStyle,
    Proximal,
    RatioLevel,
    RejectSpec,
    RejectTerms,
    RunSpec,
    Scale,
    Sign,
    Statistic,
    TaskName,
    TisMode,
    TrackerName,
)

STANDARD, BYPASS = {"algo__name": Algo.standard}, {"algo__name": Algo.bypass}
REINFORCE, OFF = BYPASS | {"loss__name": LossName.reinforce}, {"mis__tis_mode": TisMode.off}
MASK, VETO = {"mis__tis_mode": TisMode.mask}, {"mis__rs_veto_threshold": 1e-4}
ON_POLICY, ZERO = {"algo__name": Algo.on_policy}, {"mis__tis_mode": TisMode.zero}
K2 = {"loss__kl_coef": 0.1, "loss__kl_value": KlEstimator.k2, "loss__kl_gradient": KlEstimator.k2}
GUESSED, KL = {"algo__proximal": Proximal.loglinear}, {"loss__kl_coef": 0.1}


SCORES = (LossName.cispo, LossName.dppo_tv, LossName.dppo_kl)  # reinforce where the ratio is 1


def named(name: LossName, **values: Any) -> dict[str, Any]:
    return {"loss__name": name, **values}


def rule(**values: Any) -> dict[str, Any]:
    """One rule on the mean k3 of a response, changed by ``values``."""
    k3 = RejectSpec(Statistic.k3, Level.sequence, OverTokens.mean, upper=0.01)
    return {"mis__reject": [replace(k3, **values)]}


RATIO = {"statistic": Statistic.ratio, "upper": 2.0}
OPTIONS = {"task__name": TaskName.custom, "task__path": "a.b:c"}
REPLAY = {"rollout__engine": Engine.replay, "rollout__path": "r"}
SAME = [
    ({}, {"mis__tis_upper_bound": 2.0}),
    ({}, {"mis__tis_lower_bound": 0.1}),
    ({}, {"mis__numerator": Numerator.proximal}),
    ({}, {"mis__rs_level": Level.geometric, "mis__rs_upper_bound": 3.0}),
    ({}, {"loss__denominator": Denominator.kept, "loss__reject_terms": RejectTerms.all}),
    ({}, {"loss__kl_value": KlEstimator.k1, "loss__kl_importance": KlImportance.rollout, "loss__sum_constant": 3.0}),
    ({}, {"mismatch__strength": 0.3}),
    ({}, {"rollout__path": "x", "policy__path": "x", "task__path": "x", "policy__fp32_head": True}),
    ({}, {"task__generator": "x", "task__match": Match.math_verify, "task__pattern": "(x)", "task__split": "test"}),
    ({}, {"task__shots": 9, "task__system": "be brief", "task__options": {"a": 1}}),
    ({}, {"run_dir": "x", "resume": "auto", "checkpoint__every": 3, "rollout__record_every": 1}),
    ({}, {"tracker__name": TrackerName.wandb, "tracker__tags": ["a"], "policy__cache_dir": "/c"}),
    (STANDARD, STANDARD | {"mis__tis_level": Level.geometric, "mis__use_rs": True, **VETO}),
    (STANDARD, STANDARD | {"algo__metrics_only": True}),
    (STANDARD, OFF),  # decoupled without a weight or a rejection is standard
    (STANDARD, OFF | {"algo__metrics_only": True}),
    (
        BYPASS,
        BYPASS | {"mis__tis_mode": TisMode.mask, "mis__tis_level": Level.sequence, "mis__tis_batch_normalize": True},
    ),
    (REINFORCE, REINFORCE | {"loss__clip_low": 0.1, "loss__clip_high": 0.4, "loss__dual_clip": 3.0}),
    (OFF | VETO, OFF | VETO | {"mis__tis_level": Level.sequence, "mis__tis_batch_normalize": True}),
    (MASK, MASK | {"loss__reject_terms": RejectTerms.all}),  # no KL, no entropy: one term
    (MASK | {"algo__metrics_only": True}, MASK | {"algo__metrics_only": True, "loss__denominator": Denominator.kept}),
    ({"advantage__scale": Scale.none}, {"advantage__scale": Scale.none, "advantage__epsilon": 0.1}),
    (
        {"rollout__engine": Engine.transformers},
        {"rollout__engine": Engine.transformers, "rollout__prefix_caching": True},
    ),
    (REPLAY, REPLAY | {"evaluation__every": 7, "rollout__probe_sequences": 9, "rollout__max_model_len": 9}),
    ({"rollout__probe_every": 0}, {"rollout__probe_every": 0, "rollout__probe_bound": 2.0}),
    ({"policy__kind": PolicyKind.smollm2}, {"policy__kind": PolicyKind.smollm2, "policy__warmup_accuracy": 0.9}),
    ({"evaluation__every": 0}, {"evaluation__greedy": False, "evaluation__samples": 0}),
    (
        {"rollout__engine": Engine.transformers},
        {"rollout__engine": Engine.transformers, "mismatch__kind": Mismatch.logit_noise, "mismatch__strength": 0.0},
    ),
    ({"loss__clip_low": 1.0}, {"loss__clip_low": 1}),
    ({}, {"shadow": ["miles/default"], "shadow_gradient_every": 5}),
    # the proximal policy is guessed only for decoupled
    *((algo, algo | GUESSED) for algo in (STANDARD, BYPASS, ON_POLICY, REINFORCE)),
    # on_policy: the ratio is 1, and so is whatever else compares with the anchor
    (ON_POLICY, ON_POLICY | {"loss__clip_low": 0.1, "loss__clip_high": 0.3, "loss__dual_clip": 3.0}),
    (ON_POLICY, ON_POLICY | {"loss__ratio_cap": 5.0, "loss__log_ratio_clamp": None, "loss__log_ratio_penalty": 0.1}),
    (ON_POLICY, ON_POLICY | {"loss__advantage_kl": AdvantageKl.anchor, "loss__advantage_kl_coef": 0.1}),
    (ON_POLICY | KL, ON_POLICY | KL | {"loss__kl_importance": KlImportance.anchor}),
    (
        ON_POLICY | KL | {"loss__kl_importance": KlImportance.current_live},
        ON_POLICY | KL | {"loss__kl_importance": KlImportance.anchor_live},
    ),
    (ON_POLICY, ON_POLICY | {"loss__ratio_level": RatioLevel.sequence_token}),
    (ON_POLICY, ON_POLICY | named(LossName.importance)),
    *(
        (ON_POLICY | named(LossName.reinforce), ON_POLICY | named(name, loss__ratio_level=RatioLevel.sequence))
        for name in SCORES
    ),
    (ON_POLICY | OFF | named(LossName.reinforce), ON_POLICY | OFF | named(LossName.vespo)),
    # bypass: the anchor is the rollout's policy
    *(
        (BYPASS | KL | {"loss__kl_importance": one}, BYPASS | KL | {"loss__kl_importance": other})
        for one, other in [
            (KlImportance.rollout, KlImportance.anchor),
            (KlImportance.rollout_live, KlImportance.anchor_live),
        ]
    ),
    (BYPASS, BYPASS | {"mis__log_ratio_clamp": None, "mis__tis_mode": TisMode.zero}),
    # what a loss does not read
    *(
        (algo | K2, algo | K2 | {"loss__log_ratio_clamp": None})
        for algo in (REINFORCE, ON_POLICY, ON_POLICY | {"loss__kl_importance": KlImportance.anchor})
    ),
    (REINFORCE, REINFORCE | {"loss__ratio_level": RatioLevel.sequence, "loss__log_ratio_clamp": None}),
    ({}, {"loss__sapo_tau_positive": 2.0, "loss__sapo_tau_negative": 2.0, "loss__vespo_positive": [1.0, 1.0]}),
    (named(LossName.sapo), named(LossName.sapo, loss__clip_low=0.1, loss__dual_clip=3.0, loss__ratio_cap=9.0)),
    (named(LossName.importance), named(LossName.importance, loss__clip_high=0.3)),
    (named(LossName.cispo), named(LossName.cispo, loss__dual_clip=3.0, loss__ratio_cap=9.0)),
    (named(LossName.gmpo), named(LossName.gmpo, loss__ratio_level=RatioLevel.sequence, loss__ratio_cap=9.0)),
    (named(LossName.dppo_tv), named(LossName.dppo_tv, loss__ratio_level=RatioLevel.sequence, loss__dual_clip=3.0)),
    (named(LossName.vespo), named(LossName.vespo, loss__clip_low=0.1, loss__log_ratio_clamp=None)),
    # modes
    (OFF | VETO, OFF | VETO | {"mis__log_ratio_clamp": None}),
    (
        {"mis__tis_mode": TisMode.unbounded},
        {"mis__tis_mode": TisMode.unbounded, "mis__tis_lower_bound": 0.1, "mis__tis_upper_bound": 3.0},
    ),
    (ZERO, ZERO | {"loss__denominator": Denominator.kept, "loss__reject_terms": RejectTerms.all}),
    (STANDARD, STANDARD | rule()),
    (STANDARD, STANDARD | {"mis__m2_threshold": 0.1, "mis__log_ratio_clamp": None}),
    # rules: the pair left empty is the algorithm's own; 0 bounds no ratio from below
    (rule(), rule(pair=Pair.proximal_rollout)),
    (BYPASS | rule(), BYPASS | rule(pair=Pair.current_rollout)),
    (ON_POLICY | rule(), ON_POLICY | rule(pair=Pair.current_rollout)),
    (rule(**RATIO), rule(**RATIO, lower=0.0)),
    # terms
    ({}, {"loss__advantage_kl_coef": 0.1}),
    ({}, {"loss__advantage_kl": AdvantageKl.anchor}),
    (
        MASK | {"loss__log_ratio_penalty": 0.1},
        MASK | {"loss__log_ratio_penalty": 0.1, "loss__reject_terms": RejectTerms.all},
    ),
    ({}, {"loss__kl_clamp": 3.0, "loss__kl_input_clamp": 3.0}),
    ({}, {"advantage__overlong_buffer": 3, "advantage__overlong_penalty": 0.5}),
    ({}, {"advantage__overlong": Overlong.punish, "advantage__overlong_buffer": 3, "advantage__overlong_penalty": 0.0}),
    ({}, {"debug__anomaly": True}),
    (OPTIONS | {"task__options": {"a": 1, "b": 2}}, OPTIONS | {"task__options": {"b": 2, "a": 1}}),
]
DIFFERENT = [
    ({}, {"seed": 1}),
    ({}, {"steps": 301}),
    ({}, STANDARD),
    ({}, BYPASS),
    (BYPASS, REINFORCE),
    ({}, {"mis__tis_level": Level.sequence}),
    ({}, {"mis__tis_upper_bound": 3.0}),
    ({}, {"mis__tis_batch_normalize": True}),
    ({}, {"algo__metrics_only": True}),
    ({}, {"loss__clip_low": 0.1}),
    ({}, {"optim__lr": 1e-3}),
    ({}, VETO),
    (OFF, OFF | VETO),
    (VETO, VETO | {"loss__denominator": Denominator.kept}),
    (BYPASS, BYPASS | {"mis__use_rs": True}),
    (BYPASS | VETO, BYPASS | VETO | {"algo__metrics_only": True}),
    (REINFORCE, REINFORCE | OFF),
    (REINFORCE | KL, REINFORCE | KL | {"loss__log_ratio_clamp": None}),  # of k3's exponent
    (MASK | {"loss__kl_coef": 0.1}, MASK | {"loss__kl_coef": 0.1, "loss__reject_terms": RejectTerms.all}),
    ({"loss__kl_coef": 0.1}, {"loss__kl_coef": 0.1, "loss__kl_gradient": KlEstimator.k1}),
    *itertools.combinations([{"algo__name": algo} for algo in Algo], 2),
    *itertools.combinations([named(name) for name in LossName], 2),
    *itertools.combinations([{"mis__tis_mode": mode} for mode in TisMode], 2),
    *itertools.combinations([KL | {"loss__kl_importance": how} for how in KlImportance], 2),
    ({}, GUESSED),
    (OFF, OFF | GUESSED),  # no weight, but another anchor than standard's
    (ON_POLICY, ON_POLICY | {"mis__tis_level": Level.sequence}),
    *itertools.combinations(
        [ON_POLICY | named(name) for name in LossName if name not in (LossName.importance, *SCORES)], 2
    ),
    (ON_POLICY, ON_POLICY | {"loss__ratio_level": RatioLevel.sequence}),
    (ON_POLICY, ON_POLICY | {"loss__advantage_kl": AdvantageKl.reference, "loss__advantage_kl_coef": 0.1}),
    ({}, {"loss__advantage_kl": AdvantageKl.anchor, "loss__advantage_kl_coef": 0.1}),
    ({}, {"loss__log_ratio_clamp": None}),
    ({}, {"loss__ratio_cap": 5.0}),
    (
        REINFORCE | {"loss__log_ratio_penalty": 0.1},
        REINFORCE | {"loss__log_ratio_penalty": 0.1, "loss__log_ratio_clamp": None},
    ),
    ({}, {"mis__log_ratio_clamp": None}),
    ({}, {"mis__m2_threshold": 0.04}),
    ({"mis__m2_threshold": 0.04}, {"mis__m2_threshold": 0.04, "loss__denominator": Denominator.kept}),
    (ZERO, ZERO | {"mis__tis_lower_bound": 0.0}),
    ({}, rule()),
    (rule(), rule(upper=0.02)),
    (rule(), rule(inverse=True)),
    (rule(), rule(clamp=20.0)),
    (rule(), rule(sign=Sign.negative)),
    (rule(), rule(over_tokens=OverTokens.sum)),
    (rule(), rule(pair=Pair.current_rollout)),
    (rule(), rule() | {"loss__denominator": Denominator.kept}),
    (rule(**RATIO), rule(**RATIO, lower=0.5)),
    (
        MASK | {"loss__log_ratio_penalty": 0.1, "loss__denominator": Denominator.kept},
        MASK
        | {
            "loss__log_ratio_penalty": 0.1,
            "loss__denominator": Denominator.kept,
            "loss__reject_terms": RejectTerms.all,
        },
    ),
    ({}, {"loss__top_entropy": 0.2}),
    ({}, {"loss__positive_nll_coef": 0.1}),
    ({}, {"advantage__overlong": Overlong.drop}),
    ({}, {"advantage__overlong": Overlong.punish, "advantage__overlong_buffer": 3}),
    (named(LossName.sapo), named(LossName.sapo, loss__sapo_tau_negative=2.0)),
    (named(LossName.vespo), named(LossName.vespo, loss__vespo_negative=[1.0, 1.0])),
    ({}, {"rollout__engine": Engine.transformers}),
    ({}, {"rollout__max_num_seqs": 64}),
    ({}, {"rollout__logprobs_mode": LogprobsMode.raw}),
    ({}, {"policy__warmup_accuracy": 0.5}),
    ({"task__name": TaskName.custom}, {"task__name": TaskName.custom, "task__options": {"a": 1}}),
    ({"task__style": PromptStyle.few_shot}, {"task__style": PromptStyle.few_shot, "task__shots": 9}),
    ({}, {"evaluation__every": 7}),
    *(
        (OPTIONS | {"task__options": one}, OPTIONS | {"task__options": other})
        for one, other in [  # whoever reads them may tell these apart
            ({"a": 1}, {"a": 1.0}),
            ({"a": 1}, {"a": True}),
            ({"a": math.inf}, {"a": "inf"}),
            ({"a": math.nan}, {"a": "nan"}),
            ({"a": "1"}, {"a": 1}),
            ({"a": None}, {"a": "null"}),
            ({"a": [2]}, {"a": [2.0]}),
            ({"a": {"b": 0.0}}, {"a": {"b": -0.0}}),
            ({"a": {1: 2}}, {"a": {"1": 2}}),
            ({"a": {1: 2, "1": 3}}, {"a": {1: 3, "1": 2}}),
        ]
    ),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_configs_that_do_the_same_hash_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert config_hash(spec_of(**one)) == config_hash(spec_of(**other))


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_configs_that_differ_hash_differently(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert config_hash(spec_of(**one)) != config_hash(spec_of(**other))


def test_a_hash_is_16_hex_digits_and_the_unhashed_keys_exist() -> None:
    digest = config_hash(RunSpec())
    assert len(digest) == 16 and int(digest, 16) >= 0
    assert with_values(RunSpec(), {key: None for key in UNHASHED}) != RunSpec()


@pytest.mark.parametrize("values", [pair[i] for pair in SAME + DIFFERENT for i in (0, 1)])
def test_resolving_twice_changes_nothing_more(values: dict[str, Any]) -> None:
    once = resolve(spec_of(**values))
    assert resolve(once) == once and ignored(once) == []
