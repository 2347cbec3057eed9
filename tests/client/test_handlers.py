"""Our methods' handlers in someone's own ClientApp, on their model and their data."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import TensorDataset

from flwr_distill.client import handlers
from flwr_distill.client.handlers import add_methods
from flwr_distill.protocol.registry import all_methods
from flwr_distill.strategies.cadis import CADIS
from flwr_distill.strategies.fedhead import FedHEAD
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.file_state import FilesChangedError
from tests.errors import at

NODES, CLASSES = 4, 3


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, CLASSES)
        )

    def forward(self, x):
        return self.layers(x)


def samples(seed, number=30):
    """Images whose brightest row is their label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    images = torch.rand(number, 1, 8, 8, generator=generator) - 0.5
    images[torch.arange(number), 0, labels] += 1.0
    return images, labels


def load(context):
    node = context.node_config["partition-id"]
    return samples(node), TensorDataset(*samples(100 + node))


@pytest.fixture
def context(tmp_path):
    """Flower's context of a node in someone's run."""

    def make(node=0, run_config=None, run_id=5, **node_config):
        config = {"partition-id": node, "num-partitions": NODES, "state-dir": str(tmp_path)}
        own = run_config if run_config is not None else {"learning-rate": 0.1, "model": "resnet"}
        return Context(run_id, 100 + node, {**config, **node_config}, RecordDict(), own)

    return make


@pytest.fixture
def grid(memory_grid, context):
    """Grid of nodes with an app."""

    def make(app, **settings):
        def node(place):
            of_node = context(place, **settings)
            return lambda message: app(message, of_node).content

        return memory_grid({100 + place: node(place) for place in range(NODES)})

    return make


def app_with(*methods, model=Net, data=load):
    app = ClientApp()
    add_methods(app, *methods, model=model, data=data)
    return app


def asked(message_type, content=None):
    return Message(content or RecordDict(), 100, message_type)


def evaluated(app, context):
    content = RecordDict({"arrays": ArrayRecord(Net().state_dict())})
    return app(asked("evaluate", content), context).content.metric_records["metrics"]


STRATEGIES = {
    "hfldd": lambda: HFLDD(groups=2, distill_steps=3),
    "fedhead": FedHEAD,
    "cadis": lambda: CADIS(fraction_evaluate=0.0),
}


@pytest.mark.parametrize("method", STRATEGIES)
def test_one_line_has_someones_client_app_answer_a_method(grid, method):
    start = Net().state_dict()
    result = STRATEGIES[method]().start(
        grid=grid(app_with(method)), initial_arrays=ArrayRecord(start), num_rounds=2
    )
    images, labels = samples(200, 300)
    model = Net()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    assert (model(images).argmax(1) == labels).float().mean() > 0.6


@pytest.mark.parametrize("method", sorted(m.name for m in all_methods().values() if m.strategy))
def test_each_method_is_found_by_its_declaration(method):
    app = app_with(method)
    for phase in all_methods()[method].phases:
        category, _, action = phase.message_type.partition(".")
        with pytest.raises(ValueError, match="already registered"):
            getattr(app, category)(action or "default")(lambda message, context: message)


def test_what_the_app_has_registered_before_stays_its_own(context):
    app = ClientApp()

    @app.train()
    def train(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"mine": 1})}), reply_to=message)

    add_methods(app, "hfldd", model=Net, data=load)
    reply = app(asked("train"), context())
    assert dict(reply.content.metric_records["metrics"]) == {"mine": 1}
    assert evaluated(app, context())["num-examples"] == 30  # ours, where it has none


@pytest.mark.parametrize("method", ["cadis", "moon", "scaffold", "fednova"])
def test_an_own_train_that_would_leave_out_what_a_method_adds_is_refused(method):
    app = ClientApp()
    app.train()(lambda message, context: message)
    with pytest.raises(SettingsError, match=method):
        add_methods(app, method, model=Net, data=load)


def test_an_unknown_method_is_refused_by_name():
    with pytest.raises(SettingsError, match="hfldf"):
        app_with("hfldf")


def test_several_methods_go_in_one_line(grid):
    app = app_with("hfldd", "cadis")
    for strategy in ("hfldd", "cadis"):
        STRATEGIES[strategy]().start(
            grid=grid(app), initial_arrays=ArrayRecord(Net().state_dict()), num_rounds=1
        )


def test_handlers_read_train_and_seed_of_the_run_config_and_nothing_else_of_it(context):
    others = {"model": "resnet", "dataset": "cifar10", "partition.scheme": "theirs", "train": 3}
    assert evaluated(app_with("hfldd"), context(run_config=others))["num-examples"] == 30
    with pytest.raises(SettingsError, match=r"train\.lr"):
        evaluated(app_with("hfldd"), context(run_config={"train.lr": -1.0}))


def test_the_data_function_gets_the_apps_own_run_config_and_is_called_once_a_run(context):
    calls = []

    def load(context):
        calls.append((context.run_id, context.run_config["share"]))
        return samples(0), samples(1)

    app = app_with("hfldd", data=load)
    for run_id in (5, 5, 6):
        evaluated(app, context(run_id=run_id, run_config={"share": 0.5}))
    assert calls == [(5, 0.5), (6, 0.5)]


def test_data_that_differ_from_call_to_call_end_with_the_functions_name(context):
    def unseeded(context):
        return samples(int(np.random.default_rng().integers(10**6))), samples(1)

    app = app_with("hfldd", data=unseeded)
    evaluated(app, context())
    handlers._load.cache_clear()  # as in another process
    with pytest.raises(FilesChangedError, match="unseeded"):
        evaluated(app, context())


IMAGES, LABELS = samples(0)
BAD = {
    "pixels of 8 bits": ((IMAGES.to(torch.uint8), LABELS), "floats"),
    "a table": ((IMAGES.flatten(1), LABELS), r"n, C, H, W"),
    "fewer labels": ((IMAGES, LABELS[1:]), "29 labels"),
    "a label without an output": ((IMAGES, LABELS + 1), "3 outputs"),
    "no number": ((IMAGES * float("nan"), LABELS), "finite"),
    "no samples": ((IMAGES[:0], LABELS[:0]), "no training samples"),
    "fractions as labels": (TensorDataset(IMAGES, LABELS + 0.5), "whole number"),
    "records": ([{"img": IMAGES[0], "label": 1}], "pair"),
    "nothing": (None, "pair"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_data_are_an_error_that_names_the_function_and_what_is_wrong(context, what):
    data, reason = BAD[what]

    def wards(context):
        return data, samples(1)

    with pytest.raises(ValueError, match=rf"(?s)wards.*{reason}"):
        evaluated(app_with("hfldd", data=wards), context())


def test_an_error_of_the_functions_has_their_file_and_line(context):
    def wards(context):
        raise KeyError("no such ward")

    with pytest.raises(ValueError, match=r"KeyError.*test_handlers\.py, line \d+"):
        evaluated(app_with("hfldd", data=wards), context())
    with pytest.raises(ValueError, match=r"model.*KeyError.*test_handlers\.py, line \d+"):
        evaluated(app_with("hfldd", model=lambda: wards(0)), context())


@pytest.mark.parametrize(
    ("key", "value"), [("holdout", 0.2), ("classes", "cat,dog"), ("fewest-of-a-class", 5)]
)
def test_an_owners_rule_on_samples_is_not_passed_by(context, key, value):
    with pytest.raises(SettingsError, match=key):
        evaluated(app_with("hfldd"), context(**{key: value}))


def test_models_without_test_samples_are_evaluated_nowhere(context):
    app = app_with("hfldd", data=lambda context: (samples(0), (IMAGES[:0], LABELS[:0])))
    with pytest.raises(SettingsError, match="no sample", check=at("data")):
        evaluated(app, context())


def test_in_a_simulation_no_node_loads_the_data_of_another(grid):
    seen = []

    def load(context):
        seen.append(context.node_id)
        return samples(context.node_id), samples(1)

    app = app_with("hfldd", data=load)
    STRATEGIES["hfldd"]().start(
        grid=grid(app, simulated=True),
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=1,
    )
    assert sorted(seen) == [100, 101, 102, 103]
