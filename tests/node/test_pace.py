"""The pace follows the work, within its bounds, and nodes do not keep step."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_distill.node.pace import JITTER, KEEN, LONG_SHARE, SHARE, Pace, pause

properties = settings(derandomize=True, max_examples=50)
seconds = st.floats(0, 1e6)
bounds = st.tuples(st.floats(0.01, 60), st.floats(0.01, 600)).map(sorted)


@properties
@given(seconds, bounds, st.floats(0, 1e9))
def test_a_pause_is_never_shorter_than_busy_nor_longer_than_idle(idle_for, bounds, spacing):
    busy, idle = bounds
    assert busy <= pause(idle_for, busy=busy, idle=idle, spacing=spacing) <= idle


@properties
@given(seconds, seconds, bounds, st.floats(0, 1e9))
def test_the_longer_a_node_is_idle_the_longer_it_waits(one, other, bounds, spacing):
    busy, idle = bounds
    shorter, longer = (
        pause(idle_for, busy=busy, idle=idle, spacing=spacing) for idle_for in sorted((one, other))
    )
    assert shorter <= longer


@properties
@given(seconds)
def test_a_message_waits_at_most_a_share_of_what_its_node_has_waited(idle_for):
    assert pause(idle_for, busy=0.05, idle=20) <= max(0.05, SHARE * idle_for)


@properties
@given(seconds, st.floats(0, 1e9))
def test_no_server_puts_a_node_to_sleep(idle_for, spacing):
    assert pause(idle_for, busy=0.05, idle=20, spacing=spacing) <= max(KEEN, LONG_SHARE * idle_for)


def paced(now, **settings):
    given = {"busy": 0.1, "idle": 20.0, "generator": random.Random(7), **settings}
    return Pace(clock=lambda: now[0], **given)


def test_work_makes_a_node_keen_again():
    now = [100.0]
    pace = paced(now)
    now[0] += 40
    assert 1.5 <= pace.draw() <= 2.0
    pace.worked()
    assert pace.idle_for == 0
    assert pace.draw() <= 0.1


def test_pauses_of_nodes_differ_by_the_jitter_and_are_never_above_what_they_may_be():
    pauses = [paced([0.0], generator=random.Random(seed)).draw() for seed in range(200)]
    assert (1 - JITTER) * 0.1 <= min(pauses) < 0.8 * 0.1
    assert 0.095 < max(pauses) <= 0.1
    assert len(set(pauses)) == 200


@pytest.mark.parametrize(("wish", "longest"), [(1.0, 1.0), (50.0, KEEN), (0.0, 0.1)])
def test_the_server_spaces_looks_within_bounds(wish, longest):
    pace = paced([0.0])
    pace.space(wish)
    assert (1 - JITTER) * longest <= pace.draw() <= longest


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf, -1.0])
def test_nonsense_from_a_server_changes_nothing(nonsense):
    pace = paced([0.0])
    pace.space(nonsense)
    assert pace.draw() <= 0.1
