"""A model two of whose layers share their weights, with every strategy."""

import pytest
from safetensors.numpy import load_file

from flwr_distill.protocol.registry import all_methods
from flwr_distill.task.errors import SettingsError
from tests.matrix import strategies
from tests.server.run_folder import rows
from tests.task.test_model_checks import Tied

QUICK = {
    "model": f"{Tied.__module__}:Tied",
    "partition.scheme": "iid",
    "train.batch-size": 64,
    "patience-failed": 1,
}
CENTRAL = {name for name in all_methods() if name.startswith("dp-")}
ELSEWHERE = {"analytic", "bulyan", *CENTRAL}
"""One trains no network, one needs more nodes, and others refuse the model."""
ALWAYS = {"dynafed", "fedadam", "feddyn", "fedfa", "fedmd", "fednova", "fedproto", "moon"}
"""Those that treat what is trained in a way of their own, or store models on nodes."""


@pytest.mark.parametrize("strategy", strategies(all_methods().keys() - ELSEWHERE, always=ALWAYS))
def test_shared_weights_train_with_every_strategy_and_stay_the_same(
    play, little_distillation, strategy
):
    folder = play({**QUICK, **little_distillation}, nodes=4, strategy=strategy)
    assert [row["set_aside"] for row in rows(folder)] == [0, 0, 0]
    if all_methods()[strategy].outcome != "personal":
        model = load_file(folder / "model.safetensors")
        assert (model["first.weight"] == model["second.weight"]).all()


@pytest.mark.parametrize("strategy", sorted(CENTRAL))
def test_noise_on_each_array_by_itself_is_refused_with_the_layer(play, strategy):
    with pytest.raises(SettingsError, match=r"share 'second\.weight'"):
        play(QUICK, nodes=4, strategy=strategy)
    assert play.grid.pushed == []
