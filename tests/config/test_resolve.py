"""Derived defaults, and what is said of keys without an effect."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from config.specs import spec_of

from trimtab.config import check, compose, doubtful, ignored, resolve
from trimtab.config.resolve import probe_bound
from trimtab.errors import ConfigError
from trimtab.spec import (
    Aggregate,
    Algo,
    Dtype,
    Level,
    Numerator,
    PromptStyle,
    RunSpec,
    TisMode,
)


def bounds(spec: RunSpec) -> tuple[float | None, ...]:
    mis = resolve(spec).mis
    return mis.tis_lower_bound, mis.tis_upper_bound, mis.rs_lower_bound, mis.rs_upper_bound


def clip(**values: Any) -> RunSpec:
    return spec_of(mis__tis_mode=TisMode.clip, mis__use_rs=True, **values)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (clip(), (0.5, 2.0, 0.5, 2.0)),
        (clip(mis__tis_level=Level.geometric), (0.999, 1.001, 0.5, 2.0)),
        (clip(mis__rs_level=Level.geometric), (0.5, 2.0, 0.999, 1.001)),
        (clip(mis__tis_level=Level.sequence, mis__rs_level=Level.sequence), (0.5, 2.0, 0.5, 2.0)),
        # an upper bound alone gives its inverse as the lower one, and rs at the same level takes both
        (clip(mis__tis_upper_bound=4.0), (0.25, 4.0, 0.25, 4.0)),
        (clip(mis__tis_lower_bound=0.1), (0.1, 2.0, 0.1, 2.0)),
        # at another level the rs bounds are that level's own
        (clip(mis__tis_upper_bound=4.0, mis__rs_level=Level.geometric), (0.25, 4.0, 0.999, 1.001)),
        # what is given for rs is kept; the other bound is the tis one where it is shared, else the inverse
        (clip(mis__tis_upper_bound=4.0, mis__rs_upper_bound=8.0), (0.25, 4.0, 0.25, 8.0)),
        (clip(mis__rs_upper_bound=8.0), (0.5, 2.0, 0.125, 8.0)),
        # truncate has no lower bound of its own, but passes it on
        (spec_of(mis__use_rs=True, mis__tis_lower_bound=0.2, mis__tis_upper_bound=3.0), (None, 3.0, 0.2, 3.0)),
        # bypass and off have no weights whose bounds could be passed on
        (clip(algo__name=Algo.bypass, mis__tis_upper_bound=4.0), (None, None, 0.5, 2.0)),
        (spec_of(mis__tis_mode=TisMode.off, mis__use_rs=True, mis__tis_upper_bound=4.0), (None, None, 0.5, 2.0)),
        (spec_of(algo__name=Algo.standard, mis__use_rs=True), (None, None, None, None)),
        # unbounded has nothing to pass on; zero and mask do; a lower bound of 0 is kept, as none
        (
            spec_of(mis__tis_mode=TisMode.unbounded, mis__use_rs=True, mis__tis_upper_bound=4.0),
            (None, None, 0.5, 2.0),
        ),
        (spec_of(mis__tis_mode=TisMode.zero, mis__use_rs=True), (0.5, 2.0, 0.5, 2.0)),
        (
            spec_of(mis__tis_mode=TisMode.zero, mis__use_rs=True, mis__tis_lower_bound=0.0, mis__tis_upper_bound=3.0),
            (0.0, 3.0, 0.0, 3.0),
        ),
    ],
)
def test_bounds(spec: RunSpec, expected: tuple[float | None, ...]) -> None:
    assert bounds(spec) == expected


@pytest.mark.parametrize(
    ("algo", "numerator"),
    [
        (Algo.standard, None),
        (Algo.bypass, Numerator.current),
        (Algo.on_policy, Numerator.current),
        (Algo.decoupled, Numerator.proximal),
    ],
)
def test_numerator(algo: Algo, numerator: Numerator | None) -> None:
    assert resolve(spec_of(algo__name=algo)).mis.numerator is numerator


def test_other_derived_defaults() -> None:
    assert resolve(RunSpec()).loss.sum_constant is None
    summed = spec_of(loss__aggregate=Aggregate.sequence_sum, rollout__max_tokens=32)
    assert resolve(summed).loss.sum_constant == 32.0
    assert resolve(spec_of(task__style=PromptStyle.few_shot)).task.stop == "\n"
    assert resolve(RunSpec()).rollout.probe_bound == 1e-3
    assert resolve(spec_of(rollout__probe_bound=0.5)).rollout.probe_bound == 0.5


@pytest.mark.parametrize(
    ("rollout", "policy", "bound"),
    [
        (Dtype.float32, Dtype.float32, 1e-3),
        (Dtype.float16, Dtype.float32, 0.02),
        (Dtype.float32, Dtype.float16, 0.02),
        (Dtype.bfloat16, Dtype.float16, 0.1),
        (Dtype.float32, Dtype.bfloat16, 0.1),
    ],
)
def test_probe_bound(rollout: Dtype, policy: Dtype, bound: float) -> None:
    assert probe_bound(rollout, policy) == bound


def test_every_combination_resolves_once_for_all_or_is_refused_with_a_mend() -> None:
    rejections = (None, *Level)
    axes = (Algo, TisMode, Level, rejections, (None, 1e-4), (None, *Numerator))
    refused = 0
    for algo, mode, level, rs, veto, numerator in itertools.product(*axes):
        spec = spec_of(
            algo__name=algo, mis__tis_mode=mode, mis__tis_level=level, mis__use_rs=rs is not None,
            mis__rs_level=rs or Level.token, mis__rs_veto_threshold=veto, mis__numerator=numerator,
        )  # fmt: skip
        once = resolve(spec)
        assert resolve(once) == once
        wrong = {Algo.decoupled: Numerator.current, Algo.bypass: Numerator.proximal, Algo.on_policy: Numerator.proximal}
        try:
            check(spec)
        except ConfigError as error:
            refused += 1
            assert numerator is wrong[algo] and "; for example mis.numerator=" in str(error)
        else:
            assert numerator is None or numerator is not wrong.get(algo)
    assert refused == 3 * len(TisMode) * len(Level) * 4 * 2


def test_what_has_no_effect_is_said() -> None:
    spec = spec_of(algo__name=Algo.standard, mis__tis_level=Level.geometric, mis__use_rs=True)
    assert ignored(spec) == [
        "algo=standard reads no mis.* key: mis.tis_level=geometric, mis.use_rs=true have no effect"
    ]
    assert ignored(spec_of(mis__tis_lower_bound=0.2)) == [
        "tis_mode=truncate has no lower bound: mis.tis_lower_bound=0.2 has no effect"
    ]
    assert ignored(RunSpec()) == ignored(spec_of(algo__name=Algo.bypass)) == []


def test_a_lower_bound_that_rs_falls_back_to_is_not_called_ignored() -> None:
    assert ignored(spec_of(mis__tis_lower_bound=0.2, mis__use_rs=True)) == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], ""),
        (["level=geometric"], ""),
        (["level=geometric", "mis.tis_upper_bound=2"], "mis.tis_upper_bound=2 at level=geometric"),
        (["rs=geometric", "mis.rs_upper_bound=2"], "mis.rs_lower_bound=0.5 mis.rs_upper_bound=2 at level=geometric"),
        (["tis_mode=clip", "mis.tis_upper_bound=1.001"], "at level=token concern nearly everything"),
        (["tis_mode=off", "level=geometric", "mis.tis_upper_bound=2"], ""),
    ],
)
def test_bounds_that_can_hardly_be_meant_are_noted(overrides: list[str], told: str) -> None:
    lines = doubtful(compose(overrides))
    assert (told in lines[0] and "(null)" in lines[0]) if told else lines == []
