"""How long a sweep's combinations take to check: ``python benchmarks/preflight.py``, one line of JSON.

1,000 distinct combinations, composed, checked against the rules and hashed as ``python -m run -m`` does before it
starts anything, and a sample of them through Hydra's composing, which is what its own sweeper pays.
"""

from __future__ import annotations

import itertools
import json
import random
import time

import hydra

from trimtab.config import CONF, compose, config_hash, register
from trimtab.config.groups import recipes
from trimtab.config.many import compose_many
from trimtab.errors import ConfigError

COUNT, SAMPLE = 1000, 20


def combinations() -> list[list[str]]:
    """Over algorithms, levels, presets, rates and seeds, in an order of their own."""
    axes = [
        [f"algo={name}" for name in ("standard", "bypass", "decoupled")],
        [f"level={name}" for name in ("token", "sequence")],
        [f"preset={name}" for name in recipes()[::5]],
        [f"optim.lr={rate}" for rate in ("1e-4", "3e-4", "1e-3")],
        [f"seed={seed}" for seed in range(8)],
    ]
    found = [list(one) for one in itertools.product(*axes)]
    random.Random(0).shuffle(found)
    return found[:COUNT]


def told(overrides: list[str]) -> str:
    """Hydra's spec or refusal, as text."""
    try:
        return str(compose(overrides))
    except ConfigError as error:
        return str(error)


def main() -> None:
    runs = combinations()
    start = time.perf_counter()
    specs = compose_many(runs)
    hashes = {config_hash(spec) for spec in specs if not isinstance(spec, ConfigError)}
    ours = time.perf_counter() - start
    register()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):  # once, as in Hydra's own sweeps
        compose(runs[0])
        start = time.perf_counter()
        same = sum(told(overrides) == str(mine) for overrides, mine in list(zip(runs, specs, strict=True))[:SAMPLE])
        by_hydra = (time.perf_counter() - start) / SAMPLE
    print(json.dumps({
        "combinations": len(runs),
        "distinct": len(hashes),
        "refused": sum(isinstance(spec, ConfigError) for spec in specs),
        "seconds": round(ours, 2),
        "ms_each": round(1e3 * ours / len(runs), 2),
        "hydra_ms_each": round(1e3 * by_hydra, 1),
        "times_faster": round(by_hydra * len(runs) / ours, 1),
        "sample": SAMPLE,
        "sample_equal": same,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
