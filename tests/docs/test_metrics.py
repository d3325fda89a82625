"""docs/metrics.md against what toy runs log, in both directions."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from toy import ToyPolicy, ToyStreaming, ToyTask, toy_spec

from trimtab.build import HandOverProbe
from trimtab.config import reference
from trimtab.config.groups import recipes
from trimtab.config.methods import methods
from trimtab.track import JsonlTracker, read_metrics
from trimtab.train.loop import Loop, Parts

PAGE = (Path(reference.__file__).parents[3] / "docs" / "metrics.md").read_text()
TERMS = ("loss.kl_coef=0.1", "loss.entropy_coef=0.01", "optim.epochs=2", "optim.minibatches=2",
         "evaluation.samples=2", "advantage.equal_groups=drop")  # fmt: skip
REJECTS = ("rs=token", "veto=at_1e-4", "mis.m2_threshold=0.04",
           "mis.reject=[{statistic:k3,level:sequence,over_tokens:mean,upper:0.5}]")  # fmt: skip
AROUND = ("advantage.overlong=punish", "advantage.overlong_buffer=3", "rollout.probe_every=1", "rollout.probe_bound=1",
          "rollout.record_every=1", "shadow=[verl/bypass_pg_is,trl/off_policy_mask]", "shadow_gradient_every=2",
          )  # fmt: skip
RUNS = {
    "the default": (),
    **{f"{algo} {mode}": (f"algo={algo}", f"tis_mode={mode}", *TERMS, *REJECTS)
       for algo, mode in (("standard", "off"), ("bypass", "off"), ("decoupled", "truncate"), ("reinforce", "clip"),
                          ("on_policy", "mask"), ("decoupled", "zero"), ("reinforce", "unbounded"))},
    **{f"loss={name}": (f"loss={name}", "loss.log_ratio_penalty=0.1", "loss.top_entropy=0.8", "level=token",
                         "loss.positive_nll_coef=0.1")
       for name in ("dppo_kl", "gspo", "vespo")},
    "everything around it": (*AROUND, *TERMS),
    "every shadow": ("shadow=all",),
    "an alarm and the probe without a proximal forward": ("algo=bypass", "rollout.probe_every=1",
                                                          "rollout.probe_bound=1"),
    "async": ("rollout.mode=async",),
    "one step off": ("rollout.mode=one_step_off",),
}  # fmt: skip


@cache
def logged(*overrides: str) -> frozenset[str]:
    """Every key that a toy run logs, presets' names as ``<method>``."""
    spec = toy_spec(*overrides, steps=4)
    parts = Parts(ToyPolicy(), ToyStreaming(0.1), ToyTask(), JsonlTracker(), HandOverProbe(4, 1.0), lambda *a: None,
                  (5,), methods(spec.shadow, spec))  # fmt: skip
    with TemporaryDirectory() as name:
        parts.tracker.start({}, "id", "name", Path(name))
        Loop(parts, spec, Path(name), "hash")()
        parts.tracker.finish("completed", {})
        keys = {key for row in read_metrics(Path(name) / "metrics.jsonl") for key in row} - {"step", "nonfinite"}
    return frozenset(_without_method(key.removeprefix("train/")) for key in keys)


def _without_method(key: str) -> str:
    place, _, figure = key.rpartition("/")
    if place == "alarm":
        return "alarm/<kind>"
    return f"shadow/<method>/{figure}" if place.removeprefix("shadow/") in recipes() else key


@pytest.mark.parametrize("run", RUNS)
def test_the_page_names_all_that_a_run_logs(run: str) -> None:
    keys = logged(*RUNS[run])
    assert len(keys) > 50
    assert sorted(key for key in keys if f"| `{key}` |" not in PAGE) == []


def test_the_page_names_nothing_that_no_run_logs() -> None:
    documented = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(documented) == len(set(documented))
    found = set().union(*(logged(*overrides) for overrides in RUNS.values()))
    assert sorted(set(documented) - found) == []


def test_every_metric_has_a_formula_a_unit_a_healthy_range_and_an_alarm() -> None:
    """Five cells a row; times are seconds and have two."""
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", PAGE, re.MULTILINE)
    cells = {key: re.split(r"(?<!\\)\|", rest) for key, rest in rows}
    assert [key for key, found in cells.items() if not all(cell.strip() for cell in found)] == []
    assert [key for key, found in cells.items() if len(found) != (1 if key.startswith(("time/", "perf/")) else 4)] == []
