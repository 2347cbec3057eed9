"""Two tiers in one process: real ClientApps and ServerApps, real sockets between them."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from safetensors.numpy import load_file

from benchmarks.edges_in_process import (
    ThreadControl,
    edge_in_process,
    edge_node,
    partition_nodes,
)
from benchmarks.in_process import FIRST_NODE, InProcessGrid
from flwr_distill.protocol.meeting import DESCRIBE
from flwr_distill.server.app import main
from flwr_distill.server.page.run_files import flat
from flwr_distill.server.record.checkpoint import checkpoints
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.errors import SettingsError

from .runs import phases, read, rows

NODES, EDGES, ROUNDS = 6, 2, 3
QUICK = {
    **{"strategy": "fedavg", "num-rounds": ROUNDS, "train.local-epochs": 1, "model": "mlp"},
    **{"partition.scheme": "pathological", "partition.classes": 4, "phase-timeout": 120.0},
    "most-samples": 0.0,
}


def full(config):
    """As Flower hands it out: with all keys."""
    return flat(RunSettings.from_run_config(config).model_dump(by_alias=True))


@pytest.fixture
def flat_run(tmp_path):
    """The federation without edges."""

    def run(**settings):
        config = full({**QUICK, "runs-dir": str(tmp_path / "flat"), "min-nodes": NODES, **settings})
        nodes = partition_nodes(range(NODES), NODES, tmp_path / "flat-nodes")(1, config)
        main(InProcessGrid(nodes), Context(1, 1, {}, RecordDict(), config))
        return tmp_path / "flat" / "1"

    return run


class Tiers:
    """Edges with three nodes each; `runs` are runs above."""

    def __init__(self, folder, stack, own):
        self.folder, self.controls, self.edges, self.sockets = folder, [], [], []
        for i in range(EDGES):
            each = range(i * NODES // EDGES, (i + 1) * NODES // EDGES)
            nodes = partition_nodes(each, NODES, folder / "nodes")
            self.controls.append(ThreadControl(nodes))
            edge = edge_in_process(
                self.controls[i],
                {"strategy": "fedavg", "min-nodes": len(each), "most-samples": 0.0, **own},
                folder / f"edge-{i}" / "below",
            )
            runs, sockets = stack.enter_context(edge)
            self.edges.append(runs)
            self.sockets.append(sockets)

    def run(self, run_id=1, wrap=lambda place, node: node, **settings):
        config = {**QUICK, "runs-dir": str(self.folder / "above"), "min-nodes": EDGES, **settings}
        config = full(config)
        nodes = {}
        for i, sockets in enumerate(self.sockets):
            state = self.folder / f"edge-{i}"
            node = edge_node(run_id, FIRST_NODE + i, f"edge-{i}", sockets, state, config)
            nodes[FIRST_NODE + i] = wrap(i, node)
        main(InProcessGrid(nodes), Context(run_id, 1, {}, RecordDict(), config))
        return self.folder / "above" / settings.get("resume", str(run_id))

    def runs_below(self, place):
        runs = self.folder / f"edge-{place}" / "below" / "runs"
        return sorted(runs.iterdir(), key=lambda folder: int(folder.name))


@pytest.fixture
def tiers(tmp_path):
    with ExitStack() as stack:
        yield lambda **own: Tiers(tmp_path, stack, own)


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_alike(first, second, **tolerance):
    assert first.keys() == second.keys()
    for name, values in first.items():
        np.testing.assert_allclose(second[name], values, **tolerance)


def round_of(message):
    return message.content.config_records.get("config", {}).get("server-round")


FLOAT = {"rtol": 1e-4, "atol": 1e-5}


def test_two_edges_of_three_nodes_learn_what_six_nodes_learn(tiers, flat_run):
    """A mean of means, weighted by samples, is the mean."""
    two = tiers()
    assert_alike(weights(flat_run()), weights(two.run()), **FLOAT)
    for control in two.controls:  # each has ended by itself, with results
        assert [s.status for s in control.join(30.0).values()] == ["finished:completed"]
    for place in range(EDGES):
        (folder,) = two.runs_below(place)
        assert [row["round"] for row in rows(folder)] == [0, 1, 2, 3]
        assert (folder / "report.html").exists()
        warnings = read(folder, "summary")["warnings"]
        assert not [text for text in warnings if text.startswith("Ended")]


def breaks_off_in(server_round):
    """The server above ends once the second edge has answered in a round."""

    def wrap(place, node):
        def answer(message):
            content = node(message)
            if place == 1 and round_of(message) == server_round:
                raise KeyboardInterrupt
            return content

        return answer

    return wrap


@pytest.mark.slow
def test_a_run_that_breaks_off_above_goes_on_below_where_it_was(tiers, flat_run):
    two = tiers()
    with pytest.raises(KeyboardInterrupt):
        two.run(wrap=breaks_off_in(2))  # the edge is a round ahead of the checkpoint above
    resumed = two.run(run_id=2, resume="1")
    assert_alike(weights(flat_run()), weights(resumed), **FLOAT)
    for place in range(EDGES):
        (folder,) = two.runs_below(place)  # that of the run which was started first is gone
        assert [row["round"] for row in rows(folder)] == [0, 1, 2, 3]
        assert [config["resume"] for config in two.controls[place].configs] == ["", "", folder.name]


@pytest.mark.slow
def test_it_goes_on_below_also_where_the_server_was_killed_as_it_wrote_a_checkpoint(tiers):
    two = tiers()
    with pytest.raises(KeyboardInterrupt):
        two.run(wrap=breaks_off_in(3), **{"num-rounds": 4})  # and here it is two rounds ahead
    checkpoints(two.folder / "above" / "1")[2].unlink()
    two.run(run_id=2, resume="1", **{"num-rounds": 4})
    for place in range(EDGES):
        (folder,) = two.runs_below(place)
        assert [row["round"] for row in rows(folder)] == [0, 1, 2, 3, 4]
        assert two.controls[place].configs[-1]["resume"] == folder.name


@pytest.mark.slow
def test_a_run_below_that_ends_too_early_goes_on_with_the_next_message(tiers, flat_run):
    two = tiers()

    def ends(place, node):
        def answer(message):
            if place == 0 and round_of(message) == 2:
                two.edges[0].end()
            return node(message)

        return answer

    assert_alike(weights(flat_run()), weights(two.run(wrap=ends)), **FLOAT)
    (folder,) = two.runs_below(0)
    assert [row["round"] for row in rows(folder)] == [0, 1, 2, 3]


@pytest.mark.slow
def test_an_edge_that_was_away_after_the_last_round_evaluates_it(tiers):
    two = tiers()

    def ends(place, node):
        def answer(message):
            if place == 0 and message.metadata.message_type == "evaluate":
                two.edges[0].end()
            return node(message)

        return answer

    folder = two.run(wrap=ends, **{"fraction-evaluate": 1.0, "num-rounds": 1})
    (evaluated,) = phases(folder, "evaluate")
    assert len(evaluated["nodes"]) == EDGES


@pytest.mark.matrix
def test_nodes_below_evaluate_if_nodes_above_are_to(tiers, flat_run):
    settings = {"fraction-evaluate": 1.0, "num-rounds": 2}
    two = tiers()
    together, alone = rows(two.run(**settings)), rows(flat_run(**settings))
    below = [rows(two.runs_below(place)[0]) for place in range(EDGES)]
    for number in (1, 2):
        mean = np.mean([edge[number]["node_accuracy"] for edge in below])
        assert mean == pytest.approx(alone[number]["node_accuracy"])
        assert together[number]["node_accuracy"] == pytest.approx(mean, abs=0.1)


@pytest.mark.matrix
def test_an_edge_can_be_a_sector_whose_leader_distils(tiers):
    always = {"fedhead.least-gain": 0.0, "fedhead.least-classes": 0.0}
    two = tiers(**{"strategy": "fedhead", "fedhead.distill-epochs": 1, **always})
    folder = two.run(**{"num-rounds": 2})
    assert rows(folder)[-1]["accuracy"] > rows(folder)[0]["accuracy"]
    (below,) = two.runs_below(0)
    assert phases(below, "train.sector")
    assert phases(below, "train.aggregate_sector")
    students = [entry["nodes"].values() for entry in phases(below, "train.distill_sector")]
    assert [[node["distill-epochs"] for node in nodes] for nodes in students] == [[1], [1]]
    assert len(read(below, "topology")["clusters"]) == 1


@pytest.mark.matrix
def test_an_edge_hides_its_nodes_models_from_itself_in_a_secure_sum(tiers, flat_run):
    two = tiers(**{"secure-sums": True})
    together = weights(two.run())
    assert_alike(weights(flat_run()), together, rtol=0, atol=1e-3)  # units of 2^-20, times samples
    assert two.controls[0].configs[0]["secure-sums"] is True


def missing(tiers, requirement=None, **above):
    """What an edge says is missing when a run above first meets it."""
    state, config = tiers.folder / "edge-0", full({**QUICK, **above})
    node = edge_node(1, FIRST_NODE, "edge-0", tiers.sockets[0], state, config)
    records = {"config": ConfigRecord(requirement)} if requirement else {}
    content = node(Message(RecordDict(records), FIRST_NODE, DESCRIBE, ttl=120.0))
    assert content["metrics"]["num-examples"] == 0
    (reason,) = content["config"]["missing"]
    return reason


@pytest.mark.parametrize(
    ("own", "above", "reason"),
    [
        ({}, {"strategy": "hfldd"}, "only averages models"),
        ({}, {"secure-sums": True}, "secure-sums = true needs the nodes themselves"),
        ({}, {"start": "analytic"}, "asks nodes for more than a model"),
        ({"min-nodes": 4}, {"phase-timeout": 2.0}, "min-nodes = 4: 3 nodes connected"),
        ({"strategy": "fedproto"}, {}, "'fedproto' cannot serve below an edge"),
    ],
)
def test_an_edge_says_at_once_in_which_runs_it_cannot_take_part(tiers, own, above, reason):
    edges = tiers(**own)
    assert reason in missing(edges, **above)
    assert own or not edges.controls[0].configs  # nothing was started


@pytest.mark.parametrize(
    ("run", "shown"),
    [
        ({"classes": ["0", "1"], "columns": ["height"]}, "height"),
        ({"classes": ["0", "2"], "columns": ["age"]}, "0 and 2"),
    ],
)
def test_an_edge_whose_table_has_other_names_than_the_servers_says_so(tiers, tmp_path, run, shown):
    for part in ("train", "test"):
        rows = "".join(f"{number},{number % 2}\n" for number in range(60))
        (tmp_path / f"{part}.csv").write_text("age,label\n" + rows)
    table = {"dataset": "csv", "partition.scheme": "iid"}
    assert shown in missing(tiers(**{"data-root": str(tmp_path)}), run, **table)


def test_messages_of_other_strategies_are_refused_one_by_one(tiers):
    """A server may send what it never declared."""
    node = edge_node(1, FIRST_NODE, "", tiers().sockets[0], Path("/nowhere"), full(QUICK))
    with pytest.raises(SettingsError, match=r"there is no train\.sector on an edge"):
        node(Message(RecordDict(), FIRST_NODE, "train.sector"))
