"""The directory: each node is asked who it is once, and again where what it said is forgotten."""

import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from flwr_distill.base.text import listed
from flwr_distill.links.records import Introduction
from flwr_distill.protocol.meeting import DESCRIBE, Requirement
from flwr_distill.strategies.common.directory import Description, Directory, by_reason
from tests.odd_certificates import ODD, odd_certificate


class Node:
    """Describes itself, and counts how often it was asked."""

    def __init__(self, config=None, **metrics):
        self.content = RecordDict({"metrics": MetricRecord({"num-examples": 3, **metrics})})
        if config:
            self.content["config"] = ConfigRecord(config)
        self.asked = []

    def __call__(self, message):
        assert message.metadata.message_type == DESCRIBE
        self.asked.append(message.content)
        if self.content is None:
            raise RuntimeError("away")
        return self.content


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
    said = {"dataset": "usps", "name": "ward", "class-names": ["cat", "dog"], "classes": [0, 7]}
    node.content["config"] = ConfigRecord(said)
    (found,) = Directory().look_up(memory_grid({7: node}), [7]).values()
    assert found == Description(
        num_examples=3,
        partition=4,
        sector=2,
        dataset="usps",
        introduction=introduction,
        name="ward",
        class_names=("cat", "dog"),
        classes=(0, 7),
    )


@pytest.mark.parametrize("kind", ODD)
def test_a_certificate_that_nobody_can_read_does_not_end_the_meeting(memory_grid, kind):
    """The curve raised an error of the parser's own, and with it ended the run of all nodes."""
    node = Node()
    introduction = Introduction(public_key=b"k" * 32, certificate=odd_certificate(kind))
    node.content["introduction"] = ConfigRecord(introduction.model_dump(by_alias=True))
    found = Directory().look_up(memory_grid({1: node, 2: Node()}), [1, 2])
    assert [about.key for about in found.values()] == ["", ""]


def test_a_node_that_cannot_take_part_says_why_and_is_asked_again(memory_grid, flower_log):
    away, odd, badly, missing = (
        Node(),
        Node(**{"num-examples": -1}),
        Node(),
        Node({"missing": ["x"]}),
    )
    away.content, badly.content["introduction"] = None, ConfigRecord({"x": 1})
    nodes = {1: Node(), 2: away, 3: odd, 4: badly, 5: missing, 6: lambda message: None}
    grid, directory = memory_grid(nodes), Directory()
    missing = {node: about.missing for node, about in directory.look_up(grid, nodes).items()}
    assert (missing[1], missing[2], missing[5], missing[6]) == (
        (),
        ("away",),
        ("x",),
        ("no answer in time",),
    )
    assert missing[3][0].startswith("it describes itself badly: metrics: num-examples = -1")
    assert missing[4][0].startswith("it describes itself badly: introduction: ")
    assert flower_log.messages[0] == "Cannot take part: node …2: away"
    assert len(flower_log.messages) == 5
    away.content = odd.content = Node().content
    able = [node for node, about in directory.look_up(grid, nodes).items() if not about.missing]
    assert able == [1, 2, 3]
    assert [len(nodes[node].asked) for node in range(1, 6)] == [1, 2, 2, 2, 2]


def test_why_a_node_cannot_take_part_is_said_once_and_again_when_that_changes(
    memory_grid, flower_log
):
    node, other = Node({"missing": ["no disk"]}), Node({"missing": ["no disk"]})
    grid, directory = memory_grid({1: node, 2: other}), Directory()
    for missing in (
        ["no disk"],
        ["no disk"],
        ["no disk", "no torch"],
        ["no torch"],
        [],
        ["no disk"],
    ):
        node.content = Node({"missing": missing}).content
        directory.look_up(grid, [1, 2])
        directory.forget(1)
    assert [text.partition(": ")[2] for text in flower_log.messages] == [
        "node …1 and node …2: no disk",
        "node …1: no torch",
        "node …1: no disk",
    ]


def test_a_node_is_called_by_its_owners_name_else_by_its_partition_else_by_its_id(memory_grid):
    number = {"partition-id": 3}
    nodes = {
        11: Node({"name": "ward-3"}, **number),
        12: Node(**number),
        13: Node({"dataset": "usps"}, **number),
        2**63 + 12345: Node(),
    }
    directory = Directory()
    directory.look_up(memory_grid(nodes), nodes)
    names = [directory.name(node) for node in nodes]
    assert names[:3] == ["ward-3", "node-3", "usps/3"]
    assert names[3] == f"node …{str(2**63 + 12345)[-5:]}"


def test_nodes_with_one_name_are_told_apart_unless_one_is_the_other_come_back(memory_grid):
    ward, grid = Node({"name": "ward"}), memory_grid({})
    grid.nodes = {1: ward, 2: ward, 3: Node({"name": "ward (2)"})}
    directory = Directory()
    directory.look_up(grid, grid.nodes)
    assert directory.names == {1: "ward", 2: "ward (2)", 3: "ward (2) (2)"}
    grid.nodes = {2: ward, 4: ward, 5: ward}
    directory.look_up(grid, [4, 5])
    assert (directory.names[4], directory.names[5]) == ("ward", "ward (3)")
    directory.forget(2)
    directory.look_up(grid, [2])
    assert directory.names[2] == "ward (2)"


def test_of_a_thousand_nodes_that_lack_something_a_few_are_named(memory_grid, flower_log):
    nodes = {i: Node({"missing": ["no torch"], "name": f"n{i}"}) for i in range(1000)}
    Directory().look_up(memory_grid(nodes), nodes)
    said = "Cannot take part: n0, n1, n2, n3, n4 and 995 others: no torch"
    assert flower_log.messages == [said]


def test_reasons_are_listed_once_with_the_most_frequent_first_and_the_rest_counted():
    lines = by_reason({"a": ["x"], "b": ["y", "z"], "c": ["y"], "d": []})
    assert lines == ["b and c: y", "a: x", "b: z"]
    lines = by_reason({f"n{i}": [f"why {i}"] for i in range(12)})
    assert (len(lines), lines[-1]) == (11, "2 more reasons")
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(list("abcdef")) == "a, b, c, d, e and 1 other"


def test_nodes_are_told_which_package_the_run_needs(memory_grid):
    plain, needed = Node(), Node()
    Directory().look_up(memory_grid({1: plain}), [1])
    requirement = Requirement(method="colours", package="colours==1.2")
    Directory(requirement).look_up(memory_grid({1: needed}), [1])
    assert "config" not in plain.asked[0]
    assert needed.asked[0]["config"] == ConfigRecord(
        {"method": "colours", "package": "colours==1.2", "settings": "{}"}
    )
