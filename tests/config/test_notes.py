"""What is worth a line before a sweep starts: each thing once, with how many combinations it concerns."""

from __future__ import annotations

import itertools

import pytest

from trimtab.config.preflight import composed


def notes(*axes: list[str]) -> list[str]:
    checked = composed([list(one) for one in itertools.product(*axes)])
    assert checked.faults == []
    return checked.notes


ALGO = ["algo=standard", "algo=bypass", "algo=decoupled"]
STANDARD = "algo=standard reads no mis.* key"
BYPASS = "algo=bypass reads no tis_* key: its ratio current/rollout already is the importance weight"


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ((ALGO, ["seed=1", "seed=2"]), []),
        (
            (ALGO, ["mis.tis_upper_bound=2", "mis.tis_upper_bound=3"], ["seed=1", "seed=2"]),
            [f"mis.tis_upper_bound has no effect in 4 of 12 combinations: {why}" for why in (STANDARD, BYPASS)],
        ),
        (
            (["algo=standard"], ["mis.tis_upper_bound=3"], ["level=sequence", "level=token"]),
            [
                f"mis.tis_level has no effect in 1 of 2 combinations: {STANDARD}",
                f"mis.tis_upper_bound has no effect in all 2 combinations: {STANDARD}",
            ],
        ),
        (
            (["algo=standard"], ["mis.tis_upper_bound=3"], ["level=sequence"]),
            [f"mis.tis_level, mis.tis_upper_bound have no effect in the run: {STANDARD}"],
        ),
        (  # a reference goes through Hydra
            (["algo=standard"], ["mis.tis_upper_bound=${optim.lr}"], ["optim.lr=3.0", "optim.lr=2.5"]),
            [f"mis.tis_upper_bound has no effect in all 2 combinations: {STANDARD}"],
        ),
    ],
)
def test_what_nothing_reads_is_told_once(axes: tuple[list[str], ...], expected: list[str]) -> None:
    assert sorted(notes(*axes)) == sorted(expected)


def test_doubtful_bounds_are_counted() -> None:
    (line,) = notes(["level=geometric", "level=token"], ["mis.tis_upper_bound=2"], ["seed=1", "seed=2", "seed=3"])
    assert line.startswith("in 3 of 6 combinations: mis.tis_lower_bound=null mis.tis_upper_bound=2 at level=geometric")


def test_with_a_wrong_combination_only_that_is_told() -> None:
    checked = composed([["algo=standard", "level=sequence"], ["seed=x"]])
    assert len(checked.faults) == 1 and checked.notes == []
