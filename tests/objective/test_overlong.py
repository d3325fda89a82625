"""The punishment of long responses."""

from __future__ import annotations

import pytest
import torch

from trimtab.objective.overlong import overlong_penalty


def test_falls_over_the_buffer_and_stays_beyond() -> None:
    length_B = torch.tensor([0, 12, 16, 17, 18, 20, 25])
    found = overlong_penalty(length_B, 20, 4, 0.5).tolist()
    assert found == pytest.approx([0.0, 0.0, 0.0, -0.125, -0.25, -0.5, -0.5], abs=1e-15)


def test_without_a_buffer_only_what_is_too_long_is_punished() -> None:
    assert overlong_penalty(torch.tensor([3, 4, 5]), 4, 0, 2.0).tolist() == [0.0, 0.0, -2.0]
