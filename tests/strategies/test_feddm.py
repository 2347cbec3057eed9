"""FedDM with our real ClientApp: the server trains on what nodes distilled, and checks it."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch.nn import functional

from flwr_distill.client.session import Session
from flwr_distill.distill.perturbed_matching import distill_around
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.links.records import VIRTUAL_DATA
from flwr_distill.protocol.registry import built_in_methods, phases_of
from flwr_distill.server.app import main
from flwr_distill.strategies.feddm.method import DISTILL_AROUND
from flwr_distill.strategies.feddm.strategy import FedDM, stay_within
from tests.grids import screening_grid

from .rounds import FIRST, MODEL, SPEC, play

RUN_CONFIG = {"partition.classes": 5}  # each node misses half of the classes
LITTLE = {"per_class": 2, "distill_steps": 3, "server_epochs": 2, "server_batch_size": 16}


def strategy_of(**settings):
    return FedDM(model=MODEL, spec=SPEC, fraction_evaluate=0.0, **{**LITTLE, **settings})


def test_a_round_is_training_on_the_data_of_all_nodes_by_hand(client_grid, tmp_path):
    found = play(strategy_of(), client_grid(2, RUN_CONFIG))
    images, labels = [], []
    for node in range(2):
        config = {"partition-id": node, "num-partitions": 2, "state-dir": str(tmp_path / "own")}
        session = Session.of(Context(9, node, config, RecordDict(), RUN_CONFIG))
        made = distill_around(
            session.data.train.inputs,
            session.data.train.labels,
            MODEL,
            num_classes=10,
            per_class=2,
            steps=3,
            generator=session.generator("feddm", 1),
        )
        sent = VirtualData.from_bytes(made.to_bytes())
        images.append(sent.images)
        labels.append(sent.labels)
    images, labels = torch.cat(images), torch.cat(labels)
    assert len(labels) == 20
    model = copy.deepcopy(MODEL).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    words = np.random.SeedSequence([0, 1]).generate_state(1, np.uint64)
    draws = torch.Generator().manual_seed(int(words[0]) >> 1)
    for _ in range(2):
        order = torch.randperm(20, generator=draws)
        for rows in (order[:16], order[16:]):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    for name, weight in model.state_dict().items():
        np.testing.assert_allclose(found[name].numpy(), weight.numpy(), atol=1e-5, err_msg=name)


def test_the_model_goes_no_farther_than_the_radius(client_grid):
    found = play(strategy_of(radius=0.01, server_epochs=5), client_grid(2, RUN_CONFIG))
    moved = [found[n].numpy() - w.numpy() for n, w in MODEL.state_dict().items()]
    length = sum(float((m.astype(np.float64) ** 2).sum()) for m in moved) ** 0.5
    assert length == pytest.approx(0.01, rel=1e-3)


def test_minibatches_of_one_are_trained_on(client_grid):
    found = play(strategy_of(server_batch_size=1, server_epochs=1), client_grid(2, RUN_CONFIG))
    assert any(
        (array.numpy() != MODEL.state_dict()[name].numpy()).any() for name, array in found.items()
    )


def test_within_the_ball_weights_stay_as_they_are():
    weights = [torch.nn.Parameter(torch.tensor([3.0, 4.0])), torch.nn.Parameter(torch.zeros(2))]
    start = [torch.zeros(2), torch.zeros(2)]
    stay_within(weights, start, 6.0)
    assert weights[0].tolist() == [3.0, 4.0]
    stay_within(weights, start, 1.0)
    assert weights[0].tolist() == pytest.approx([0.6, 0.8])


def data(n=4, labels=None, shape=SPEC.shape):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(n, *shape, generator=generator)
    labels = torch.arange(n) // 2 if labels is None else torch.tensor(labels)
    return VirtualData(images, labels, method="feddm", steps=1, seed=0, init="noise")


def reply_of(payload):
    record = ConfigRecord({"payload": payload})
    numbers = MetricRecord({"num-examples": 9})
    return RecordDict({"metrics": numbers, VIRTUAL_DATA: record})


BAD = {
    "no bytes of ours": b"\x00" * 20,
    "empty": b"",
    "too many": data(22, labels=[i % 10 for i in range(22)]).to_bytes(),
    "too many of a class": data(4, labels=[3, 3, 3, 1]).to_bytes(),
    "another class": data(2, labels=[0, 10]).to_bytes(),
    "another shape": data(2, shape=(1, 9, 9)).to_bytes(),
    "another formation": replace(data(2), formation=2).to_bytes(),
    "huge pixels": replace(data(2), images=1e6 * data(2).images).to_bytes(),
    "torn": data().to_bytes()[:-7],
}


@pytest.mark.parametrize("how", BAD)
def test_bad_data_are_set_aside_and_the_round_goes_on(memory_grid, how, flower_log):
    good = data().to_bytes()
    with_bad = memory_grid({1: lambda _: reply_of(good), 2: lambda _: reply_of(BAD[how])})
    alone = memory_grid({1: lambda _: reply_of(good), 3: lambda _: 1 / 0})
    found, expected = play(strategy_of(), with_bad), play(strategy_of(), alone)
    for name, array in expected.items():
        assert np.array_equal(found[name].numpy(), array.numpy())
    assert "Reply of node 2 to train.feddm_distill rejected" in flower_log.text


def test_a_round_without_usable_data_changes_nothing(memory_grid):
    grid = memory_grid({1: lambda _: reply_of(b""), 2: lambda _: reply_of(b"x")})
    assert play(strategy_of(), grid) is None


@pytest.mark.parametrize(
    "content",
    [
        RecordDict({"metrics": MetricRecord({"num-examples": 9})}),
        RecordDict({VIRTUAL_DATA: ConfigRecord({"payload": b"x"})}),
        RecordDict({"metrics": MetricRecord({"num-examples": -1}), VIRTUAL_DATA: ConfigRecord()}),
        RecordDict(
            {
                "metrics": MetricRecord({"num-examples": 9}),
                VIRTUAL_DATA: ConfigRecord({"payload": "text"}),
            }
        ),
    ],
)
def test_replies_are_checked_before_the_strategy_sees_them(memory_grid, content):
    phases = phases_of(built_in_methods()["feddm"])
    grid = memory_grid({FIRST: lambda _: content})
    screening = screening_grid(grid, deadline=5, phases=phases, model={})
    (reply,) = screening.send_and_receive([Message(RecordDict(), FIRST, DISTILL_AROUND)])
    assert reply.has_error()


def test_a_run_learns_and_reports_the_nodes_privacy_cards(client_grid, tmp_path):
    config = {
        "strategy": "feddm",
        "num-rounds": 2,
        "min-nodes": 2,
        "runs-dir": str(tmp_path / "runs"),
        "feddm.per-class": 5,
        "feddm.distill-steps": 20,
        "feddm.server-lr": 0.1,
        **RUN_CONFIG,
    }
    main(client_grid(2, config), Context(7, 1, {}, RecordDict(), config))
    folder = tmp_path / "runs" / "7"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.2
    report = (folder / "report.html").read_text()
    assert "highest cosine" in report
    assert "not sealed" in report
