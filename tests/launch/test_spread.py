"""Sharing of jobs over clusters: free room, weights, caps, and nothing lost in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.launch.clusters import Capacity
from trimtab.launch.model import PlannedRun, RunStatus, State
from trimtab.launch.spread import Offer, chunks, left, offer, spread, used
from trimtab.spec.launch import ClusterSpec, ResourceSpec


def test_equal_clusters_get_equal_shares() -> None:
    assert spread(40, [Offer("a", 8, 8), Offer("b", 8, 8)]) == {"a": 20, "b": 20}


def test_free_room_is_taken_before_anything_waits() -> None:
    assert spread(6, [Offer("a", 2, 8), Offer("b", 4, 8)]) == {"a": 2, "b": 4}
    assert spread(3, [Offer("a", 0, 100, waiting=7), Offer("b", 3, 3)]) == {"a": 0, "b": 3}


def test_weight_shifts_shares_at_equal_room() -> None:
    assert spread(8, [Offer("a", 8, 8, weight=3.0), Offer("b", 8, 8)]) == {"a": 6, "b": 2}


def test_what_waits_goes_to_the_larger_and_emptier_cluster() -> None:
    assert spread(30, [Offer("a", 0, 20), Offer("b", 0, 10)]) == {"a": 20, "b": 10}
    busy = spread(10, [Offer("a", 0, 10, waiting=50), Offer("b", 0, 10)])
    assert busy == {"a": 0, "b": 10}
    late = spread(10, [Offer("a", 5, 10, wait=7200.0), Offer("b", 0, 10)])  # free, but reserved for somebody
    assert late == {"a": 0, "b": 10}


def test_caps_hold_and_the_rest_stays() -> None:
    assert spread(10, [Offer("a", 9, 9, cap=2), Offer("b", 9, 9, cap=3)]) == {"a": 2, "b": 3}
    assert spread(10, []) == {}


def test_weight_zero_takes_only_what_the_others_leave() -> None:
    assert spread(5, [Offer("a", 0, 1, waiting=99), Offer("b", 9, 9, weight=0.0)]) == {"a": 5, "b": 0}
    assert spread(5, [Offer("a", 0, 1, cap=2), Offer("b", 9, 9, weight=0.0)]) == {"a": 2, "b": 3}
    assert spread(5, [Offer("b", 9, 9, weight=0.0)]) == {"b": 5}


@pytest.mark.parametrize(
    ("jobs", "found", "expected"),
    [
        (8, [Offer("a", 16, 16), Offer("b", 16, 16)], [4, 4]),
        (8, [Offer("a", 15, 16, waiting=1), Offer("b", 12, 16, waiting=4)], [5, 3]),
        (9, [Offer("a", 16, 16), Offer("b", 8, 8)], [6, 3]),  # in proportion to what is free
        (8, [Offer("a", 16, 16, weight=3.0), Offer("b", 16, 16)], [6, 2]),
        (8, [Offer("a", 16, 16, cap=1), Offer("b", 16, 16)], [1, 7]),
        (8, [Offer("a", 16, 16, cap=0), Offer("b", 16, 16, cap=5)], [0, 5]),
        (1, [Offer("a", 3, 16), Offer("b", 16, 16)], [0, 1]),
        (1, [Offer("a", 16, 16), Offer("b", 16, 16)], [1, 0]),
        (8, [Offer("a", 0, 16), Offer("b", 0, 16)], [4, 4]),  # all full
        (6, [Offer("a", 0, 16, waiting=16), Offer("b", 0, 16)], [0, 6]),
        (8, [Offer("b", 16, 16)], [8]),  # the other one cannot be reached
        (4, [Offer("a", 16, 16, wait=7200.0), Offer("b", 16, 16)], [0, 4]),  # free, but reserved
        (
            40,
            [Offer("a", 16, 16, wait=1e6), Offer("b", 16, 16)],
            [8, 32],
        ),  # a guess is worth one queue's length at most
    ],
)
def test_shares(jobs: int, found: list[Offer], expected: list[int]) -> None:
    assert list(spread(jobs, found).values()) == expected


offers = st.lists(
    st.builds(
        Offer,
        cluster=st.uuids().map(str),
        room=st.integers(0, 20),
        size=st.integers(1, 50),
        waiting=st.integers(0, 50),
        cap=st.none() | st.integers(0, 30),
        weight=st.floats(0, 10),
        wait=st.floats(0, 1e5),
    ),
    max_size=4,
)


@given(st.integers(0, 60), offers)
def test_every_job_goes_somewhere_unless_all_caps_are_reached(jobs: int, found: list[Offer]) -> None:
    share = spread(jobs, found)
    assert all(share[one.cluster] <= (jobs if one.cap is None else one.cap) for one in found)
    most = sum(jobs if one.cap is None else one.cap for one in found)
    assert sum(share.values()) == min(jobs, most)


@given(st.integers(1, 5000), st.integers(1, 1001))
def test_chunks_are_as_few_and_as_equal_as_can_be(count: int, largest: int) -> None:
    found = chunks(count, largest)
    assert sum(found) == count and max(found) <= largest
    assert len(found) == -(-count // largest) and max(found) - min(found) <= 1


@pytest.mark.parametrize(
    ("asked", "room"),
    [
        (ResourceSpec(cpus=2), 8),
        (ResourceSpec(cpus=2, gpus=1), 3),
        (ResourceSpec(cpus=4, tasks_per_node=2), 2),
        (ResourceSpec(cpus=4, nodes=2), 2),
        (ResourceSpec(cpus=2, gpus=2, nodes=2), 0),
    ],
)
def test_room_follows_from_what_a_run_asks(asked: ResourceSpec, room: int) -> None:
    found = offer("a", ClusterSpec(), Capacity(16, 3, 32, 4, 0, 1001, None), asked, live=0)
    assert found.room == room


def test_jobs_that_wait_take_room_and_limits_make_the_cap() -> None:
    capacity = Capacity(16, 0, 16, 0, 5, 1001, 30)
    assert offer("a", ClusterSpec(), capacity, ResourceSpec(), live=0) == Offer("a", 3, 8, 5, 30)
    assert offer("a", ClusterSpec(max_jobs=10), capacity, ResourceSpec(), live=4).cap == 6
    assert offer("a", ClusterSpec(max_jobs=10), capacity, ResourceSpec(), live=40).cap == 0


def test_an_estimate_counts_only_where_nobody_is_queued() -> None:
    """SLURM adds up the time limits of held jobs as well: it foretold 12 h with 14 of 16 cores idle."""
    idle = Capacity(14, 0, 16, 0, 0, 1001, None)
    assert offer("a", ClusterSpec(), idle, ResourceSpec(cpus=1), live=0, wait=7200.0).wait == 7200.0
    for queued in (replace(idle, held=1), replace(idle, waiting=2)):
        assert offer("a", ClusterSpec(), queued, ResourceSpec(cpus=1), live=0, wait=7200.0).wait == 0.0
    assert offer("a", ClusterSpec(), replace(idle, held=9), ResourceSpec(cpus=1), live=0).room == 14


def test_what_was_sent_is_no_longer_free() -> None:
    left = used(Capacity(16, 4, 32, 8, 0, 1001, 5), ResourceSpec(cpus=2, gpus=1, nodes=2), 2)
    assert left == Capacity(8, 0, 32, 8, 0, 1001, 3)
    assert used(left, ResourceSpec(cpus=8), 9) == Capacity(0, 0, 32, 8, 0, 1001, 0)


def test_what_stays_is_told_with_numbers() -> None:
    def runs(*states: str) -> list[RunStatus]:
        return [
            RunStatus(PlannedRun(str(i), "", i, ()), State(state), cluster="a" if i < 2 else "b", job=str(i))
            for i, state in enumerate(states)
        ]

    clusters = {"a": ClusterSpec(max_jobs=2), "b": ClusterSpec(max_jobs=3), "c": ClusterSpec()}
    assert left(clusters, runs("running", "pending", "unknown", "completed", "unsubmitted", "unsubmitted")) == [
        "2 of 6 runs are not submitted (a has 2 of max_jobs=2, b has 1 of max_jobs=3); trimtab sweep resume submits "
        "what there is room for, with --wait all of them"
    ]
    (line,) = left({"c": ClusterSpec()}, runs("completed", "unsubmitted"))
    assert line.startswith("1 of 2 runs is not submitted; trimtab sweep resume")
    assert left(clusters, runs("running", "failed")) == [] and left({}, runs("unsubmitted")) == []
