"""How fast and when contents move over a node's link, on clocks of the test."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.node.link import STEP, Link, QuietHours, local_time

NOON = datetime(2026, 3, 28, 12)
TIMES = st.times().map(lambda each: each.replace(microsecond=0))


class Clocks:
    """A clock that nothing sets, one on the wall, and sleep that moves both."""

    def __init__(self, wall: datetime = NOON) -> None:
        self.seconds, self.wall = 1000.0, wall
        self.jumps: dict[int, timedelta] = {}
        self.sleeps = 0

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= STEP
        self.seconds += seconds
        self.sleeps += 1
        self.wall += timedelta(seconds=seconds) + self.jumps.pop(self.sleeps, timedelta())

    def link(self, rate: float | None = None, hours: str = "", report: Any = id) -> Link:
        quiet_hours = QuietHours.parse(hours) if hours else None
        now = lambda: self.wall  # noqa: E731
        clock = lambda: self.seconds  # noqa: E731
        return Link(rate, quiet_hours, report, clock=clock, now=now, sleep=self.sleep)


@given(
    sizes=st.lists(st.integers(0, 10**7), min_size=1, max_size=20),
    gaps=st.lists(st.floats(0, 100), min_size=20, max_size=20),
    rate=st.floats(1, 1000),
)
def test_in_any_time_no_more_moves_than_the_rate_allows_and_one_content(
    sizes: list[int], gaps: list[float], rate: float
) -> None:
    clocks = Clocks()
    link = clocks.link(rate)
    moved: list[tuple[float, int]] = []
    for size, gap in zip(sizes, gaps, strict=False):
        clocks.seconds += gap
        link.move(lambda size=size: moved.append((clocks.seconds, size)) or size, lambda n: n)
    for first in range(len(moved)):
        for last in range(first, len(moved)):
            seconds = moved[last][0] - moved[first][0]
            before = sum(size for _, size in moved[first:last])
            assert before <= seconds * rate * 125_000 * (1 + 1e-9) + 1


def test_concurrent_transfers_share_the_rate() -> None:
    link, moving = Link(8 * 20), threading.Lock()
    start = time.monotonic()

    def call() -> int:
        assert moving.acquire(blocking=False)  # none beside another
        moving.release()
        return 10**6

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: link.move(call, lambda size: size), range(9)))
    assert time.monotonic() - start >= 8 / 20


def test_a_call_that_fails_leaves_the_link_to_the_next() -> None:
    link = Clocks().link(1.0)
    with pytest.raises(OSError, match="refused"):
        link.move(_refuse, len)
    assert link.move(lambda: b"content", len) == b"content"


def _refuse() -> bytes:
    raise OSError("refused")


@given(start=TIMES, end=TIMES, now=st.datetimes())
def test_quiet_hours_end_at_their_end_and_hold_from_their_start(
    start: Any, end: Any, now: datetime
) -> None:
    if start == end:
        return
    hours = QuietHours.parse(f"{start.isoformat()}-{end.isoformat()}")
    inside = start <= now.time() < end if start < end else not end <= now.time() < start
    left = hours.left(now)
    assert (left > 0) == inside
    if inside and now < datetime(9999, 12, 30):
        at = now + timedelta(seconds=left) + timedelta(microseconds=1)  # of rounding
        assert at.time().replace(microsecond=0) == end


@pytest.mark.parametrize(
    "text",
    ["", "8-18", "08:00", "08:00-24:30", "08:00-08:00", "08:00+01:00-18:00", "08:00-18:00-02:00"],
)
def test_hours_that_are_none_are_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match="08:00-18:00"):
        QuietHours.parse(text)


def test_contents_wait_for_the_end_of_quiet_hours_and_each_change_is_reported_once() -> None:
    clocks, reports = Clocks(NOON.replace(hour=23)), []
    link = clocks.link(hours="22:00-06:00", report=reports.append)
    for _ in range(3):
        link.move(lambda: b"content", len)
    end = NOON.replace(day=29, hour=6)
    assert end <= clocks.wall < end + timedelta(minutes=2)
    until, over = reports
    assert over is None
    assert abs(until - end) < timedelta(minutes=2)


@pytest.mark.parametrize("jump", [timedelta(hours=1), timedelta(hours=-1), timedelta(days=400)])
def test_a_clock_that_jumps_counts_at_once(jump: timedelta) -> None:
    clocks = Clocks()
    clocks.jumps[5] = jump
    clocks.link(hours="11:00-14:00").move(lambda: b"", len)
    assert clocks.wall.time() >= datetime(2026, 1, 1, 14).time()
    slept = timedelta(seconds=clocks.seconds - 1000)
    hours = timedelta(hours=2) - (jump if abs(jump) < timedelta(days=1) else timedelta())
    assert abs(slept - hours) < timedelta(minutes=2)


def test_the_rate_is_of_a_clock_that_nothing_sets() -> None:
    clocks = Clocks()
    link = clocks.link(8.0)
    clocks.jumps = {1: timedelta(days=-400), 2: timedelta(days=900)}
    link.move(lambda: bytes(10**6), len)
    link.move(lambda: b"", len)
    assert clocks.seconds - 1000 == pytest.approx(1.0)


def test_another_zone_of_the_machine_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = []
    for zone in ("XYZ0", "XYZ-5"):
        monkeypatch.setenv("TZ", zone)
        times.append(local_time())
    monkeypatch.undo()
    local_time()
    assert times[1] - times[0] == pytest.approx(timedelta(hours=5), abs=timedelta(seconds=9))


def test_a_node_that_ends_waits_for_no_content() -> None:
    link = Link(0.01)
    link.move(lambda: 10**9, lambda size: size)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(link.move, lambda: b"never", len) for _ in range(2)]
        link.end()
        for each in waiting:
            with pytest.raises(RuntimeError, match="ends"):
                each.result(3 * STEP)
