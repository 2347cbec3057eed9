"""A bell wakes the process that waits, and neither end can hold up or wear out the other."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from flwr_distill.node.bell import Bell


@pytest.fixture
def ends() -> Iterator[tuple[Bell, Bell, int]]:
    """The end to wait at, the end to ring, and a way to end the process that rings."""
    wait, ring = os.pipe()
    yield Bell(wait), Bell(ring), ring
    for end in (wait, ring):
        with suppress(OSError):  # the test has closed it
            os.close(end)


def seconds(bell: Bell, at_most: float) -> float:
    start = time.monotonic()
    bell.wait(at_most)
    return time.monotonic() - start


def test_a_ring_ends_a_wait(ends: tuple[Bell, Bell, int]) -> None:
    waits, rings, _ = ends
    timer = threading.Timer(0.2, rings.ring)
    timer.start()
    assert 0.1 < seconds(waits, 20) < 5
    timer.join()
    assert seconds(waits, 0.2) > 0.1  # once for each ring, or for several


def test_a_ring_that_nobody_waits_for_ends_the_next_wait(ends: tuple[Bell, Bell, int]) -> None:
    waits, rings, _ = ends
    rings.ring()
    rings.ring()
    assert seconds(waits, 20) < 5
    assert seconds(waits, 0.2) > 0.1


def test_one_who_rings_is_not_held_up_by_one_who_does_not_hear(
    ends: tuple[Bell, Bell, int],
) -> None:
    _, rings, _ = ends
    for _ in range(100_000):
        rings.ring()  # a pipe holds fewer


def test_where_the_other_process_has_ended_a_wait_takes_its_time(
    ends: tuple[Bell, Bell, int],
) -> None:
    waits, _, descriptor = ends
    os.close(descriptor)
    assert seconds(waits, 0.3) > 0.25


def test_one_who_rings_outlives_the_other(ends: tuple[Bell, Bell, int]) -> None:
    waits, rings, _ = ends
    os.close(waits._descriptor)
    rings.ring()
