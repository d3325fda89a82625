"""Which settings differ, found from configs: the product's own, flat copies, and foreign ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from report.synthetic import config_with, flat, run_in_memory

from trimtab.config.compose import compose
from trimtab.config.convert import to_dict
from trimtab.errors import ConfigError
from trimtab.report.model import Run, RunState
from trimtab.report.settings import canonical, group, ignored, text


def run_of(config: dict[str, Any], seed: int | None = 0, name: str = "r") -> Run:
    """A completed run without metrics."""
    return Run(name, config, seed, RunState.completed, np.zeros(0, dtype=np.int64), {})


def labels(runs: list[Run], by: tuple[str, ...] = ()) -> list[str]:
    return [setting.label for setting in group(runs, by).settings]


def test_settings_are_what_differs_and_runs_of_one_differ_in_their_seed() -> None:
    runs = [run_in_memory({"algo.name": algo, "optim.lr": lr}, seed, [1.0])
            for algo in ("standard", "decoupled") for lr in (1e-3, 1e-4) for seed in (0, 1, 2)]  # fmt: skip
    found = group(runs)
    assert found.keys == ("algo", "lr")
    assert [s.label for s in found.settings] == ["algo=standard lr=0.001", "algo=standard lr=0.0001",
                                                 "algo=decoupled lr=0.001", "algo=decoupled lr=0.0001"]  # fmt: skip
    assert [[run.seed for run in s.runs] for s in found.settings] == [[0, 1, 2]] * 4
    assert found.settings[0].values == {"algo": "standard", "lr": "0.001"}


def test_what_only_says_where_a_run_writes_makes_no_setting() -> None:
    first = flat(config_with({"run_dir": "a", "tracker.group": "x", "checkpoint.every": 5, "rollout.record_every": 1}))
    second = flat(config_with({"run_dir": "b", "tracker.tags": ["t"], "resume": "auto"}, seed=1))
    assert labels([run_of(first), run_of(second, 1)]) == ["all runs"]
    for key in ("trainer.experiment_name", "trainer.default_local_dir", "hydra.job.num", "data.seed", "wandb_run_name"):
        assert ignored(key), key
    for key in ("algo.name", "task.path", "policy.path", "optim.lr", "rollout.dtype", "task.name", "model.name"):
        assert not ignored(key), key


def test_keys_that_follow_from_others_are_not_named() -> None:
    specs = {name: to_dict(compose([f"algo={name}"])) for name in ("standard", "decoupled", "bypass")}
    runs = [run_of(flat(spec) | {"seed": seed}, seed) for spec in specs.values() for seed in (0, 1)]
    found = group(runs)
    assert found.keys == ("algo",)
    assert len(found.settings) == 3
    assert found.implied, "the keys that algo=standard makes neutral differ too, and are told"


def test_the_same_config_reached_in_two_ways_is_one_setting_done_twice() -> None:
    # algo=standard takes no correction, so the level is set to its neutral value: the runs train the same.
    runs = [
        run_of(flat(to_dict(compose(["algo=standard", f"level={level}"]))), 0, level) for level in ("token", "sequence")
    ]
    found = group(runs)
    assert len(found.settings) == 1
    assert [(a.name, b.name) for a, b in found.superseded] == [("token", "sequence")]


def test_a_preset_names_its_settings_only_where_it_tells_them_apart() -> None:
    def preset(name: str, level: str, seed: int) -> Run:
        return run_of(flat(config_with({"mis.tis_level": level, "loss.name": level})) | {"preset": name}, seed)

    runs = [preset("miles/default", "token", 0), preset("miles/default", "token", 1), preset("trl/seq", "sequence", 0)]
    assert labels(runs) == ["preset=miles/default", "preset=trl/seq"]
    assert labels([*runs, preset("other/name", "token", 2)]) == ["level=token", "level=sequence"]


def test_flat_copies_of_a_foreign_run_are_their_keys() -> None:
    own = flat(config_with({"mis.tis_level": "sequence"}))
    copied = own | {"algo": "standard", "level": "sequence", "rs": "none", "veto": "none", "algo_metrics_only": False}
    del copied["algo.name"]
    assert canonical(copied) == own
    assert labels([run_of(own), run_of(copied, 1)]) == ["all runs"]
    assert canonical({"algo": "bypass", "level": "token"}) == {"algo.name": "bypass", "mis.tis_level": "token"}


def test_values_that_are_equal_are_equal_texts() -> None:
    assert text(1) == text(1.0) == text("1.0") == "1"
    assert text(1e-4) == text("1e-4") == text("0.0001") == "0.0001"
    assert (text(None), text(True), text("no"), text([0.9, 0.99])) == ("null", "true", "no", "[0.9, 0.99]")
    assert text("token") == "token"
    assert text("2026-01-01") == "2026-01-01"


def test_a_key_that_some_lack_differs() -> None:
    runs = [run_of({"a": 1, "seed": 0}), run_of({"a": 1, "b": 2, "seed": 0})]
    assert labels(runs) == ["b=–", "b=2"]


def test_two_keys_with_one_ending_are_named_in_full() -> None:
    runs = [run_of({"actor.lr": a, "critic.lr": c}) for a, c in ((1, 1), (1, 2), (2, 1))]
    assert group(runs).keys == ("actor.lr", "critic.lr")


def test_by_narrows_pools_and_extends() -> None:
    runs = [run_in_memory({"algo.name": algo, "mis.tis_level": level}, seed, [1.0])
            for algo in ("standard", "decoupled") for level in ("token", "sequence") for seed in (0, 1)]  # fmt: skip
    narrow = group(runs, ["algo"])
    assert narrow.pooled == ("level",)
    assert [len(s.runs) for s in narrow.settings] == [4, 4]
    assert narrow.superseded == ()
    assert {narrow.variants["algo=standard"][id(run)] for run in runs[:4]} == {"level=token", "level=sequence"}
    wide = group(runs, ["algo", "level", "optim.lr"])
    assert wide.settings[0].label == "algo=standard level=token lr=0.0003"
    assert group(runs, ["tis_level", "algo.name"]).keys == ("level", "algo")


def test_by_refuses_what_is_not_there() -> None:
    runs = [run_in_memory({}, 0, [1.0])]
    with pytest.raises(ConfigError, match=r"closest: .*level"):
        group(runs, ["levle"])
    with pytest.raises(ConfigError, match="averaged over"):
        group(runs, ["seed"])
    with pytest.raises(ConfigError, match=r"could be mis\.tis_level, x\.tis_level"):
        group([replace(runs[0], config={"mis.tis_level": 1, "x.tis_level": 2})], ["tis_level"])


def test_a_run_without_a_config_is_a_setting_of_its_own() -> None:
    runs = [run_in_memory({"algo.name": a}, 0, [1.0]) for a in ("standard", "bypass")]
    assert labels([*runs, run_of({}, None)]) == ["algo=standard", "algo=bypass", "algo=–"]


def test_hostile_names_and_values_stay_what_they_are() -> None:
    evil = "</script>|`\n"
    found = group([run_of({"k": evil, evil: 1}), run_of({"k": "b", evil: 2})])
    assert found.settings[0].values == {"k": evil}
    assert found.implied == (evil,)
