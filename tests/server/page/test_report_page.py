"""The page of a run: what is drawn, what is left out, and that it needs nothing else."""

import json
import re
from html.parser import HTMLParser
from io import BytesIO
from xml.etree import ElementTree

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from flwr_distill.server.page.drawings import (
    Series,
    cluster_star,
    dot_plot,
    leader_grid,
    line_chart,
    topology_picture,
)
from flwr_distill.server.page.run_files import RunFilesError, read_run
from flwr_distill.server.page.run_page import run_page
from tests.errors import at

TOPOLOGY = {
    "clusters": [{"head": "10", "members": ["2"]}, {"head": "3", "members": []}],
    "heads": {"1": ["2", "3"], "2": ["10", "3"], "3": ["10", "7"]},
}


def titles(drawing, tag):
    return [
        element.find("title").text
        for element in ElementTree.fromstring(drawing).iter(tag)
        if element.find("title") is not None
    ]


class Outside(HTMLParser):
    """Collects what a page would load, run or lead to."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag in ("script", "iframe", "object", "embed", "form"):
            self.found.append(tag)
        self.found += [
            (name, value)
            for name, value in attrs
            if name in ("src", "href", "srcset", "action") or name.startswith("on")
        ]


def test_curves_are_where_their_values_are():
    chart = ElementTree.fromstring(
        line_chart([Series("a", [(0, 0), (5, 20), (10, 100)])], "round", "accuracy", y_max=100)
    )
    (line,) = chart.iter("polyline")
    (x0, y0), (x1, y1), (x2, y2) = (
        tuple(map(float, place.split(","))) for place in line.get("points").split()
    )
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(0.2 * (y0 - y2), abs=0.2)
    assert y0 > y1 > y2
    ticks = {
        float(text.text): float(text.get("y"))
        for text in chart.iter("text")
        if text.get("text-anchor") == "end" and text.get("class") == "tick"
    }
    assert ticks[100] - ticks[0] == pytest.approx(y2 - y0, abs=0.2)


@pytest.mark.parametrize(
    "points",
    [
        [(0, 0.0)],
        [(0, 2.5)],
        [(3, 1e-9), (4, 1e9)],
        [(1, -1.5)],  # a likelihood's loss, or a node's lie
        [(1, -2.5), (2, 3.0)],
        [(1, -1e308), (2, 1e308)],
    ],
)
def test_a_chart_of_few_or_wild_points_is_drawn(points):
    chart = line_chart([Series("a", points)], "round", "loss")
    places = [float(value) for value in re.findall(r'c[xy]="(.*?)"', chart)]
    assert len(places) == 2 * len(points)
    assert all(0 <= place <= 380 for place in places)
    assert all(0 <= place <= 236 for place in places[1::2])


def test_every_dot_is_a_class_that_a_node_holds_and_its_area_is_the_number_of_samples():
    drawing = dot_plot({"node-0": [64, 0, 16], "ward 3": [0, 0, 1]}, str)
    assert titles(drawing, "circle") == [
        "node-0: 64 of class 0",
        "node-0: 16 of class 2",
        "ward 3: 1 of class 2",
    ]
    radii = [float(c.get("r")) for c in ElementTree.fromstring(drawing).iter("circle")]
    assert radii[0] == pytest.approx(2 * radii[1], abs=0.1)


def test_names_are_cut_to_fit_into_a_drawing_and_whole_when_pointed_at():
    star = cluster_star("node-4", ["a ward of the north", "node …12345"], {})
    assert titles(star, "g") == [
        "a ward of the north, member",
        "node …12345, member",
        "node-4, head",
    ]
    shown = [text.text for text in ElementTree.fromstring(star).iter("text")]
    assert shown == ["a war…", "…12345", "4"]


def test_a_cluster_is_drawn_with_a_link_from_each_member_to_its_head():
    star = ElementTree.fromstring(cluster_star("4", ["1", "2", "3"], {"4": 0}))
    assert len(list(star.iter("line"))) == 3
    assert sorted(text.text for text in star.iter("text")) == ["1", "2", "3", "4"]


def test_a_cluster_without_head_has_no_links_and_nodes_that_do_not_touch():
    for size in range(1, 12):
        star = ElementTree.fromstring(cluster_star(None, [str(i) for i in range(size)], {}))
        assert not list(star.iter("line"))
        nodes = [group.find("circle") for group in star.iter("g")]
        assert len(nodes) == size
        places = [complex(float(c.get("cx")), float(c.get("cy"))) for c in nodes]
        apart = [abs(a - b) for i, a in enumerate(places) for b in places[:i]]
        assert all(distance > 2 * float(nodes[0].get("r")) for distance in apart)


def test_every_head_of_every_round_is_a_filled_cell_and_no_other_is():
    expected = {
        f"{head} led in round {number}"
        for number, heads in TOPOLOGY["heads"].items()
        for head in heads
    }
    assert set(titles(leader_grid(TOPOLOGY), "rect")) == expected


def test_the_page_loads_and_runs_nothing(finished_run):
    page = (finished_run() / "report.html").read_text()
    assert [found for found in Outside(page).found if found != ("href", "data:,")] == []
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in page


def test_what_nodes_say_is_shown_as_text_and_never_as_html(finished_run):
    folder = finished_run(strategy="fedavg", data_root="<img src=x onerror=alert(1)>")
    page = (folder / "report.html").read_text()
    assert "out of &lt;memory&gt;" in page
    assert "<memory>" not in page
    assert "<img" not in page


def test_a_run_that_diverged_has_a_page(finished_run):
    folder = finished_run()
    rows = (folder / "metrics.jsonl").read_text().replace('"loss": 0.5', '"loss": NaN')
    (folder / "metrics.jsonl").write_text(rows)
    assert "NaN" in rows
    page = run_page(read_run(folder))
    assert "nan" not in "".join(re.findall("<svg.*?</svg>", page, re.DOTALL)).lower()
    every = re.sub(r'"loss": [\d.]+', '"loss": Infinity', rows)
    (folder / "metrics.jsonl").write_text(every)
    assert "Accuracy by class" in run_page(read_run(folder))


def test_many_curves_stand_out_by_mean_lowest_and_highest(finished_run):
    folder = finished_run("11")
    node = 2**64 - 1000
    lines = [
        {"round": r, "phase": "train", "seconds": 1, "asked": 3, "nodes": of_round}
        for r, of_round in {
            1: {str(node): {"train-loss": 1.0}, str(node + 1): {"train-loss": 3.0}},
            2: {str(node): {"train-loss": 4.0}},
            3: {str(node + 2): {"train-loss": 0.5}},
        }.items()
    ]
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = run_page(read_run(folder))
    assert "lowest, of node-2, is at 0.5, the highest, of node-0, at 4, and the mean at 0.5" in page
    places = re.findall(r"mean, round (\d+): ([\d.]+)", page)
    assert places[-3:] == [("1", "2"), ("2", "4"), ("3", "0.5")]


def test_equal_faults_stand_once_with_the_nodes_name_and_their_rounds(finished_run):
    page = run_page(read_run(finished_run()))
    row = re.search(r"<tr>\s*<td[^>]*>1 node failed in train: node-2: .*?</tr>", page, re.DOTALL)[0]
    assert re.findall(r"<td[^>]*>(.*?)</td>", row)[1:] == ["1–2", "2"]


def test_sections_are_those_that_the_run_has_something_for(finished_run):
    folder = finished_run()

    def sections():
        return re.findall("<h2>(.*?)</h2>", run_page(read_run(folder)))

    assert sections() == [
        "Learning",
        "Who worked with whom",
        "What nodes hold",
        "Bytes",
        "Time",
        "Faults",
        "Settings",
    ]
    (folder / "partition.json").write_text("null\n")
    (folder / "topology.json").unlink()
    assert sections() == ["Learning", "Bytes", "Time", "Faults", "Settings"]


def test_a_run_that_was_broken_off_is_shown_as_far_as_it_came(finished_run):
    folder = finished_run()
    for name in ("summary.json", "traffic.json", "topology.json", "partition.json"):
        (folder / name).unlink()
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole[:-20])  # killed while it wrote
    run = read_run(folder)
    assert [row["round"] for row in run.rows] == [0, 1]
    assert "1 of 2" in run_page(run)
    for file in folder.iterdir():
        if file.name != "settings.json":
            file.unlink()
    page = run_page(read_run(folder))
    assert re.findall("<h2>(.*?)</h2>", page) == ["Faults", "Settings"]
    rows = re.findall(r"<tr>\s*<td[^>]*>(.*?)</td>\s*<td[^>]*>(.*?)</td>\s*</tr>", page)
    assert rows[:2] == [("strategy", "fedhead"), ("num-rounds", "2")]
    assert {("dataset", "digits"), ("train.lr", "0.05"), ("fedhead.sectors", "2")} < set(rows)


@pytest.mark.parametrize(
    ("name", "content"),
    [("settings.json", "{"), ("metrics.jsonl", "{}\n[1]\n{}\n"), ("about.json", '"text"')],
)
def test_a_malformed_file_is_named(finished_run, name, content):
    folder = finished_run()
    (folder / name).write_text(content)
    with pytest.raises(RunFilesError, check=at(folder / name)):
        read_run(folder)


def test_a_folder_without_a_run_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(RunFilesError, match=r"no settings.json", check=at(tmp_path)):
        read_run(tmp_path)


def test_settings_that_differ_from_the_defaults_come_first(finished_run):
    changed = read_run(finished_run(train__lr=0.3)).changed_settings
    assert changed == {"strategy": "fedhead", "num-rounds": 2, "train.lr": 0.3}
    assert next(iter(changed)) == "strategy"


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


def test_every_head_of_every_round_is_a_filled_cell_of_the_picture_too():
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
