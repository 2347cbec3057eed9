"""A node that merely claims a partition does not take another's place in a resumed run."""

import pytest

from server.record.places import returned_nodes

BEFORE = {11: "0", 12: "1"}


@pytest.mark.parametrize(
    ("keys", "claims", "shown", "returned"),
    [
        pytest.param({}, {21: "1", 22: "0"}, {}, {11: 22, 12: 21}, id="new ids"),
        pytest.param({}, {11: "0", 12: "1"}, {}, {11: 11, 12: 12}, id="registered keys"),
        pytest.param({}, {11: "0", 99: "0"}, {}, {11: 11}, id="another's claim comes last"),
        pytest.param({}, {99: "0", 11: "0"}, {}, {11: 11}, id="another's claim comes first"),
        pytest.param({11: "a"}, {99: "0"}, {99: "z"}, {}, id="another key"),
        pytest.param({11: "a"}, {99: "0"}, {}, {}, id="no key any more"),
        pytest.param({11: "a"}, {99: "0", 21: "0"}, {21: "a"}, {11: 21}, id="claim, and the node"),
        pytest.param({11: "a"}, {11: "0"}, {11: "z"}, {}, id="its id with another key"),
        pytest.param({}, {12: "0"}, {}, {}, id="one that has a place takes another's"),
        pytest.param({}, {21: "2"}, {}, {}, id="new to the run"),
    ],
)
def test_places_go_to_the_nodes_that_had_them(keys, claims, shown, returned):
    assert returned_nodes(BEFORE, keys, claims, shown) == returned


def test_of_a_node_that_came_back_in_the_earlier_run_its_last_id_counts():
    assert returned_nodes({11: "0", 12: "1", 13: "0"}, {}, {21: "0"}, {}) == {13: 21}
