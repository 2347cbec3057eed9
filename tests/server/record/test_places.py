"""A node that merely claims a partition does not take another's place in a resumed run."""

import pytest

from flwr_distill.server.record.resume import returned_nodes
from flwr_distill.server.roster import Roster
from flwr_distill.storage.store import SECRET

FIRST = 2**64 - 1000  # as in conftest.py
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
        pytest.param({}, {21: "0"}, {21: "z"}, {}, id="none had shown a key"),
        pytest.param({}, {12: "0"}, {}, {}, id="one that has a place takes another's"),
        pytest.param({}, {21: "2"}, {}, {}, id="new to the run"),
    ],
)
def test_places_go_to_the_nodes_that_had_them(keys, claims, shown, returned):
    assert returned_nodes(BEFORE, keys, claims, shown) == returned


def test_of_a_node_that_came_back_in_the_earlier_run_its_last_id_counts():
    assert returned_nodes({11: "0", 12: "1", 13: "0"}, {}, {21: "0"}, {}) == {13: 21}


@pytest.mark.parametrize(
    ("keys", "claims", "shown", "returned"),
    [
        pytest.param(
            *({11: "a", 13: "z"}, {11: "0", 13: "0"}, {11: "a", 13: "z"}),
            {11: 11, 13: 13},
            id="both are back",
        ),
        pytest.param(
            *({11: "a", 13: "z"}, {21: "0", 23: "0"}, {21: "a", 23: "z"}),
            {11: 21, 13: 23},
            id="both under other ids",
        ),
        pytest.param({}, {11: "0", 13: "0"}, {}, {11: 11, 13: 13}, id="known by their ids"),
        pytest.param({}, {11: "0"}, {}, {11: 11}, id="the first alone"),
        pytest.param({11: "a", 13: "a"}, {21: "0"}, {21: "a"}, {13: 21}, id="it came back before"),
    ],
)
def test_who_claims_a_partition_in_the_run_does_not_take_its_place_in_one_that_resumes_it(
    keys, claims, shown, returned
):
    assert returned_nodes({11: "0", 13: "0"}, keys, claims, shown) == returned


def test_a_node_is_known_by_its_state_directory_and_who_claims_its_partition_is_not_taken_for_it(
    client_grid, tmp_path
):
    def met(node, folder, resumes=""):
        roster = Roster()
        roster.directory.resumes = resumes
        state = {"state-dir": str(tmp_path / folder)}
        roster.meet_new(client_grid(1, {}, node_config=state, first_node=node), 60)
        return roster

    first = met(FIRST, "own")
    again, claims = met(FIRST + 1, "own", "1"), met(FIRST + 2, "another", "1")
    assert {*first.identities.values(), *claims.identities.values()} == {"0"}

    def back(later):
        return returned_nodes(first.identities, first.keys, later.identities, later.resumed_keys)

    assert back(again) == {FIRST: FIRST + 1}
    assert back(claims) == {}
    assert not {*first.keys.values()} & {*again.keys.values()}  # nor can two runs be linked
    assert back(met(FIRST + 3, "own", "3")) == {}  # for another run's place
    assert (tmp_path / "own" / SECRET).read_bytes().hex() not in str(first.keys)
