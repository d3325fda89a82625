"""Every golden case through ``replay``, and that it notices a changed number."""

from __future__ import annotations

import copy
import gzip
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import replay
import torch
from adapt import compare
from adapt.shared import Case, Said

HERE = Path(__file__).parent
CASES = {case.name: case for case in replay.cases(HERE)}
CAST, GUARDS, MEAN = (
    "a-loss-in-float32-inside-of-float64", "guards-in-denominators", "the-mean-that-weights-are-divided-by"
)  # fmt: skip
DIFFERENT = {
    "miles/icepop_0.5_2_boundary": CAST,
    "miles/icepop_0.5_2_multiturn": CAST,
    "miles/vanilla_tis_0_2_multiturn": CAST,
    "miles/vanilla_tis_0_2_ragged": CAST,
    "miles/tis_clip_sequence_bn_multiturn": MEAN,
    "miles/tis_mask_token_bn_extreme": MEAN,
    "miles/tis_truncate_sequence_bn_multiturn": MEAN,
    "nemo_rl/gspo_seqlevel_is_multiturn": GUARDS,
    "nemo_rl/gspo_seqlevel_is_ragged": GUARDS,
    "nemo_rl/gspo_seqlevel_tis_wide": GUARDS,
    "nemo_rl/kl_k2_seqloss_wide": GUARDS,
    "nemo_rl/vapo_nll_wide": GUARDS,
    "nemo_rl/overflow_f32_tis": "a-ratio-that-overflows",
    "pipelinerl/gspo_unpacked_error_ragged": "sequence-ratios-of-rows-that-are-not-packed",
    "trl/loss_luspo_tokentrunc_wide": "luspo-with-a-term-for-each-token",
    "verl/is_seq_bn_extreme": GUARDS,
    "verl/is_seq_bn_multiturn": GUARDS,
    "verl/loss_decoupled_tokis_seq-mean-token-mean_wide": GUARDS,
    "verl/loss_geo_mean_tokis_wide": GUARDS,
    "verl/loss_sapo_tokis_wide": GUARDS,
    "verl/overflow_f32_sequence": "metrics-that-divide-by-zero",
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    outcome = replay.replay(CASES[name])
    assert outcome.faults == ()
    assert outcome.anchors == ((DIFFERENT[name],) if name in DIFFERENT else ())


def test_all_eight_systems_are_there() -> None:
    counts: dict[str, int] = {}
    for case in CASES.values():
        counts[case.system] = counts.get(case.system, 0) + 1
    assert counts == {
        "areal": 28, "miles": 46, "nemo_rl": 30, "pipelinerl": 9, "prime_rl": 14, "slime": 5, "trl": 33, "verl": 69
    }  # fmt: skip


# -- replay notices ----------------------------------------------------------------------------------------------------

CHANGED = [
    ("verl/is_token_t2_ragged", ("weights", 0, 0)),
    ("verl/rs_seq_mean_k3_ragged", ("mask", 0, 0)),
    ("verl/is_token_t2_ragged", ("metrics", "rollout_corr/rollout_is_eff_sample_size")),
    ("verl/loss_decoupled_tokis_token-mean_wide", ("loss",)),
    ("verl/loss_sapo_tokis_wide", ("grad_log_prob", 0, 0)),
    ("verl/loss_bypass_pg_seqis_multiturn", ("metrics", "actor/ppo_kl")),
    ("verl/presets_table", ("presets", "decoupled_geo_rs", "rollout_rs")),
    ("miles/yaml_default_wide", ("weights", 0, 0)),
    ("miles/tis_mask_token_bn_extreme", ("weights", 0, 0)),
    ("miles/rs_token_boundary", ("mask", 0, 0)),
    ("miles/yaml_default_wide", ("metrics", "k3_kl", 0, 0)),
    ("miles/yaml_default_wide", ("metrics_reduced_sample_mean", "tis_truncate_fraction")),
    ("miles/opsm_gspo_kl_wide", ("opsm_mask", 0)),
    ("slime/vanilla_tis_0.5_2_ragged", ("pg_loss_tokens_after", 0)),
    ("slime/vanilla_tis_0.5_2_ragged", ("grad_log_probs", 0)),
    ("nemo_rl/tis_2_wide", ("loss",)),
    ("nemo_rl/kl_k2_seqloss_wide", ("grad_curr_logprobs", 0, 0)),
    ("nemo_rl/overflow_f32_tis", ("metrics", "sampling_importance_ratio")),
    ("nemo_rl/seq_logprob_error_mask_multiturn", ("sample_mask", 0)),
    ("trl/is_token_truncate_3_ragged", ("importance_sampling_ratio", 0, 0)),
    ("trl/is_sequence_mask_3_wide", ("importance_sampling_ratio", 0, 0)),
    ("trl/loss_opsm_0.05_ragged", ("off_policy_mask", 1, 0)),
    ("trl/loss_delta_kl_wide", ("metrics", "kl")),
    ("areal/tok_mask_ratio_0.5_2_ragged", ("stat", "approx_kl", 0, 0)),
    ("areal/tok_clamp_ratio_0_2_ragged", ("filtered_fraction",)),
    ("areal/m2po_wide", ("mask", 0, 0)),
    ("pipelinerl/ppo_ragged", ("grad_logits", 0, 0, 0)),
    ("pipelinerl/ppo_packed_ragged", ("ess_restated",)),
    ("prime_rl/mixed_wide", ("metrics", "nll", 0)),
    ("prime_rl/legacy_geo_ragged", ("grad_trainer_logprobs", 0, 0)),
]


def changed(value: Any) -> Any:
    if isinstance(value, bool) or value in (0.0, 1.0):
        return 1.0 - value
    return "token_k1" if isinstance(value, str) else value * (1 + 1e-3)


@pytest.mark.parametrize(("name", "path"), CHANGED, ids=[f"{name}-{path[0]}" for name, path in CHANGED])
def test_a_changed_number_is_reported(name: str, path: tuple[Any, ...]) -> None:
    data = copy.deepcopy(CASES[name].data)
    *outer, last = ("outputs", *path)
    place = data
    for key in outer:
        place = place[key]
    place[last] = changed(place[last])
    outcome = replay.replay(Case(data))
    assert outcome.faults
    assert all(fault.startswith(str(path[0])) for fault in outcome.faults)


def test_a_change_of_one_millionth_is_seen_in_float64_and_of_one_ten_thousandth_in_float32() -> None:
    for name, factor in (("trl/loss_grpo_none_wide", 1 + 2e-9), ("areal/no_rs_ragged", 1 + 1e-4)):
        data = copy.deepcopy(CASES[name].data)
        data["outputs"]["loss"] *= factor
        assert replay.replay(Case(data)).faults


def test_what_trimtab_has_no_word_for_is_reported() -> None:
    data = copy.deepcopy(CASES["trl/loss_grpo_none_wide"].data)
    data["outputs"]["metrics"]["clip_ratio/of_another_kind"] = 0.5
    assert "nothing to say" in replay.replay(Case(data)).faults[0]


def test_a_refusal_on_one_side_only_is_reported() -> None:
    data = copy.deepcopy(CASES["trl/loss_grpo_none_wide"].data)
    data["outputs"] = {"error": "ValueError"}
    assert "its system refuses" in replay.replay(Case(data)).faults[0]
    data = copy.deepcopy(CASES["verl/err_k3_range"].data)
    data["outputs"] = copy.deepcopy(CASES["verl/rs_token_k3_multiturn"].data["outputs"])
    assert "trimtab refuses" in replay.replay(Case(data)).faults[0]


REFUSED = ("verl/err_is_lo_gt_hi", "verl/err_k3_range", "nemo_rl/err_icepop_no_min")


def test_a_refusal_by_both_is_told_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in REFUSED:
        assert "threshold" in (reason := replay.replay(CASES[name]).refusal) or "ratio_min" in reason
    (tmp_path / "a.json").write_text(json.dumps(CASES["verl/err_is_lo_gt_hi"].data))
    assert replay.main([str(tmp_path)]) == 0
    assert "verl/err_is_lo_gt_hi: refused by both: rollout_is_threshold='5.0_0.5'" in capsys.readouterr().out


def refusal_of(name: str, message: str, **config: Any) -> replay.Outcome:
    data = copy.deepcopy(CASES[name].data)
    data["config"] |= config
    data["outputs"] = {"error": "ValueError", "message_contains": message}
    return replay.replay(Case(data))


def test_a_refusal_of_another_option_is_reported() -> None:
    name = "verl/is_token_t2_ragged"
    assert refusal_of(name, "rollout_is_threshold must be positive", rollout_is_threshold=-1.0).faults == ()
    assert refusal_of(name, "", rollout_is_threshold=-1.0).faults == ()
    faults = refusal_of(name, "rollout_rs_threshold must be positive", rollout_is_threshold=-1.0).faults
    assert "another option" in faults[0]


def test_no_translation_is_never_a_refusal() -> None:
    data = copy.deepcopy(CASES["verl/loss_cispo_tokis_wide"].data)
    data["function"] = "compute_policy_loss_clip_cov"
    assert "no translation" in replay.replay(Case(data)).faults[0]
    data["outputs"] = {"error": "ValueError"}
    assert "no translation: trimtab has no loss clip_cov" in replay.replay(Case(data)).faults[0]
    data = copy.deepcopy(CASES["verl/loss_decoupled_none_ragged"].data)
    data["inputs"]["advantages"][0][0] += 1
    data["outputs"] = {"error": "ValueError"}
    assert "no translation" in replay.replay(Case(data)).faults[0]


REFUSALS: list[tuple[str, dict[str, Any]]] = [
    ("trl/is_token_mask_0.5_2_boundary", {"vllm_importance_sampling_clip_min": 3.0}),
    ("trl/is_token_mask_0.5_2_boundary", {"vllm_importance_sampling_clip_min": 2.0}),
    ("trl/is_token_truncate_3_ragged", {"vllm_importance_sampling_clip_max": None}),
    ("trl/loss_dapo_tokentrunc_wide", {"clip_min": 3.0}),
    ("trl/loss_vespo_none_wide", {"vllm_importance_sampling_mode": "sequence_mask"}),
    ("miles/tis_mask_token_bn_extreme", {"tis_lower_bound": 2.0, "tis_upper_bound": 2.0}),
    ("miles/yaml_default_wide", {"tis_level": "geometric"}),
    ("miles/yaml_default_wide", {"tis_mode": "nope"}),
    ("areal/tok_mask_ratio_5_ragged", {"rejection_sampling": {"metric": "ratio", "upper": 0.9}}),
    ("areal/tok_mask_ratio_5_ragged", {"rejection_sampling": {"action": "clamp", "metric": "kl_k2", "upper": 2.0}}),
    ("areal/tok_mask_ratio_5_ragged", {"rejection_sampling": {"metric": "ratio", "upper": 2.0, "lower": 0.0}}),
    ("verl/is_token_t2_ragged", {"rollout_is_threshold": True}),
    ("verl/is_token_t2_ragged", {"rollout_is_threshold": "0_2"}),
    ("verl/is_token_t2_ragged", {"rollout_is": "geometric"}),
    ("nemo_rl/tis_2_wide", {"truncated_importance_sampling_type": "bogus"}),
    ("nemo_rl/tis_2_wide", {"truncated_importance_sampling_type": None}),
    ("nemo_rl/tis_2_wide", {"truncated_importance_sampling_ratio": -1.0}),
    ("nemo_rl/tis_2_wide", {"use_importance_sampling_correction": False}),
    ("nemo_rl/tis_2_wide", {"ratio_clip_c": 0.5}),
    ("nemo_rl/gspo_seqlevel_is_ragged", {"token_level_loss": True}),
]


@pytest.mark.parametrize(("name", "config"), REFUSALS, ids=[f"{name}-{list(config)}" for name, config in REFUSALS])
def test_what_a_system_refuses_its_namesake_does(name: str, config: dict[str, Any]) -> None:
    assert refusal_of(name, "", **config).faults == ()


def test_what_is_not_compared_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = copy.deepcopy(CASES["trl/loss_grpo_none_wide"].data)
    del data["outputs"]["metrics"]["clip_ratio/low_mean"]
    data["outputs"]["metrics"]["clip_ratio/high_mean"] = None
    (tmp_path / "a.json").write_text(json.dumps(data))
    assert replay.main([str(tmp_path)]) == 0
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("not compared: "))
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean"):
        assert f"trl metrics.{name} (1)" in told


def test_only_numbers_that_cancel_have_an_absolute_tolerance() -> None:
    for name, fails in (("weights", True), ("mask", True), ("loss", False), ("approx_kl", False), ("chi2_seq", False)):
        data = {"system": "x", "case": "x", "dtype": "float64", "outputs": {name: 4e-16}}
        assert bool(compare.faults(Case(data), [Said((name,), 0.0)])) is fails, name


def test_a_case_that_no_adapter_knows_fails_alone() -> None:
    data = dict(CASES["trl/loss_grpo_none_wide"].data)
    assert "cannot be run" in replay.replay(Case(data | {"system": "another"})).faults[0]
    assert "cannot be run" in replay.replay(Case(data | {"config": {}, "outputs": {"error": "KeyError"}})).faults[0]


def test_the_program_counts_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = CASES["trl/loss_grpo_none_wide"].data, copy.deepcopy(CASES["verl/is_token_t2_ragged"].data)
    bad["outputs"]["weights"][0][0] += 1
    (tmp_path / "a.json").write_text(json.dumps(good))
    assert replay.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "1 passed, 0 failed, 0 of the passed differ as documented\n"
    (tmp_path / "b.json").write_text(json.dumps(bad))
    assert replay.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("verl/is_token_t2_ragged: weights: trimtab ")
    assert lines[-1].startswith("1 passed, 1 failed")
    assert replay.main([]) == 2


def test_an_empty_folder_is_no_success(tmp_path: Path) -> None:
    assert replay.main([str(tmp_path)]) == 1


def test_packing_gives_the_same_bytes(tmp_path: Path) -> None:
    for case in CASES.values():
        (tmp_path / case.system).mkdir(exist_ok=True)
        (tmp_path / f"{case.name}.json").write_text(json.dumps(case.data))
    found = replay.packed(replay.cases(tmp_path))
    assert found == replay.packed(replay.cases(tmp_path))
    kept = {path.name: path.read_bytes() for path in HERE.glob("*.json.gz")}
    assert {name: gzip.decompress(x) for name, x in found.items()} == {
        name: gzip.decompress(x) for name, x in kept.items()
    }


# -- cases of our own making -------------------------------------------------------------------------------------------

PADDED = [name for name, case in CASES.items() if case.system in ("verl", "trl", "nemo_rl") and case.data["inputs"]]


@pytest.mark.parametrize("name", PADDED)
def test_rows_in_another_order(name: str) -> None:
    """What is per row moves with it, what is per batch stays."""
    data = copy.deepcopy(CASES[name].data)
    rows = len(next(value for value in data["inputs"].values() if isinstance(value, list)))
    for part in (data["inputs"], data["outputs"]):
        for key, value in part.items():
            if isinstance(value, list) and len(value) == rows:
                part[key] = value[::-1]
    assert replay.replay(Case(data)).faults == ()


# Options of each system beyond those of the golden cases: (case, options, each with its values).
GRID: dict[str, dict[str, list[Any]]] = {
    "nemo_rl/tis_2_wide": {
        "token_level_loss": [True, False],
        "reference_policy_kl_type": ["k1", "k2", "k3"],
        "reference_policy_kl_penalty": [0.0, 0.1],
        "kl_input_clamp_value": [None, 1.0],
        "kl_output_clamp_value": [None, 0.5],
        "use_on_policy_kl_approximation": [True, False],
        "force_on_policy_ratio": [True, False],
        "truncated_importance_sampling_type": ["tis", "seq-mask-tis", "icepop"],
        "truncated_importance_sampling_ratio_min": [0.5],
    },
    "trl/loss_delta_kl_wide": {
        "loss_type": ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"],
        "importance_sampling_level": ["token", "sequence"],
        "vllm_importance_sampling_mode": [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
        "top_entropy_quantile": [1.0, 0.5],
    },
    "areal/tok_mask_ratio_0.5_2_ragged": {
        "rejection_sampling": [
            {"level": level, "action": action, "metric": metric, "agg": agg, "upper": 1.5, "lower": None}
            for level in ("token", "sequence")
            for agg in ("sum", "mean", "max")
            for action, metric in (("clamp", "ratio"), *(("mask", m) for m in ("ratio", "kl_k1", "kl_k2", "kl_k3")))
        ],
        "importance_sampling_level": ["token", "sequence"],
        "c_clip": [None, 2.0],
    },
    "pipelinerl/ppo_packed_ragged": {
        "policy_loss": ["ppo", "reinforce", "gspo"],
        "use_advantages": [True, False],
        "relu_log_p_weights": [True, False],
        "overlong_filtering": [True, False],
        "group_normalization": [True, False],
        "temperature": [1.0, 0.7],
    },
    "verl/loss_decoupled_tokis_token-mean_wide": {
        "loss_agg_mode": ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"],
        "bypass_mode": [True, False],
        "rollout_correction": [
            {"rollout_is": level, "rollout_is_threshold": bounds, "rollout_rs": rs, "rollout_rs_threshold": threshold}
            for level in (None, "token", "sequence")
            for bounds in (2.0, "0.5_3.0", " 1.5")
            for rs, threshold in ((None, None), ("seq_sum_k1", 2), ("token_k1, seq_max_k2", "0.5_2.0, 1.5"))
        ],
    },
    "miles/yaml_default_wide": {
        "use_tis": [True, False],
        "tis_mode": ["truncate", "clip", "mask"],
        "tis_level": ["token", "sequence", "geometric"],
        "tis_lower_bound": [None, 0.5],
        "rs_level": ["token", "sequence", "geometric"],
        "tis_batch_normalize": [True, False],
    },
}  # fmt: skip


def _refused(case: Case) -> bool:
    """What the system refuses, and with it trimtab's metrics of the system."""
    config = case.config
    normalised = case.system == "miles" and config["tis_batch_normalize"] and config["tis_level"] == "geometric"
    mode = config.get("vllm_importance_sampling_mode") or ""
    return normalised or (config.get("loss_type") == "vespo" and mode.startswith("sequence"))


@pytest.mark.parametrize("name", GRID)
def test_every_option_is_translated(name: str) -> None:
    """Nothing is refused, and each number is one: what it should be is for cases to say."""
    options = GRID[name]
    for values in itertools.product(*options.values()):
        data = dict(CASES[name].data)
        data["config"] = data["config"] | dict(zip(options, values, strict=True))
        case = Case(data)
        if _refused(case):
            continue
        for said in importlib.import_module(f"adapt.{case.system}").said(case):
            if said.path[0] in ("loss", "weights") or said.path[0].startswith("grad"):
                assert torch.as_tensor(said.value).isfinite().all(), (values, said.path)
