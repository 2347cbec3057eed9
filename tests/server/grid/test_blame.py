"""Who is left out of secure sums: hostile nodes, however they lie, and no honest one for good."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.links.masks import threshold
from flwr_distill.server.grid.sums import Blame, liars, max_hostile


@given(st.data())
def test_no_lie_of_a_third_of_the_nodes_makes_an_honest_one_a_liar(data):
    num_nodes = data.draw(st.integers(3, 12))
    needed = threshold(num_nodes)
    nodes = list(range(num_nodes))
    most = max_hostile(num_nodes, needed)
    hostile = set(data.draw(st.permutations(nodes))[:most])
    pairs = [(h, m) for h in nodes for m in nodes if h in hostile or m in hostile]
    wrong = data.draw(st.sets(st.sampled_from(pairs)))
    wrong = {(h, m) for h, m in wrong if h != m or h in hostile}
    the_sum = SimpleNamespace(
        members=nodes,
        needed=needed,
        peers=SimpleNamespace(nodes=nodes),
        node=lambda place: place,
    )
    lies = liars(the_sum, wrong)
    assert lies.keys() <= hostile
    for node in hostile:
        if sum(member == node for _, member in wrong) > most:
            assert node in lies


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_pauses_end_and_lies_do_not(events):
    blame = Blame()
    lied = set()
    for server_round, (node, lie) in enumerate(events, start=1):
        if lie:
            blame.lied(node, "a reason")
            lied.add(node)
        else:
            blame.doubted([node], server_round, "it failed")
    nodes = range(6)
    assert set(blame.excluded(nodes, 2**50, 3)) == lied
    now = blame.excluded(nodes, len(events), 3)
    assert lied <= set(now)
    assert len(lied) > 3 or len(now) <= 3


def test_sums_that_one_node_can_spoil_grow_with_the_logarithm_of_the_rounds():
    blame, spoilt = Blame(), 0
    for server_round in range(1, 1001):
        if 3 not in blame.excluded(range(6), server_round, 3):
            blame.doubted([3], server_round, "it failed")
            spoilt += 1
    assert spoilt == 10


def test_a_resumed_run_excludes_who_lied_under_the_ids_that_nodes_have_now():
    blame = Blame()
    blame.lied(1, "a reason")
    blame.lied(2, "it is not back")
    blame.doubted([3], 1, "it failed")
    blame.doubted([3], 2, "it failed again")
    resumed = Blame()
    resumed.load_state_dict(blame.state_dict(), {1: 11, 3: 13, 4: 14})
    nodes = range(10, 20)
    assert resumed.excluded(nodes, 3, 3).keys() == {11, 13}
    assert resumed.excluded(nodes, 4, 3) == {11: "a reason"}
