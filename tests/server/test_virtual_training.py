"""``train.on="virtual"``: with any strategy, nodes make virtual images once and train on them."""

import pytest

from flwr_distill.client.virtual_data import TRAINED_ON
from tests.server.run_folder import rows

FEW = {"train__on": "virtual", "virtual__per_class": 2, "virtual__first_steps": 3}
QUICK = {"vhl": {"vhl__per_class": 4, "vhl__virtual_batch": 8}}


@pytest.mark.parametrize(
    "strategy", ["fedavg", "fedprox", "fednova", "scaffold", "moon", "fedproto", "vhl", "cadis"]
)
def test_any_strategy_trains_so(play, tmp_path, strategy):
    settings = {**FEW, **QUICK.get(strategy, {}), "fraction_evaluate": 1.0}
    folder = play(nodes=2, strategy=strategy, num_rounds=1, **settings)
    assert len(rows(folder)) == 2
    assert len(list(tmp_path.glob(f"state/**/{TRAINED_ON}"))) == 2
