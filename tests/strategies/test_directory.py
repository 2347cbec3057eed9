"""The directory: each node is asked who it is once, and again where what it said is forgotten."""

import logging

import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from links.records import Introduction
from protocol.meeting import DESCRIBE, Requirement
from strategies.common.directory import Description, Directory


class Node:
    """Describes itself, and counts how often it was asked."""

    def __init__(self, **metrics):
        self.content = RecordDict({"metrics": MetricRecord({"num-examples": 3, **metrics})})
        self.asked = []

    def __call__(self, message):
        assert message.metadata.message_type == DESCRIBE
        self.asked.append(message.content)
        if self.content is None:
            raise RuntimeError("away")
        return self.content


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.WARNING, "flwr")
    return caplog


def test_a_node_is_asked_once_and_those_that_join_later_alone(memory_grid):
    nodes = {1: Node(), 2: Node(), 3: Node()}
    grid, directory = memory_grid(nodes), Directory()
    assert list(directory.look_up(grid, [2, 1])) == [2, 1]
    assert list(directory.look_up(grid, [1, 3, 2])) == [1, 3, 2]
    assert [len(node.asked) for node in nodes.values()] == [1, 1, 1]


def test_a_node_that_is_forgotten_is_asked_again_and_no_other_is(memory_grid):
    nodes = {1: Node(), 2: Node()}
    grid, directory = memory_grid(nodes), Directory()
    directory.look_up(grid, [1, 2])
    directory.forget(2)
    directory.forget(9)  # which nobody knows
    nodes[2].content = Node(**{"partition-id": 8}).content
    assert directory.look_up(grid, [1, 2])[2].partition == 8
    assert [len(node.asked) for node in nodes.values()] == [1, 2]


def test_what_a_node_says_is_read_whole(memory_grid):
    node = Node(**{"partition-id": 4, "sector": 2})
    introduction = Introduction(public_key=b"k" * 32, address="here:1", permit_key=b"p")
    node.content["introduction"] = ConfigRecord(introduction.model_dump(by_alias=True))
    node.content["config"] = ConfigRecord({"dataset": "usps"})
    (found,) = Directory().look_up(memory_grid({7: node}), [7]).values()
    assert found == Description(3, partition=4, sector=2, dataset="usps", introduction=introduction)


def test_a_node_that_says_nothing_usable_is_left_out_named_and_asked_again(memory_grid, warnings):
    away, odd, badly = Node(), Node(**{"num-examples": -1}), Node()
    away.content, badly.content["introduction"] = None, ConfigRecord({"x": 1})
    nodes = {1: Node(), 2: away, 3: odd, 4: badly}
    grid, directory = memory_grid(nodes), Directory()
    assert list(directory.look_up(grid, nodes)) == [1]
    assert "Node 2 failed in query.describe" in warnings.text
    for node in (3, 4):
        assert f"Node {node} describes itself badly: " in warnings.text
    away.content = odd.content = Node().content
    assert list(directory.look_up(grid, nodes)) == [1, 2, 3]
    assert [len(node.asked) for node in nodes.values()] == [1, 2, 2, 2]


def test_nodes_are_told_which_package_the_run_needs(memory_grid):
    plain, needed = Node(), Node()
    Directory().look_up(memory_grid({1: plain}), [1])
    requirement = Requirement(method="colours", package="colours==1.2")
    Directory(requirement).look_up(memory_grid({1: needed}), [1])
    assert "config" not in plain.asked[0]
    assert needed.asked[0]["config"] == ConfigRecord(
        {"method": "colours", "package": "colours==1.2"}
    )


def test_where_all_are_known_nobody_is_asked(memory_grid):
    grid, directory = memory_grid({1: Node()}), Directory()
    directory.look_up(grid, [1])
    before = len(grid.pushed)
    directory.look_up(grid, [1])
    directory.look_up(grid, [])
    assert len(grid.pushed) == before
