"""Schema twins and conversions: one home for fields, and lossless ways between its forms."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from omegaconf import OmegaConf

from trimtab.config import compose, config_hash, from_dict, read_yaml, resolve, to_dict, to_spec, to_yaml
from trimtab.config.keys import fields_of, options, value_of, with_values, written
from trimtab.config.schema import twin
from trimtab.errors import ConfigError
from trimtab.spec import Level, RejectSpec, RunSpec, Statistic


def test_twins_have_the_fields_types_and_defaults_of_spec() -> None:
    def same(frozen: type, mirrored: type) -> int:
        count = 0
        assert [f.name for f in dataclasses.fields(frozen)] == [f.name for f in dataclasses.fields(mirrored)]
        for f in dataclasses.fields(frozen):
            hint, twin_hint = get_type_hints(frozen)[f.name], get_type_hints(mirrored)[f.name]
            if dataclasses.is_dataclass(hint):
                count += same(hint, twin_hint)  # type: ignore[arg-type]
            elif f.name == "reject":
                assert same(RejectSpec, get_args(twin_hint)[0]) == len(fields_of(RejectSpec)) == 9
                count += 1
            else:
                assert hint == twin_hint
                count += 1
        return count

    assert same(RunSpec, twin(RunSpec)) == len(options()) > 100


def test_a_twin_is_mutable_and_not_shared() -> None:
    one, other = twin(RunSpec)(), twin(RunSpec)()
    one.mis.tis_level = Level.sequence
    one.optim.betas.append(1.0)
    assert other.mis.tis_level is Level.token and other.optim.betas == [0.9, 0.99]


def test_the_schema_alone_is_the_spec_alone() -> None:
    assert to_spec(OmegaConf.structured(twin(RunSpec))) == RunSpec()


def test_dict_and_yaml_round_trip(tmp_path: Path) -> None:
    spec = compose(
        ["preset=miles/default", "tis_mode=clip", "+task.options.a=[1,x]", "task=custom", "task.path=json.decoder:c"]
    )
    assert from_dict(to_dict(spec)) == spec
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(spec))
    assert read_yaml(path) == spec
    assert OmegaConf.load(path).mis.tis_mode == "clip"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["tis_mode=off", "resume=no"],
        ["preset=miles/default", "algo=reinforce"],
        ["preset=verl/decoupled_seq_is_rs", "shadow=all", "loss=vespo", "level=token"],
    ],
)
def test_a_saved_config_resolves_to_the_same_hash(tmp_path: Path, overrides: list[str]) -> None:
    spec = compose(overrides)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(spec))
    assert resolve(read_yaml(path)) == spec and config_hash(read_yaml(path)) == config_hash(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [("mis: {tis_levl: token}", "tis_levl"), ("[1]", "list"), ("mis: {tis_level: geo}", "geo"), (None, "there is no")],
)
def test_what_is_no_config_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_yaml(path)


def test_keys_are_read_and_replaced() -> None:
    spec = with_values(RunSpec(), {"mis.tis_level": Level.geometric, "mis.use_rs": True, "steps": 7})
    assert (spec.mis.tis_level, spec.mis.use_rs, spec.steps) == (Level.geometric, True, 7)
    assert value_of(spec, "mis.tis_level") is Level.geometric and spec.loss == RunSpec().loss


def test_values_are_written_as_users_type_them() -> None:
    values = [Level.token, None, True, 1e-6, 2.0, [0.9, 1.0], {"a": None}, "x"]
    assert [written(v) for v in values] == ["token", "null", "true", "1e-06", "2", "[0.9,1]", "{a:null}", "x"]
    assert written([RejectSpec(Statistic.k3, upper=0.01)]) == "[{statistic:k3,upper:0.01}]"


def test_every_option_has_help() -> None:
    assert [key for key, option in options().items() if len(option.help) < 5] == []


def test_composing_and_checking_imports_no_heavy_library() -> None:
    code = (
        "import sys, run; from trimtab.config import compose, config_hash; config_hash(compose(['level=sequence']));"
        "print([m for m in ('torch', 'transformers', 'vllm', 'numpy', 'pyarrow', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert done.stdout.strip() == "[]"


ROOT = Path(__file__).parents[2]
