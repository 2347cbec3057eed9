"""The example of an app of one's own: its ServerApp and ClientApp, or ours with its model."""

import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from benchmarks.flower_federation import FlowerFederation
from flwr_distill.client.app import app as our_client

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own-app"
NODES = 5


@pytest.fixture
def example(on_path):
    """The app's modules: client_app, server_app, task."""
    on_path(EXAMPLE)
    from digits_app import client_app, server_app, task

    return client_app, server_app, task


@pytest.fixture
def run_config():
    """Settings of its pyproject.toml, flat as Flower gives them."""
    app = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    config = dict(app["config"])
    train = config.pop("train")
    return config | {f"train.{key}": value for key, value in train.items()}


@pytest.fixture
def learn(example, run_config, memory_grid, tmp_path, monkeypatch):
    """Accuracy of the model that the app's ServerApp keeps, on digits that no node has."""
    _, server_app, task = example
    monkeypatch.chdir(tmp_path)

    def run(client, **settings):
        config = {**run_config, **settings}

        def node(place):
            own = {"partition-id": place, "num-partitions": NODES, "state-dir": str(tmp_path)}
            context = Context(1, 100 + place, own, RecordDict(), config)
            return lambda message: client(message, context).content

        torch.manual_seed(0)
        grid = memory_grid({100 + place: node(place) for place in range(NODES)})
        server_app.app(grid, Context(1, 1, {}, RecordDict(), config))
        return accuracy(task, tmp_path)

    return run


def accuracy(task, folder):
    model = task.Net()
    model.load_state_dict(torch.load(folder / "final_model.pt", weights_only=True))
    return task.accuracy(model, *task.digits("server"))


@pytest.mark.slow
def test_with_one_line_the_app_learns_by_hfldd_what_it_does_not_by_fedavg(example, learn):
    by_hfldd = learn(example[0].app)
    assert by_hfldd > 0.85
    assert by_hfldd > learn(example[0].app, strategy="fedavg") + 0.1


@pytest.mark.slow
def test_our_client_trains_the_apps_model(learn):
    assert learn(our_client) > 0.85


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flwr_run_runs_the_app_on_real_nodes(example, tmp_path):
    app = tmp_path / "own-app"
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("__pycache__"))
    with FlowerFederation(3, tmp_path / "federation", ours=3) as federation:
        outcome = federation.run(app, {"num-server-rounds": 3})
    about = "\n".join(outcome.lines[-60:])
    assert accuracy(example[2], tmp_path / "federation") > 0.7, about
