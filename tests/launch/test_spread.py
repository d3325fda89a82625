"""Sharing of jobs over clusters: free room, weights, caps, and nothing lost in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.launch.clusters import Capacity
from trimtab.launch.spread import Offer, chunks, offer, spread, used
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


def test_what_was_sent_is_no_longer_free() -> None:
    left = used(Capacity(16, 4, 32, 8, 0, 1001, 5), ResourceSpec(cpus=2, gpus=1, nodes=2), 2)
    assert left == Capacity(8, 0, 32, 8, 0, 1001, 3)
    assert used(left, ResourceSpec(cpus=8), 9) == Capacity(0, 0, 32, 8, 0, 1001, 0)
