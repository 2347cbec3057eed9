"""The picture of who led whom."""

from io import BytesIO

from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from flwr_distill.server.page.drawings import topology_picture

TOPOLOGY = {
    "clusters": [{"head": "10", "members": ["2"]}, {"head": "3", "members": []}],
    "heads": {"1": ["2", "3"], "2": ["10", "3"], "3": ["10", "7"]},
}


def drawn():
    """The filled cells as {(node, round): colour}, and the axes."""
    (axes,) = topology_picture(TOPOLOGY).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    cells = {}
    for collection in axes.collections:
        assert isinstance(collection, PolyCollection)
        for path in collection.get_paths():
            x, y = path.get_extents().get_points().mean(axis=0)
            colour = to_rgb(collection.get_facecolor()[0][:3])
            cells[names[round(float(y))], round(float(x))] = colour
    return cells, names


def test_every_head_of_every_round_is_a_filled_cell_and_no_other_is():
    cells, _ = drawn()
    expected = {(head, int(r)) for r, heads in TOPOLOGY["heads"].items() for head in heads}
    assert cells.keys() == expected


def test_nodes_stand_by_cluster_in_order_and_those_that_left_come_last_in_grey():
    cells, names = drawn()
    assert names == ["2", "10", "3", "7"]
    assert cells["7", 3] == to_rgb("grey")
    assert cells["2", 1] == cells["10", 2] != cells["3", 1]


def test_a_name_with_dollars_is_no_formula():
    """Else a node could end the run after the last round by its name."""
    topology = {"clusters": [{"head": r"$\lost{$", "members": ["2"]}], "heads": {"1": ["2"]}}
    topology_picture(topology).savefig(BytesIO())
