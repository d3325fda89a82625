"""The probe: exact figures, planted faults, and no false alarm from rounding."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trimtab.config.resolve import probe_bound
from trimtab.errors import EngineError
from trimtab.rollout.probe import probe, verdict
from trimtab.spec import Dtype


def rows(seed: int = 0, lengths: tuple[int, ...] = (12, 7, 20, 1)) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [(-rng.exponential(1.5, n)).tolist() for n in lengths]


def test_figures_are_exact() -> None:
    result = probe([[-1.0, -2.0], [-3.0], []], [[-1.5, -2.0], [-2.0], []])
    assert (result.mean_abs, result.max_abs, result.tokens, result.missing) == (0.5, 1.0, 3, 0)
    engine, trainer = rows(), rows(1)
    pairs = np.array([(a, b) for x, y in zip(engine, trainer, strict=True) for a, b in zip(x, y, strict=True)])
    result = probe(engine, trainer)
    assert result.mean_abs == pytest.approx(np.abs(pairs[:, 0] - pairs[:, 1]).mean())
    assert result.correlation[1] == pytest.approx(np.corrcoef(pairs.T)[0, 1])


@pytest.mark.parametrize("dtype", list(Dtype))
def test_rounding_passes_the_bound_of_its_dtype(dtype: Dtype) -> None:
    std = {Dtype.float32: 7.8e-6, Dtype.float16: 0.0068, Dtype.bfloat16: 0.067}[dtype]
    rng = np.random.default_rng(1)
    trainer = [[x + float(rng.normal(0, std)) for x in row] for row in rows()]
    result = probe(rows(), trainer)
    verdict(result, probe_bound(dtype, Dtype.float32))
    assert result.shift == 0
    assert result.mean_abs < probe_bound(Dtype.float32, dtype) / 1.5


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_planted_shift_is_named(shift: int) -> None:
    trainer = rows()
    engine = [[row[i + shift] if 0 <= i + shift < len(row) else -1.0 for i in range(len(row))] for row in trainer]
    result = probe(engine, trainer)
    assert result.shift == shift
    with pytest.raises(
        EngineError, match=rf"moved by \{shift:+d} position .*shifted by one token.*rollout.probe_bound="
    ):
        verdict(result, 1e-3)


def test_old_weights_are_refused_without_naming_a_shift() -> None:
    rng = np.random.default_rng(2)
    result = probe(rows(), [[x + float(rng.normal(0, 0.13)) for x in row] for row in rows()])
    assert result.shift == 0
    with pytest.raises(EngineError, match=r"mean \|log-ratio\| 0\.0973.*tied embeddings.*prefix cache.*rollout.dtype"):
        verdict(result, 1e-3)


def test_missing_values_are_left_out_and_infinite_ones_count() -> None:
    result = probe([[-1.0, math.nan, -math.inf]], [[-1.25, -2.0, -math.inf]])
    assert (result.mean_abs, result.tokens, result.missing) == (0.125, 2, 1)
    with pytest.raises(EngineError):
        verdict(probe([[-1.0, -math.inf]], [[-1.0, -2.0]]), 0.1)
    with pytest.raises(EngineError, match=r"no token was scored.*rollout.probe_every=0"):
        verdict(probe([[math.nan]], [[-1.0]]), 0.1)


def test_rows_of_other_lengths_are_refused() -> None:
    with pytest.raises(EngineError, match=r"rows of \[2\] tokens, the trainer of \[3\]"):
        probe([[-1.0, -1.0]], [[-1.0, -1.0, -1.0]])


def test_constant_log_probs_have_no_correlation_and_no_shift() -> None:
    result = probe([[-1.0] * 5], [[-1.0] * 5])
    assert result.shift == 0 and math.isnan(result.correlation[1])
    verdict(result, 1e-3)
