"""What the server can know beforehand ends a run before any node is asked anything."""

import re

import pytest

import flwr_distill.server.task
from flwr_distill.server.settings import RunSettings
from flwr_distill.server.task import Task
from flwr_distill.task.datasets.text import text_spec
from flwr_distill.task.errors import SettingsError

START = {"strategy": "fedavg", "start": "analytic", "model": "random-features"}
TABLE = {"dataset": "private", "private.classes": "no,yes", "private.columns": "age:50+-9"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"partition.classes": 11},
            "partition.classes = 11: must be 1 to 10, the number of classes in the data",
        ),
        (
            {"partition.scheme": "pareto", "partition.classes": 11},
            "partition.classes = 11: must be 1 to 10",
        ),
        (
            {"partition.scheme": "cluster-mc", "partition.clusters": ":".join("1" * 11)},
            "partition.clusters = '1:1:1:1:1:1:1:1:1:1:1': must be 1 to 10 sizes",
        ),
        (
            {"partition.scheme": "index-file"},
            "partition.index-file = '': must name a file for partition.scheme",
        ),
        (
            {"train.feature-layer": "nosuch"},
            "train.feature-layer = 'nosuch': 'nosuch' is not a dense layer of .*; it has ",
        ),
        (
            {"train.augment": "shift,mirror"},
            'train.augment = \'shift,mirror\': must be "none", "auto", or any of shift, ',
        ),
        ({"hfldd.distiller": "kpi"}, "hfldd.distiller = 'kpi': .*choose one of auto, .*kip"),
        (
            {"hfldd.distiller": "auto", "hfldd.network": "nets:Encoder"},
            "hfldd.network = 'nets:Encoder': distiller = 'auto' takes none \\(take dm",
        ),
        (
            {"hfldd.distiller": "kip", "hfldd.network": "nets:Encoder"},
            "hfldd.network = 'nets:Encoder': distiller = 'kip' takes none \\(take dm",
        ),
        (
            {"hfldd.distiller": "dm", "hfldd.network-weights": "encoder.safetensors"},
            "hfldd.network-weights = 'encoder.safetensors': .*name it by network",
        ),
        ({"hfldd.start": "nosie"}, "hfldd.start = 'nosie': must be one of class-stats, "),
        ({"hfldd.auxiliary": "nosie"}, "hfldd.auxiliary = 'nosie': .*did you mean noise?"),
        (
            {"strategy": "fedhead-plus", "fedhead.reference": "fashion"},
            "fedhead.reference = 'fashion': choose noise, .*did you mean fashion-mnist?",
        ),
        (
            {"strategy": "feddf", "fedhead.reference": "/no/such/folder"},
            "fedhead.reference = '/no/such/folder': on the server: ",
        ),
        ({"aggregator": "collections:OrderedDict"}, "aggregator = .* is not a flwr.*Strategy"),
        (
            {"strategy": "qfedavg", "train.lr-schedule": "cosine"},
            'train.lr-schedule = "cosine": q-FedAvg .*set it to "constant"',
        ),
        ({"aggregator": "krun"}, "aggregator = 'krun': not one of .*krum"),
        (
            {"aggregator": "krum", "aggregator-args": '{"num_malicious_nodes": "two"}'},
            "aggregator-args: num_malicious_nodes = 'two': should be a valid integer",
        ),
        (
            {"strategy": "fedavg", "strategy-args": '{"fraction_train": "all"}'},
            "strategy-args: fraction_train = 'all': should be a valid number",
        ),
        (
            {"strategy-args": '{"min_available_nodes": 2.5}'},
            "strategy-args: min_available_nodes = 2.5: .*integer",
        ),
        ({"strategy-args": '{"nosuch": 1}'}, "strategy-args = .*nosuch"),
        ({"model": "resnet7"}, "model = 'resnet7': is unknown here .choose auto, "),
        ({"dataset": "digit"}, "digit.*digits"),
        (
            {"strategy": "fedavg", "train.dp-noise": 1.0, "model": "resnet8"},
            r"train\.dp-noise = 1.0: .* model = 'resnet8': layer '.*', a BatchNorm2d, ",
        ),
        ({"strategy": "fednova", "train.momentum": 0.9}, "train.momentum = 0.9: FedNova"),
        ({"strategy": "fednova", "train.optimizer": "adam"}, "train.optimizer = 'adam'"),
        ({"hfldd.votes": True}, "hfldd.rotate = True: must be false for hfldd.votes"),
        (
            {"hfldd.votes": True, "hfldd.rotate": False},
            "hfldd.complete-clusters = True: must be false for hfldd.votes",
        ),
        (
            TABLE | {"hfldd.dp-epsilon": 1.0, "hfldd.start": "noise"},
            "hfldd.dp-epsilon = 1.0: compares images of at least",
        ),
        (
            TABLE | {"strategy": "fedlgd", "fedlgd.dp-epsilon": 1.0, "fedlgd.refine-steps": 0},
            "fedlgd.dp-epsilon = 1.0: compares images of at least",
        ),
        (START | {"start": "fedavg"}, "start = 'fedavg': it makes no .*take one of analytic"),
        (START | {"strategy": "analytic"}, "strategy = 'analytic' it needs no start"),
        (START | {"strategy": "fedproto"}, "nodes keep models of their own"),
        (START | {"train.dp-noise": 1.0, "analytic.head": "lda"}, "'analytic': lda has no rule"),
        (
            START | {"train.dp-noise": 1.0, "analytic.personal": 2.0},
            "heads of their own sums .*no noise",
        ),
        (START | {"model": "mlp", "backbone.trains": "all"}, "no frozen network"),
    ],
)
def test_a_bad_setting_ends_the_run_before_any_node_is_asked(play, settings, said):
    with pytest.raises(ValueError, match=f"(?s){said}") as error:
        play({"strategy": "hfldd", **settings}, nodes=2)
    assert play.grid.pushed == []
    assert "\n" not in str(error.value)
    assert not re.search(r"Traceback|<class", str(error.value))


def test_changes_that_only_images_can_have_are_refused_for_other_data(monkeypatch):
    monkeypatch.setattr(
        flwr_distill.server.task, "data_spec", lambda settings: text_spec("some-texts", 4)
    )
    monkeypatch.setattr(flwr_distill.server.task, "check_partition_settings", lambda settings: None)
    settings = RunSettings.from_run_config({"train.augment": "shift"})
    with pytest.raises(SettingsError, match=r"train\.augment = .shift.: some-texts is a text"):
        Task.of(settings)
