"""Who leads after a leader is lost, and that the log says so."""

from flwr_distill.strategies.common.topology import successor


def test_one_of_those_that_are_able_takes_over(flower_log):
    assert successor(7, [3, 9, 5], max) == 9
    assert flower_log.messages == [
        "Node 9 takes over from node 7, which no longer leads its cluster"
    ]


def test_where_nobody_is_able_nobody_is_chosen(flower_log):
    def choose(able):
        raise AssertionError

    assert successor(7, [], choose) is None
    assert flower_log.messages == [
        "Node 7 no longer leads its cluster, and no other node is able to"
    ]
