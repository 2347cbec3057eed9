"""Meeting the nodes before a run."""

import pytest
from flwr.app import ConfigRecord

from flwr_distill.protocol.meeting import DESCRIBE, own_version
from flwr_distill.server.roster import Roster, meet_nodes
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.waiting import TooFewNodesError
from flwr_distill.task.errors import SettingsError
from tests.errors import at
from tests.grids import answering


def met(grid, min_nodes, timeout=1, first=()):
    """Roster of the nodes that a run meets."""
    roster = Roster()
    meet_nodes(grid, roster, min_nodes, timeout, first)
    return roster


def node(config=None, **metrics):
    """A node that describes itself so."""
    content = answering(**{"num_examples": 1, **metrics})(None)
    if config:
        content["config"] = ConfigRecord(config)
    return lambda message: content


def test_nodes_are_named_and_ordered_by_partition_then_by_id(memory_grid):
    grid = memory_grid(
        {
            50: node(num_examples=10, partition_id=1),
            60: node(num_examples=5),
            70: node(num_examples=20, partition_id=0),
            40: node({"name": "ward"}, num_examples=5),
        }
    )
    roster = met(grid, 4, 1)
    assert list(roster.names.items()) == [
        *((70, "node-0"), (50, "node-1"), (40, "ward"), (60, "node …60"))
    ]
    assert list(roster.identities.values()) == ["0", "1", "ward", "60"]
    assert roster.order == {70: 0, 50: 1, 40: 2, 60: 3}


@pytest.mark.parametrize(("tested", "warns"), [((0, 1), True), ((), False)])
def test_nodes_with_data_of_their_own_beside_a_named_set_are_a_warning(memory_grid, tested, warns):
    roster = Roster(tested=tested)
    grid = memory_grid({1: node(partition_id=0), 2: node({"name": "ward"})})
    meet_nodes(grid, roster, 2, 1)
    said = [text for text in roster.warnings if 'dataset="private"' in text]
    assert bool(said) == warns
    assert all("ward" in text and "node-0" not in text for text in said)


def test_a_partition_comes_before_none_also_where_few_of_many_partitions_are_there(memory_grid):
    many = {9: node(partition_id=70), 3: node(num_examples=1)}
    roster = met(memory_grid(many), 2)
    assert list(roster.identities.values()) == ["70", "3"]


def test_a_node_is_asked_once_who_it_is_and_its_answer_is_the_strategies_too(memory_grid):
    grid = memory_grid({5: node(sector=4)})
    directory = Directory()
    roster = Roster(directory)
    meet_nodes(grid, roster, 1, 1)
    roster.meet_new(grid, 1)
    assert directory.look_up(grid, [5])[5].sector == 4
    assert [message.metadata.message_type for message in grid.pushed] == [DESCRIBE]


def test_a_node_is_named_after_the_data_set_that_it_holds_in_place_of_the_runs(memory_grid):
    usps = node({"dataset": "usps"}, partition_id=1)
    roster = met(memory_grid({5: usps, 6: node(partition_id=0)}), 2, 1)
    assert roster.names == {6: "node-0", 5: "usps/1"}
    assert roster.identities == {6: "0", 5: "usps/1"}


def test_too_few_nodes_end_the_run_with_the_setting_and_the_remedy(memory_grid):
    with pytest.raises(
        TooFewNodesError, match=r"min-nodes = 3: 1 node connected .* lower min-nodes"
    ):
        met(memory_grid({1: node(num_examples=1)}), 3, timeout=0.3)


def test_nodes_that_are_busy_with_another_run_are_waited_for(memory_grid, monkeypatch):
    monkeypatch.setattr("flwr_distill.server.roster._PAUSE", (0.0, 0.0))
    answers = iter([None, None, answering(num_examples=1)(None)])
    grid = memory_grid({1: lambda message: next(answers)})
    roster = Roster()
    meet_nodes(grid, roster, 1, 0.1, patience=60)
    assert list(roster.nodes) == [1]
    with pytest.raises(TooFewNodesError, match="no answer in time"):
        meet_nodes(memory_grid({1: lambda message: None}), Roster(), 1, 0.1, patience=0.3)


def test_nodes_that_connect_in_time_are_waited_for(memory_grid):
    described = {i: node(partition_id=i) for i in range(3)}

    class OneMoreAtEachLook(type(memory_grid({}))):
        looks = 0

        def get_node_ids(self):
            self.looks += 1
            return list(super().get_node_ids())[: self.looks]

    assert len(met(OneMoreAtEachLook(described), 3, timeout=20).names) == 3


def test_where_too_few_can_take_part_the_run_ends_with_what_is_lacking_and_where(memory_grid):
    missing = {"missing": ["model='x:y': module 'x' cannot be imported"]}
    nodes = {
        **{i: node({**missing, "name": f"ward-{i}"}) for i in range(1, 8)},
        8: node({"name": "lab"}, num_examples=float("nan")),
        9: node({"name": "able"}),
    }
    with pytest.raises(TooFewNodesError) as caught:
        met(memory_grid(nodes), 2)
    text = str(caught.value)
    assert text.startswith(
        "min-nodes = 2, but only 1 of 9 nodes can take part: ward-1, ward-2, ward-3, ward-4, "
        "ward-5 and 2 others: model='x:y': module 'x' cannot be imported; node …8: it describes"
    )
    assert "\n" not in text


def test_where_enough_can_take_part_the_others_are_left_out_and_asked_again(memory_grid):
    answers = {
        1: node({"name": "a"}),
        2: node({"name": "b", "missing": ["no data"]}),
    }
    grid = memory_grid(answers)
    roster = met(grid, 1)
    assert list(roster.names.values()) == ["a"]
    assert roster.excluded == {2: ("no data",)}
    assert roster.warnings == ["Cannot take part: b: no data"]
    due = []
    for server_round in range(1, 9):
        if 2 not in roster.not_due(server_round):
            due.append(server_round)
            roster.meet_new(grid, 1, server_round=server_round)
    assert due == [1, 3, 7]
    grid.nodes[2] = node({"name": "b"})
    assert roster.meet_new(grid, 1, server_round=15) == [2]
    assert (roster.excluded, roster.warnings) == ({}, [])


def test_a_partition_that_two_nodes_have_is_a_warning_until_one_is_gone(memory_grid, flower_log):
    same = {"partition_id": 3}
    answers = {
        1: node(**same),
        2: node({"name": "ward"}, **same),
        3: node({"dataset": "u"}, **same),
    }
    grid = memory_grid(answers)
    roster = met(grid, 3)
    (text,) = roster.warnings
    assert text.startswith("node-3 and ward have the same partition, 3, and may hold the same")
    assert flower_log.messages == [text]
    roster.meet_new(grid, 1)
    assert flower_log.messages == [text]
    del grid.nodes[1]
    roster.meet_new(grid, 1)
    assert roster.warnings == []


def covering(*classes, **about):
    """Warnings of a run tested on classes 0 to 3, whose nodes hold these."""

    def meet(memory_grid):
        configs = [{} if held is None else {"classes": held} for held in classes]
        nodes = {i: node(c, partition_id=i) for i, c in enumerate(configs)}
        grid = memory_grid(nodes)
        roster = Roster(Directory(**about), tested=(0, 1, 2, 3))
        meet_nodes(grid, roster, 1, 1)
        return roster.warnings

    return meet


def test_classes_of_the_test_set_that_no_node_holds_are_a_warning(memory_grid):
    assert covering([0, 1], [2, 3])(memory_grid) == []
    (text,) = covering([0, 1], [0])(memory_grid)
    assert text.startswith("No node holds classes 2 and 3, so the model cannot learn")
    (text,) = covering([0, 1, 3], class_names=("ant", "bee", "cat", "dog"))(memory_grid)
    assert text.startswith("No node holds class cat, ")
    assert covering([0], None)(memory_grid) == []  # differential privacy: they do not say


def folders(*names, **metrics):
    return node({"class-names": list(names)}, **metrics)


def test_different_class_folders_end_the_run_with_the_setting_that_says_what_they_mean(memory_grid):
    nodes = {i: folders(*names) for i, names in enumerate([("cat", "dog"), ("dog", "fish")])}
    folders_of_nodes = "node …0: cat and dog; node …1: dog and fish"
    remedy = 'set private.classes="cat,dog,fish"'
    check = at("private.classes", value="", remedy=remedy)
    with pytest.raises(SettingsError, match=folders_of_nodes, check=check):
        met(memory_grid(nodes), 1)


def test_a_node_whose_class_names_most_others_do_not_share_is_left_out_by_name(memory_grid):
    grid = memory_grid(
        {
            1: folders("cat", "dog"),
            2: folders("cat", "dog"),
            3: node({"name": "ward", "class-names": ["cat", "hog"]}),
            4: node(),
        }
    )
    roster = met(grid, 3)
    assert roster.directory.class_names == ("cat", "dog")
    assert list(roster.nodes) == [1, 2, 4]
    (warning,) = roster.warnings
    assert all(name in warning for name in ("ward", "cat and dog", "cat and hog"))
    grid.nodes |= {5: folders("dog", "fish"), 6: folders("cat", "dog"), 7: node()}
    assert roster.meet_new(grid, 1) == [6, 7]
    assert "dog and fish" in roster.excluded[5][0]


def test_too_few_nodes_with_the_same_class_names_end_the_run_with_the_setting(memory_grid):
    nodes = {1: folders("cat", "dog"), 2: folders("cat", "dog"), 3: folders("cat", "hog")}
    with pytest.raises(SettingsError, match=r"private\.classes=.cat,dog,hog"):
        met(memory_grid(nodes), 3)


def test_names_of_positions_are_not_those_of_folders(memory_grid):
    """A node with folders 0 and 1 does not mean the first and second name of others."""
    grid = memory_grid({1: folders("cat", "dog"), 2: folders("cat", "dog"), 3: folders("0", "1")})
    assert list(met(grid, 2).nodes) == [1, 2]


def test_names_that_the_run_has_are_no_matter_of_a_vote(memory_grid):
    grid = memory_grid({1: folders("0", "1"), 2: folders("a", "b"), 3: folders("a", "b")})
    roster = Roster(Directory(class_names=("0", "1")))
    meet_nodes(grid, roster, 1, 1)
    assert list(roster.nodes) == [1]


@pytest.mark.parametrize(
    "names", [["1", "01"], ["a", "a"], ["a\tb", "c"], ["", "c"], ["x" * 61, "c"], ["a"] * 10_001]
)
def test_names_that_no_label_map_can_have_leave_the_node_out(memory_grid, names):
    grid = memory_grid({1: folders("cat", "dog"), 2: node({"class-names": names})})
    roster = met(grid, 1)
    assert list(roster.nodes) == [1]
    assert roster.directory.class_names == ("cat", "dog")


def test_a_node_that_names_another_number_of_classes_than_the_run_has_does_not_count(memory_grid):
    grid = memory_grid({1: folders("a", "b", "c"), 2: folders("cat", "dog")})
    roster = Roster(num_classes=2)
    meet_nodes(grid, roster, 1, 1)
    assert list(roster.nodes) == [2]
    assert roster.directory.class_names == ("cat", "dog")


def test_a_node_with_classes_that_the_run_does_not_have_takes_no_part(memory_grid):
    made_up = node({"name": "ward", "classes": [2, *range(10, 900)]})
    grid = memory_grid({1: node({"classes": [0, 9]}), 2: made_up, 3: node({"classes": [1, 2]})})
    roster = Roster(num_classes=10)
    meet_nodes(grid, roster, 2, 1)
    assert list(roster.nodes) == [1, 3]
    assert roster.excluded == {2: ("it has a class 899, and the run's end at 9",)}


def test_nodes_that_come_later_come_after_the_others(memory_grid):
    grid = memory_grid({5: node(partition_id=1)})
    roster = met(grid, 1, 1)
    grid.nodes[6] = node(partition_id=0)
    assert roster.meet_new(grid, 1) == [6]
    assert roster.order == {5: 0, 6: 1}
    assert roster.meet_new(grid, 1) == []


def test_a_resumed_run_meets_its_nodes_in_the_order_of_before(memory_grid):
    held = {i: node(partition_id=i) for i in range(4)}
    roster = met(memory_grid(held), 4, timeout=1, first=["2", "9", "0"])
    assert list(roster.identities.values()) == ["2", "0", "1", "3"]


def test_a_site_learns_what_is_wrong_with_its_own_node_alone(memory_grid):
    able = {"codecs": ["float16"], "version": own_version()}
    answers = {
        1: node({**able, "name": "ward"}),
        2: node({**able, "name": "ward"}),
        3: node({**able, "name": "lab", "version": "0.0.1"}),
        4: node({"name": "ward"}),  # nothing there takes texts
        5: node({**able, "name": "other"}),
        6: node(able, partition_id=7),
        7: node(able, partition_id=7),
    }
    roster = met(memory_grid(answers), 7)
    texts = {id: "\n".join(own) for id, own in roster.notices.items()}
    assert texts.keys() == {1, 2, 3, 6, 7}
    assert "ward" in texts[1]
    assert "--name" in texts[1]
    assert texts[1] == texts[2]
    assert "0.0.1" in texts[3]
    assert own_version() in texts[3]
    assert "--partition-id" in texts[6]
    assert not [own for own in texts.values() if "lab" in own or "other" in own.split()]
    assert "ward" not in texts[3]
