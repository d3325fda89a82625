"""Composing many combinations gives what Hydra's composing gives, one by one: specs and refusals alike."""

from __future__ import annotations

import random
from collections.abc import Iterator

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from trimtab.config import CONF, compose, many, register
from trimtab.config.groups import choices, group_names
from trimtab.config.keys import options, sweep_options, written
from trimtab.config.many import compose_many
from trimtab.errors import ConfigError
from trimtab.spec import RunSpec

ODD = [
    "steps=0", "steps=x", "steps=1.5", "steps=1e400", "levl=token", "mis=token", "+mis.extra=1", "++steps=3",
    "+steps=3", "~steps", "~mis", "~algo", "level=geo", "level=[token]", "level=token,geometric", "rs=null",
    "veto=1e-4", "sweep=null", "steps=${seed}", "mis.rs_upper_bound=${mis.tis_upper_bound}",
    "policy.cache_dir=${oc.env:NO_SUCH_VARIABLE}", "+task.options.a=1", "+task.options.a=[1,2.0]",
    "+task.options.b.c=1", "+task.options={a:1}", "task.options={a:1}", "task.options.a=1",
    "++task.options.a=2", "shadow=all", "shadow=[miles/default,none]", "shadow={a:1}", "shadow=x",
    "mis.reject=[{statistic:k3,level:sequence,over_tokens:mean,upper:0.01}]", "mis.reject=[{statistic:k9}]",
    "mis.reject=[]", "mis.reject=3", "optim.betas=[0.9,0.95]", "optim.betas=[]", "optim.betas=[a]",
    "tracker.tags=[x,y]", "run_dir=a=b", "run_dir='a b'", "task.system='$(touch x); \"q\" = ü, [y]'",
    "task.system=''", "task.system=???", "wait=true", "wait=perhaps", "runs_per_job=2", "launch.at_once=x",
    "launch.resources=large", "launch.rules=[{use:3}]", "+launch.clusters.mine.partition=gpu",
    "+launch.clusters.mine.partitoin=gpu", "launch.clusters.mine.partition=gpu",
    "+launch.classes.large.gpus=two", "hydra.sweep.dir=x", "optim.lr=1e-3", "optim.lr=-1", "rollout.top_k=5",
    "seed=int(3.0)", "loss.dual_clip=null", "steps=null", "a b", "steps", "level@mis=token",
    "mismatch.kind=logit_noise",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_hydra() -> Iterator[None]:
    """Hydra set up once: composing is then twice as fast."""
    register()
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def told(overrides: list[str]) -> RunSpec | str:
    try:
        return compose(overrides)
    except ConfigError as error:
        return str(error)


def same(overrides: list[str]) -> None:
    (found,) = compose_many([overrides])
    assert (str(found) if isinstance(found, ConfigError) else found) == told(overrides), overrides


@pytest.mark.parametrize("odd", ODD)
def test_what_is_odd_is_as_hydra_has_it(odd: str) -> None:
    same(["algo=standard", odd, "seed=1"])
    same([odd, "level=geo"])


@pytest.mark.slow
@pytest.mark.parametrize("group", sorted(group_names()))
def test_every_choice_is_as_hydra_has_it(group: str) -> None:
    for choice in choices(group):
        same([f"{group}={choice}"])


def some(source: random.Random) -> list[str]:
    """A combination as a sweep might have it: some choices, some values, in a quarter of them something odd."""
    groups = source.sample(sorted(group_names()), source.randint(0, 6))
    found = [f"{group}={source.choice(choices(group))}" for group in groups]
    for option in source.sample([*options().values(), *sweep_options().values()], source.randint(0, 4)):
        if option.choices:
            found.append(f"{option.key}={source.choice(option.choices)}")
        elif option.type in (int, float):
            found.append(f"{option.key}={source.choice([0, 1, 2, 0.5, 64, -1, 1e-3, 'null', option.default])}")
        elif not isinstance(option.default, (list, dict)):
            found.append(f"{option.key}={written(option.default) or 'x'}")
    if source.random() < 0.25:
        found.append(source.choice(ODD))
    source.shuffle(found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))  # 120 combinations; Hydra takes 0.4 s for each
def test_random_combinations_are_as_hydra_has_them(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(60):
        same(some(source))


def test_plain_combinations_do_without_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(overrides: list[str]) -> RunSpec:
        raise AssertionError(f"Hydra was asked for {overrides}")

    monkeypatch.setattr(many, "compose", never)
    presets = [[f"preset={name}", "algo=bypass", "seed=3", "optim.lr=1e-4"] for name in choices("preset")]
    found = compose_many([*presets, ["policy=smollm2", "debug=smoke", "level=geometric", "launcher=slurm_fleet"]])
    assert sum(isinstance(spec, RunSpec) for spec in found) > len(found) / 2  # the rules refuse some


def test_a_wrong_word_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def counted(overrides: list[str]) -> RunSpec:
        asked.append(list(overrides))
        return compose(overrides)

    monkeypatch.setattr(many, "compose", counted)
    found = compose_many([["level=geometrical", f"seed={seed}", "steps=many"] for seed in range(50)])
    assert {str(error) for error in found} == {told(["level=geometrical", "steps=many"])} and len(asked) <= 2
