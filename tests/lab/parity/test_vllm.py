"""The ladder with a real vLLM: quiet when healthy, with prefix caching; a stale cache is named."""

from __future__ import annotations

import pytest
import torch

from trimtab.lab.bench import compose_to_measure, opened, silent
from trimtab.lab.parity import path, semantics, weights
from trimtab.lab.parity.ladder import set_up
from trimtab.lab.parity.model import changes, healthy
from trimtab.lab.parity.state import Effort
from trimtab.rollout.vllm import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
EFFORT = Effort(prompts=8, group=2, tokens=4, longs=3, versions=2)


@torch.no_grad()
def test_healthy_then_a_prefix_cache_that_outlives_the_hand_over(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["rollout=vllm", "policy.warmup_accuracy=0", "rollout.max_tokens=4", "rollout.prefix_caching=true"]
    with opened(compose_to_measure([*given, f"policy.cache_dir={tmp_path_factory.mktemp('cache')}"])) as bench:
        lab = set_up(bench, EFFORT, "task", silent)
        for part in (semantics.climb, path.climb, weights.climb):
            part(lab)
        assert healthy(lab.rungs), [(r.name, r.cause) for r in lab.rungs if r.fault]
        # The fault: nothing drops the cache any more. Prompts were cached under version 2; the next hand-over is 3.
        lab.rungs.clear()
        lab.bench.engine.generate(lab.longs, lab.sampling(group=1))
        monkeypatch.setattr(VllmEngine, "_drop_cache", lambda self: None)
        lab.bench.engine.generate(lab.longs, lab.sampling(group=1))
        weights.hand_over(lab, 3)
        assert [rung.cause.name for rung in changes(lab.rungs) if rung.cause][:1] == ["stale_prefix_cache"]
