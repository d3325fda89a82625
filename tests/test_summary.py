"""The end of a run in numbers: the label of a gap made on purpose, and where it goes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from composing import composed

from trimtab import build
from trimtab.folder import RunFolder
from trimtab.spec import TrackerSpec
from trimtab.summary import mismatch_of, summarise

NOISE = ["rollout=transformers", "mismatch=logit_noise", "mismatch.strength=0.3"]


def test_the_injected_gap_and_the_kl_it_caused(tmp_path: Path) -> None:
    rows = [{"step": step, "train/mis_k3_kl": 0.01 * step} for step in range(31)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = summarise(RunFolder(tmp_path, "auto"), composed(*NOISE), 1.0)["mismatch"]
    assert told.pop("kl") == pytest.approx(0.055)  # the mean of steps 1 to 10: before training made more of it
    assert told == {"kind": "logit_noise", "strength": 0.3, "label": "logit_noise 0.3"}
    assert mismatch_of(composed("rollout=transformers"), [{"train/mis_k3_kl": math.nan}]) == {
        "kind": "none", "strength": 0.0, "label": "", "kl": None,
    }  # fmt: skip


@pytest.mark.parametrize(("overrides", "tags"), [(NOISE, ["mine", "mismatch logit_noise 0.3"]), (NOISE[:1], ["mine"])])
def test_a_tracker_is_told_as_a_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], tags: list[str]
) -> None:
    given: list[TrackerSpec] = []
    monkeypatch.setattr("trimtab.track.wandb.WandbTracker", given.append)
    spec = composed(*overrides, "tracker=wandb", "tracker.tags=[mine]")
    build.make_tracker(spec, RunFolder(tmp_path, "no"))
    assert [options.tags for options in given] == [tags]
    assert spec.tracker.tags == ["mine"]  # the configuration, and so the hash, stays as it was given


@pytest.mark.parametrize(
    ("mismatch", "bound"),
    [(["mismatch=shift"], 1e-3), (["mismatch=temperature"], 1e-3), (["mismatch=stale"], None),
     (["mismatch=dtype"], None), (["mismatch=quantised_weights"], None), ([], 1e-3)],
)  # fmt: skip
def test_a_probe_judges_only_what_is_not_meant(mismatch: list[str], bound: float | None) -> None:
    assert build.probe_bound(composed("rollout=transformers", *mismatch)) == bound
