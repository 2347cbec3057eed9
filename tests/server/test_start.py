"""A run whose training starts from a model that another strategy made in one phase."""

from functools import partial

import numpy as np
import pytest

from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.page.run_page import run_page
from flwr_distill.server.record.checkpoint import checkpoints, load_checkpoint
from flwr_distill.server.rounds import NothingLearntError
from flwr_distill.strategies.analytic.method import TRAIN_SUMS
from tests.errors import at
from tests.server.run_folder import rows

CONFIG = {
    "start": "analytic",
    "model": "random-features",
    "num-rounds": 1,
    "partition.scheme": "iid",
}


@pytest.fixture
def run(play):
    return partial(play, CONFIG, nodes=2)


def accuracies(folder):
    return [row["accuracy"] for row in rows(folder)]


def asked(grid):
    return [message.metadata.message_type for message in grid.pushed]


def model_after(folder, server_round):
    return as_arrays(load_checkpoint(checkpoints(folder)[server_round]).arrays)


def test_training_starts_from_the_model_that_the_strategy_alone_would_have_made(
    run, play, tmp_path
):
    alone = run(strategy="analytic", start="", runs_dir=str(tmp_path / "alone"))
    folder = run()
    assert asked(play.grid).count(TRAIN_SUMS) == 2
    assert asked(play.grid)[-2:] == ["train"] * 2
    model, first = model_after(alone, 1), model_after(folder, 0)
    assert all(np.array_equal(model[name], first[name]) for name in model)
    assert accuracies(folder)[0] == accuracies(alone)[1] > 0.9
    assert not np.array_equal(model_after(folder, 1)["head.weight"], first["head.weight"])
    page = run_page(read_run(folder))
    assert "started from the model that analytic made" in page
    assert "Nodes sent sums over their samples" in page


def test_a_resumed_run_goes_on_and_starts_no_second_time(run, play):
    folder = run()
    run(resume="1", num_rounds=2)
    assert TRAIN_SUMS not in asked(play.grid)
    assert accuracies(folder)[0] > 0.9
    assert len(accuracies(folder)) == 3


def test_a_start_that_makes_no_model_ends_the_run_before_training(run):
    def silent(node, message):
        return message.metadata.message_type == TRAIN_SUMS

    with pytest.raises(NothingLearntError, match="this node is broken", check=at("start")):
        run(broken=silent)
