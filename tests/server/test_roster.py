"""Meeting the nodes before a run."""

import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from protocol.meeting import DESCRIBE
from server.roster import Roster, TooFewNodesError, meet_nodes
from strategies.common.directory import Directory


def met(grid, min_nodes, timeout=1, first=()):
    """Roster of the nodes that a run meets."""
    roster = Roster()
    meet_nodes(grid, roster, min_nodes, timeout, first)
    return roster


def node(**metrics):
    return lambda message: RecordDict({"metrics": MetricRecord(metrics)})


def test_nodes_are_named_and_ordered_by_partition_then_by_id(memory_grid):
    def silent(message):
        raise RuntimeError("not our ClientApp")

    grid = memory_grid(
        {
            50: node(**{"num-examples": 10, "partition-id": 1}),
            60: silent,
            70: node(**{"num-examples": 20, "partition-id": 0}),
            40: node(**{"num-examples": 5}),
        }
    )
    roster = met(grid, 4, timeout=1)
    assert list(roster.names.items()) == [(70, "0"), (50, "1"), (40, "40"), (60, "60")]
    assert roster.order == {70: 0, 50: 1, 40: 2, 60: 3}
    assert sum(roster.num_examples.values()) == 35


def test_a_partition_comes_before_none_also_where_few_of_many_partitions_are_there(memory_grid):
    many = {9: node(**{"num-examples": 1, "partition-id": 70}), 3: node(**{"num-examples": 1})}
    roster = met(memory_grid(many), 2)
    assert list(roster.names.values()) == ["70", "3"]


def test_a_node_is_asked_once_who_it_is_and_its_answer_is_the_strategies_too(memory_grid):
    grid = memory_grid({5: node(**{"num-examples": 3, "sector": 4})})
    directory = Directory()
    roster = Roster(directory)
    meet_nodes(grid, roster, 1, timeout=1)
    roster.meet_new(grid, timeout=1)
    assert directory.look_up(grid, [5])[5].sector == 4
    assert [message.metadata.message_type for message in grid.pushed] == [DESCRIBE]


def test_a_node_is_named_after_the_data_set_that_it_holds_in_place_of_the_runs(memory_grid):
    def usps(message):
        content = node(**{"num-examples": 7, "partition-id": 1})(message)
        content["config"] = ConfigRecord({"dataset": "usps"})
        return content

    grid = memory_grid({5: usps, 6: node(**{"num-examples": 7, "partition-id": 0})})
    assert met(grid, 2, timeout=1).names == {6: "0", 5: "usps/1"}


def test_too_few_nodes_end_the_run_with_the_setting_and_the_remedy(memory_grid):
    with pytest.raises(TooFewNodesError, match=r"min-nodes = 3, but 1 nodes .* lower min-nodes"):
        met(memory_grid({1: node(**{"num-examples": 1})}), 3, timeout=0.3)


def test_nodes_that_connect_in_time_are_waited_for(memory_grid):
    described = {i: node(**{"num-examples": 1, "partition-id": i}) for i in range(3)}

    class OneMoreAtEachLook(type(memory_grid({}))):
        looks = 0

        def get_node_ids(self):
            self.looks += 1
            return list(super().get_node_ids())[: self.looks]

    assert len(met(OneMoreAtEachLook(described), 3, timeout=20).names) == 3


def test_a_node_that_describes_itself_badly_is_known_by_its_id(memory_grid):
    grid = memory_grid(
        {
            5: node(**{"num-examples": float("nan")}),
            6: lambda message: RecordDict(),
            7: node(**{"num-examples": 3, "partition-id": 0}),
        }
    )
    roster = met(grid, 3, timeout=1)
    assert (roster.names, roster.num_examples) == ({7: "0", 5: "5", 6: "6"}, {7: 3})


def test_nodes_that_come_later_come_after_the_others(memory_grid):
    grid = memory_grid({5: node(**{"num-examples": 3, "partition-id": 1})})
    roster = met(grid, 1, timeout=1)
    grid.nodes[6] = node(**{"num-examples": 4, "partition-id": 0})
    assert roster.meet_new(grid, timeout=1) == [6]
    assert roster.order == {5: 0, 6: 1}
    assert roster.meet_new(grid, timeout=1) == []


def test_a_resumed_run_meets_its_nodes_in_the_order_of_before(memory_grid):
    held = {i: node(**{"num-examples": 3, "partition-id": i}) for i in range(4)}
    roster = met(memory_grid(held), 4, timeout=1, first=["2", "9", "0"])
    assert list(roster.names.values()) == ["2", "0", "1", "3"]
