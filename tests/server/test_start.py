"""A run whose training starts from a model that another strategy made in one phase."""

import json

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.server.app import main
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.page.run_page import run_page
from flwr_distill.server.record.checkpoint import checkpoints, load_checkpoint
from flwr_distill.server.rounds import NothingLearntError
from flwr_distill.strategies.analytic.method import TRAIN_SUMS
from flwr_distill.task.errors import SettingsError

pytestmark = pytest.mark.usefixtures("without_pictures")

NODES = 2
CONFIG = {
    "strategy": "fedavg",
    "start": "analytic",
    "model": "random-features",
    "num-rounds": 1,
    "min-nodes": NODES,
    "train.local-epochs": 1,
    "partition.scheme": "iid",
}


@pytest.fixture
def play(client_grid, tmp_path):
    """Run our ServerApp; give the run's folder and the grid."""

    def play(broken=lambda node, message: False, **settings):
        config = {**CONFIG, "runs-dir": str(tmp_path), **settings}
        grid = client_grid(NODES, config, broken=broken)
        main(grid, Context(1, 1, {}, RecordDict(), config))
        return tmp_path / "1", grid

    return play


def accuracies(folder):
    return [json.loads(line)["accuracy"] for line in (folder / "metrics.jsonl").open()]


def asked(grid):
    return [message.metadata.message_type for message in grid.pushed]


def model_after(folder, server_round):
    return as_arrays(load_checkpoint(checkpoints(folder)[server_round]).arrays)


def test_training_starts_from_the_model_that_the_strategy_alone_would_have_made(play, tmp_path):
    play(**{"strategy": "analytic", "start": "", "runs-dir": str(tmp_path / "alone")})
    folder, grid = play()
    assert asked(grid).count(TRAIN_SUMS) == NODES
    assert asked(grid)[-NODES:] == ["train"] * NODES
    made, first = model_after(tmp_path / "alone" / "1", 1), model_after(folder, 0)
    assert all(np.array_equal(made[name], first[name]) for name in made)
    assert accuracies(folder)[0] == accuracies(tmp_path / "alone" / "1")[1] > 0.9
    assert not np.array_equal(model_after(folder, 1)["head.weight"], first["head.weight"])
    page = run_page(read_run(folder))
    assert "started from the model that analytic made" in page
    assert "Nodes sent sums over their samples" in page


def test_a_resumed_run_goes_on_and_starts_no_second_time(play):
    folder, _ = play()
    _, grid = play(**{"resume": "1", "num-rounds": 2})
    assert TRAIN_SUMS not in asked(grid)
    assert accuracies(folder)[0] > 0.9
    assert len(accuracies(folder)) == 3


def test_a_start_that_makes_no_model_ends_the_run_before_training(play):
    def silent(node, message):
        return message.metadata.message_type == TRAIN_SUMS

    with pytest.raises(NothingLearntError, match=r"start = 'analytic' made no model: .*is broken"):
        play(broken=silent)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"start": "fedavg"}, "start = 'fedavg': it makes no model .*take one of analytic"),
        ({"strategy": "analytic"}, "strategy = 'analytic' it needs no start"),
        ({"strategy": "fedproto"}, "nodes keep models of their own"),
        ({"train.dp-noise": 1.0, "analytic.head": "lda"}, "strategy = 'analytic': lda has no rule"),
        ({"train.dp-noise": 1.0, "analytic.personal": 2.0}, "heads of their own sums .*no noise"),
        ({"model": "mlp", "backbone.trains": "all"}, "model='mlp' is no frozen network"),
    ],
)
def test_a_start_that_cannot_be_is_refused_before_any_node_is_asked(play, settings, said):
    with pytest.raises((SettingsError, ValueError), match=said):
        play(**settings)
