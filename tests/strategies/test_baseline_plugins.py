"""What baselines and FedDM have in common: refusals, rejected replies, and their state."""

import re

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_distill.protocol.arrays import as_record
from flwr_distill.server.privacy import check_privacy
from flwr_distill.server.settings import RunSettings
from flwr_distill.strategies.common.registry import create_strategy, find_strategy
from flwr_distill.strategies.feddm import FedDM
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.errors import SettingsError
from flwr_distill_baselines.dynafed import DynaFed
from flwr_distill_baselines.fedaf import FedAF
from flwr_distill_baselines.fedhkd import FedHKD
from flwr_distill_baselines.fedmd import FedMD
from flwr_distill_baselines.fedproto import FedProto
from flwr_distill_baselines.fedseq import FedSeq
from flwr_distill_baselines.fedseq_zaccone import FedSeq as FedSeqZaccone
from flwr_distill_baselines.vhl import VHL
from tests.errors import at
from tests.strategies.naive import UNEQUAL, play, start
from tests.strategies.rounds import FIRST, MODEL, SPEC, spoil

WIDTH = MODEL[-1].in_features
PUBLIC = 20
MAKE = {
    "dynafed": lambda **settings: DynaFed(model=MODEL, spec=SPEC, **settings),
    "fedaf": lambda **settings: FedAF(model=MODEL, spec=SPEC, **settings),
    "feddm": lambda **settings: FedDM(model=MODEL, spec=SPEC, **settings),
    "fedhkd": lambda **settings: FedHKD(model=MODEL, **settings),
    "fedmd": lambda **settings: FedMD(num_classes=10, **{"auxiliary_size": PUBLIC, **settings}),
    "fedproto": lambda **settings: FedProto(model=MODEL, **settings),
    "fedseq": lambda **settings: FedSeq(**settings),
    "fedseq-zaccone": lambda **settings: FedSeqZaccone(num_classes=10, **settings),
    "vhl": lambda **settings: VHL(**settings),
}
LOGITS = np.random.default_rng(0).normal(size=(PUBLIC, 10)).astype(np.float32)
CLASSES = {"classes": np.array([3]), "counts": np.array([5])}
FEATURES = np.ones((1, WIDTH), np.float32)
HONEST = {
    "fedhkd": {**CLASSES, "features": FEATURES, "predictions": np.full((1, 10), 0.1, np.float32)},
    "fedmd": {"logits": LOGITS},
    "fedproto": {**CLASSES, "prototypes": FEATURES},
}
"""Arrays that a node sends."""
RECORD = {"fedhkd": "hyper-knowledge", "fedmd": "logits", "fedproto": "prototypes"}
BAD = {
    ("fedhkd", "other width"): {"features": np.ones((1, WIDTH + 1), np.float32)},
    ("fedhkd", "nan"): {"features": np.full((1, WIDTH), np.nan, np.float32)},
    ("fedhkd", "no distribution"): {"predictions": np.full((1, 10), 0.2, np.float32)},
    ("fedhkd", "negative"): {"predictions": np.array([[2, -1] + [0] * 8], np.float32)},
    ("fedhkd", "other classes"): {"predictions": np.full((1, 5), 0.2, np.float32)},
    ("fedmd", "nan"): {"logits": np.full((PUBLIC, 10), np.nan, np.float32)},
    ("fedmd", "fewer samples"): {"logits": LOGITS[1:]},
    ("fedmd", "other classes"): {"logits": LOGITS[:, 1:]},
    ("fedmd", "other type"): {"logits": LOGITS.astype(np.float64)},
    ("fedmd", "flat"): {"logits": LOGITS.ravel()},
    ("fedmd", "another array"): {"odd": LOGITS},
    ("fedproto", "other width"): {"prototypes": np.ones((1, WIDTH + 1), np.float32)},
    ("fedproto", "no such class"): {"classes": np.array([10])},
    ("fedproto", "nan"): {"prototypes": np.full((1, WIDTH), np.nan, np.float32)},
    ("fedproto", "no samples"): {"counts": np.array([0])},
    **{(name, "nothing"): None for name in HONEST},
}


def replying(name):
    """A node that trains nothing, and sends what is in `HONEST`."""

    def reply(message):
        metrics = MetricRecord({"num-examples": 10, "train-loss": 1.0})
        model = {"arrays": start(MODEL)} if name == "fedhkd" else {}
        return RecordDict({**model, "metrics": metrics, RECORD[name]: as_record(HONEST[name])})

    return reply


@pytest.mark.parametrize(("name", "how"), BAD)
def test_a_malformed_reply_is_rejected_and_the_others_count(memory_grid, name, how, flower_log):
    def change(content):
        del content[RECORD[name]]
        if how != "nothing":
            content[RECORD[name]] = as_record({**HONEST[name], **BAD[name, how]})

    grids = [memory_grid(dict.fromkeys((FIRST, FIRST + 1), replying(name))) for _ in range(2)]
    spoil(grids[0], FIRST, change)
    grids[1].nodes[FIRST] = lambda message: None
    found, expected, arrays = MAKE[name](), MAKE[name](), start(MODEL)
    after = play(found, grids[0], 1, arrays)
    play(expected, grids[1], 1, arrays)
    assert re.search(rf"Reply of node {FIRST} to \S+ rejected", flower_log.text)
    assert isinstance(after, ArrayRecord)
    assert after is not arrays  # a round whose arrays are the old object counts as failed
    assert found.records() == expected.records()
    assert len(found.records()) == 2


@pytest.mark.parametrize("name", HONEST)
def test_what_the_server_sends_after_a_restart_is_what_it_would_have_sent(memory_grid, name):
    first, again = MAKE[name](), MAKE[name]()
    play(first, memory_grid({FIRST: replying(name), FIRST + 1: replying(name)}), 1, start(MODEL))
    again.load_state_dict(first.state_dict())
    assert first.records() == again.records()
    assert RECORD[name] in again.records()


@pytest.mark.parametrize("name", ["fedaf", "feddm", "fedhkd", "fedmd", "fedproto", "vhl"])
def test_differential_privacy_is_refused_by_server_and_node(client_grid, name, flower_log):
    settings = RunSettings.from_run_config({"strategy": name, "train.dp-noise": 1.0})
    with pytest.raises(SettingsError, match=f"strategy = '{name}': "):
        check_privacy(settings, find_strategy(name)[1])
    grid = client_grid(2, {**UNEQUAL, "train.dp-noise": 1.0})
    messages = list(MAKE[name]().configure_train(1, start(MODEL), ConfigRecord(), grid))
    replies = grid.send_and_receive(messages)
    assert all("no differential privacy" in reply.error.reason for reply in replies)
    assert len(replies) == 2 or "no differential privacy" in flower_log.text


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *(("dynafed", {"trajectory": 0}), ("fedaf", {"gamma": 2.0}), ("fedmd", {"digest_lr": 0.0})),
        *(
            ("fedhkd", {"noise": -1.0}),
            ("fedproto", {"weight": -1.0}),
            ("fedseq", {"cluster_size": 0}),
            ("fedseq-zaccone", {"most_nodes": 0}),
        ),
        ("vhl", {"virtual_batch": 1}),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name, setting):
    ((key, value),) = setting.items()
    with pytest.raises(SettingsError, check=at(key.replace("_", "-"), value=value)):
        MAKE[name](**setting)


@pytest.mark.parametrize("name", ["dynafed", "fedaf", "feddm", "vhl"])
def test_data_without_images_are_refused_before_any_node_is_asked(a_run, name):
    strategy, method = find_strategy(name)
    text = DataSpec("letters", (1, 1, 12), 4, (0.5,), (0.5,), kind="text", vocabulary=50)
    with pytest.raises(SettingsError, match="texts"):
        create_strategy(strategy, method.settings(), a_run(spec=text), {})
