"""The pace follows the work."""

from node.pace import Pace


def test_a_node_is_keen_after_work_and_slack_when_none_came() -> None:
    now = [100.0]
    pace = Pace(busy=0.1, idle=2.0, keen=30.0, clock=lambda: now[0])
    assert pace.pause == 0.1
    now[0] += 29.9
    assert pace.pause == 0.1
    now[0] += 0.2
    assert pace.pause == 2.0
    pace.worked()
    assert pace.pause == 0.1
    now[0] += 7.0
    assert pace.idle_for == 7.0
