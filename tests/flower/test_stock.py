"""The app bundle runs on any Flower's own processes: `make test-flower VERSION=1.41.0`."""

import json
import math
from importlib.metadata import version

import pytest

STRATEGIES = ("fedavg", "hfldd", "fedhead", "cadis", "fedlgd")


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_trains_three_nodes_of_a_stock_flower(strategy, stock, app, little_distillation):
    runs = stock.folder / strategy
    config = {
        **{key: v for key, v in little_distillation.items() if key.startswith(f"{strategy}.")},
        "strategy": strategy,
        "num-rounds": 2,
        "min-nodes": 3,
        "phase-timeout": 300.0,
        "runs-dir": str(runs),
    }
    printed = stock.run(app, config)
    about = f"{printed[-4000:]}\n{stock.log.read_text()[-4000:]}"
    rows, phases = (
        [json.loads(line) for f in runs.glob(f"*/{name}.jsonl") for line in f.open()]
        for name in ("metrics", "journal")
    )
    assert [row["round"] for row in rows] == [0, 1, 2], about
    assert all(math.isfinite(row["loss"]) for row in rows), about
    assert len({row["loss"] for row in rows}) == 3, about  # each round made another model
    assert all(len(entry["nodes"]) == entry["asked"] for entry in phases if "asked" in entry), about
    assert not [entry for entry in phases if "warning" in entry or "error" in entry], about
    (summary,) = runs.glob("*/summary.json")
    assert json.loads(summary.read_text())["strategy"] == strategy
    own_way = printed.count("go Flower's own way")
    assert own_way == (0 if version("flwr").startswith("1.32.") else 1), about
