"""Where one head trains a round, the global model is a mean of rounds, and training ignores it."""

import numpy as np
import pytest
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.in_process import run_in_process
from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.protocol.messages import ARRAYS
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.hfldd.round_mean import RoundMean

from .rounds import start

NODES = [{"partition-id": place, "num-partitions": 4} for place in range(4)]
RUN = {
    **{"dataset": "digits", "strategy": "hfldd", "num-rounds": 4, "train.local-epochs": 1},
    **{"partition.scheme": "pathological", "partition.classes": 3, "hfldd.groups": 2},
    **{"hfldd.distiller": "dm", "hfldd.distilled-size": 10, "hfldd.distill-steps": 2},
}
CONFIG = {key: value for key, value in RUN.items() if key.startswith(("partition", "train"))}


def model(value):
    """A model of a weight and a counter."""
    return {"w": np.float32([value, -value]), "batches": np.int64(7)}


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=12))
def test_the_mean_weighs_round_t_by_t_and_rounds_start_from_the_last_model(values):
    mean = RoundMean()
    current = model(0.0)
    for place, value in enumerate(values):
        started = mean.start(current)
        np.testing.assert_array_equal(started["w"], model(values[place - 1] if place else 0.0)["w"])
        current = mean.add(model(value))
    expected = np.average(values, weights=np.arange(1, len(values) + 1))
    np.testing.assert_allclose(current["w"], [expected, -expected], rtol=1e-4, atol=1e-4)
    assert current["batches"] == 7


def test_a_model_from_elsewhere_begins_a_new_mean():
    mean = RoundMean()
    mean.start(model(0.0))
    mean.add(model(1.0))
    elsewhere = model(5.0)
    assert mean.start(elsewhere) is elsewhere
    np.testing.assert_array_equal(mean.add(model(3.0))["w"], model(3.0)["w"])


def test_a_restored_mean_continues():
    ours, restored = RoundMean(), RoundMean()
    ours.start(model(0.0))
    ours.start(ours.add(model(1.0)))
    current = ours.add(model(2.0))
    restored.load_state_dict(ours.state_dict())
    for mean in (ours, restored):
        np.testing.assert_array_equal(mean.start(current)["w"], model(2.0)["w"])
    np.testing.assert_array_equal(ours.add(model(9.0))["w"], restored.add(model(9.0))["w"])


@pytest.mark.parametrize(
    ("average", "complete", "averaged"),
    [(True, True, True), (False, True, False), (True, False, False)],
    ids=["one head", "switched off", "two heads"],
)
def test_only_where_one_head_trains_a_round_is_the_model_a_mean(
    average, complete, averaged, client_grid
):
    strategy = HFLDD(
        average_rounds=average,
        complete_clusters=complete,
        **{"auxiliary_size": 50, "groups": 2, "rotate": False},
        **{"distiller": "dm", "distilled_size": 4, "distill_steps": 1},
    )
    grid = client_grid(4, {**CONFIG, "partition.classes": 2})
    arrays, trained = start(), []
    for server_round in (1, 2, 3):
        messages = list(strategy.configure_train(server_round, arrays, ConfigRecord(), grid))
        sent = as_arrays(messages[0].content.array_records[ARRAYS])
        expected = trained[-1] if averaged and trained else as_arrays(arrays)
        for name, array in expected.items():
            np.testing.assert_array_equal(sent[name], array)
        replies = list(grid.send_and_receive(messages))
        trained.append(as_arrays(replies[0].content.array_records[ARRAYS]))
        arrays, _ = strategy.aggregate_train(server_round, replies)
        if averaged:
            weights = range(1, len(trained) + 1)
            for name, array in as_arrays(arrays).items():
                mean = np.average([one[name] for one in trained], axis=0, weights=weights)
                np.testing.assert_allclose(array, mean, rtol=1e-4, atol=1e-6)
    assert (len(messages) == 1) == complete


def test_a_resumed_run_has_the_same_mean(tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir()
    halves.mkdir()
    run_in_process(RUN, NODES, whole)
    run_in_process({**RUN, "num-rounds": 2}, NODES, halves)
    run_in_process({**RUN, "resume": "1"}, NODES, halves)
    models = [(folder / "1" / "model.safetensors").read_bytes() for folder in (whole, halves)]
    assert models[0] == models[1]
