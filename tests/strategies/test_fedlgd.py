"""FedLGD with our real ClientApp; only the wire is replaced, by a grid in memory."""

import copy
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from torch.nn import functional

import flwr_distill.strategies.fedlgd.strategy
from flwr_distill.client.session import Session
from flwr_distill.client.training import epoch_batches
from flwr_distill.distill.contrastive import supervised_contrastive_loss
from flwr_distill.distill.distribution_matching import distill_dm
from flwr_distill.distill.gradient_matching import match_gradient
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.node.account import LifetimeAccount
from flwr_distill.node.policy import HOSPITAL
from flwr_distill.node.replies import NodeIdentity, claimed_epsilon, judge_reply
from flwr_distill.node.requests import MessageRequest
from flwr_distill.node.rules import judge_message, judge_spending
from flwr_distill.storage.store import NodeStore
from flwr_distill.strategies.agreement.strategy import Agreement
from flwr_distill.strategies.fedlgd.method import (
    GLOBAL_DATA,
    GRADIENT,
    VIRTUAL,
    FedLGDSettings,
)
from flwr_distill.strategies.fedlgd.strategy import FedLGD
from flwr_distill.task.backbones import seen_spec
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import TrainSettings
from tests.errors import at

from .rounds import FIRST, MODEL, SPEC, assert_equal, numbers, play, spoil

RUN_CONFIG = {"partition.classes": 5, "train.local-epochs": 1, "train.batch-size": 16}
LR, LAMBDA = 0.05, 0.5


def strategy_of(**settings):
    quick = {"per_class": 3, "first_steps": 4, "refine_steps": 3, "global_per_class": 2}
    return FedLGD(
        model=MODEL,
        spec=SPEC,
        **{**quick, "global_steps": 3, "every": 2, "contrast": LAMBDA, **settings},
    )


def as_sent(virtual):
    return VirtualData.from_bytes(virtual.to_bytes())


class ByHand:
    """The same rounds as plain loops over nodes."""

    def __init__(self, num_nodes, tmp_path, formation=1, form=None):
        self.formation = formation
        form = form or {}
        self.matching = {"init": form.get("starts_from", "class-stats")}
        self.matching |= {"means_of": form.get("means_of", "groups")}
        self.mover = {"optimizer": form.get("image_optimizer", "adam")}
        self.matching |= self.mover
        self.reduction = "sum" if form.get("regulariser") == "contrastive-sum" else "mean"
        self.sessions = []
        for i in range(num_nodes):
            node = {"partition-id": i, "num-partitions": num_nodes, "state-dir": str(tmp_path)}
            self.sessions.append(Session.of(Context(9, i, node, RecordDict(), RUN_CONFIG)))
        self.virtual = [None] * num_nodes
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(20, *SPEC.shape, generator=generator)
        labels = torch.arange(10).repeat_interleave(2)
        self.of_server = self.virtual_data(images, labels, steps=0)

    def virtual_data(self, images, labels, steps):
        made = VirtualData(images, labels, method="gm", steps=steps, seed=0, init="noise")
        return replace(made, formation=self.formation)

    def model(self, weights):
        model = copy.deepcopy(MODEL)
        model.load_state_dict(weights)
        return model

    def refined(self, node, weights, server_round):
        session, data = self.sessions[node], self.sessions[node].data.train
        given = {"num_classes": 10, "per_class": 3, "formation": self.formation}
        given |= self.matching
        if self.virtual[node] is None:
            made = distill_dm(
                data.inputs,
                data.labels,
                steps=4,
                generator=session.generator("virtual"),
                **given,
            )
            self.virtual[node] = as_sent(made)
        made = distill_dm(
            data.inputs,
            data.labels,
            steps=3,
            generator=session.generator("refine", server_round),
            network=self.model(weights)[:-1].eval(),
            bank=5,
            initial_images=self.virtual[node].images,
            **given,
        )
        self.virtual[node] = as_sent(made)

    def trained(self, node, weights, server_round, images, labels, contrast):
        model = self.model(weights).train()
        draws = self.sessions[node].generator("train", server_round)
        for batch in epoch_batches(labels, 16, draws):
            features = model[:-1](images[batch])
            loss = functional.cross_entropy(model[-1](features), labels[batch])
            between = supervised_contrastive_loss(features, labels[batch], reduction=self.reduction)
            loss = loss + contrast * between
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for weight, gradient in zip(model.parameters(), gradients, strict=True):
                    weight -= LR * gradient
        return model.state_dict()

    def mean(self, states):
        return {name: sum(s[name] for s in states) / len(states) for name in states[0]}

    def selected_round(self, weights, server_round, match):
        states, gradients = [], []
        for node in range(len(self.sessions)):
            self.refined(node, weights, server_round)
            own = self.virtual[node].decoded()
            images, labels = own.images, own.labels
            model = self.model(weights)
            loss = functional.cross_entropy(model(images), labels)
            by_weights = torch.autograd.grad(loss, list(model.parameters()))
            names = [name for name, _ in model.named_parameters()]
            gradients.append(dict(zip(names, by_weights, strict=True)))
            states.append(self.trained(node, weights, server_round, images, labels, 0.0))
        mean = self.mean(states)
        change = {name: weights[name] - mean[name] for name in mean}
        target = self.mean(gradients) if match == "gradient" else change
        images = match_gradient(
            self.of_server.images,
            self.of_server.labels,
            target,
            self.model(weights),
            steps=3,
            formation=self.formation,
            **self.mover,
        )
        self.of_server = as_sent(self.virtual_data(images, self.of_server.labels, steps=3))
        return mean

    def joint_round(self, weights, server_round):
        states = []
        for node in range(len(self.sessions)):
            both = [self.virtual[node].decoded(), self.of_server.decoded()]
            images = torch.cat([virtual.images for virtual in both])
            labels = torch.cat([virtual.labels for virtual in both])
            states.append(self.trained(node, weights, server_round, images, labels, LAMBDA))
        return self.mean(states)


PRINTED = {"means_of": "classes", "image_optimizer": "sgd", "regulariser": "contrastive-sum"}
"""The paper's form of eq. 1 and 4."""


@pytest.mark.parametrize(
    ("match", "formation", "form"),
    [
        ("gradient", 1, {}),
        ("update", 1, {}),
        ("gradient", 2, {}),
        ("gradient", 1, PRINTED),
        ("gradient", 1, {**PRINTED, "starts_from": "real"}),
    ],
)
def test_rounds_equal_the_papers_steps_as_plain_loops(
    client_grid, tmp_path, match, formation, form
):
    """Selected, joint, selected again: two nodes of five classes each."""
    grid, by_hand = client_grid(2, RUN_CONFIG), ByHand(2, tmp_path / "by-hand", formation, form)
    strategy, arrays = strategy_of(match=match, formation=formation, **form), None
    weights = MODEL.state_dict()
    for server_round, selected in [(1, True), (2, False), (3, True)]:
        arrays = play(strategy, grid, server_round, arrays)
        if selected:
            weights = by_hand.selected_round(weights, server_round, match)
        else:
            weights = by_hand.joint_round(weights, server_round)
        assert_equal(arrays, weights, atol=1e-4)
        found, expected = strategy.global_data, by_hand.of_server
        assert torch.equal(found.labels, expected.labels)
        assert found.formation == formation
        # Rows of a gradient that are nearly 0 have a direction that rounding decides.
        apart = (found.images - expected.images).abs()
        assert apart.quantile(0.99) < 0.02
        assert apart.max() < 0.1


def payloads(grid):
    """Of each joint round's messages so far, whether they carried the server's virtual data."""
    told = [m.content.config_records.get(GLOBAL_DATA) for m in grid.pushed]
    return [bool(record["payload"]) for record in told if record is not None]


def test_the_servers_virtual_data_are_sent_once_after_each_change(client_grid):
    grid, strategy = client_grid(2, RUN_CONFIG), strategy_of(every=3, selections=2)
    arrays = None
    for server_round in range(1, 7):
        arrays = play(strategy, grid, server_round, arrays)
    assert payloads(grid) == [True, True, False, False] * 2
    digests = [m.content[GLOBAL_DATA]["digest"] for m in grid.pushed if GLOBAL_DATA in m.content]
    assert len(set(digests)) == 2


def test_a_node_that_lost_the_servers_virtual_data_gets_them_again_in_the_same_round(
    client_grid, tmp_path
):
    def run(forget):
        grid, strategy = client_grid(2, RUN_CONFIG), strategy_of(every=10)
        arrays = None
        for server_round in (1, 2, 3):
            if server_round == 3 and forget:
                for file in tmp_path.glob(f"state/runs/*/{FIRST}/global-virtual-data"):
                    file.unlink()
            arrays = play(strategy, grid, server_round, arrays)
        return numbers(arrays), payloads(grid)

    expected, sent = run(forget=False)
    found, sent_again = run(forget=True)
    assert sent == [True, True, False, False]
    assert sent_again == [True, True, False, False, True]
    assert_equal(found, expected)


def test_a_restarted_node_goes_on_with_its_virtual_data(client_grid, tmp_path):
    grid, strategy = client_grid(2, RUN_CONFIG), strategy_of()
    play(strategy, grid)
    (folder,) = tmp_path.glob(f"state/runs/*/{FIRST}")
    store = NodeStore(folder)
    before = store.read("virtual-data")
    play(strategy, grid, server_round=2)
    assert store.read("virtual-data") == before
    play(strategy, grid, server_round=3)
    assert store.read("virtual-data") != before


def test_a_node_that_joins_late_makes_its_virtual_data_first(client_grid, tmp_path):
    grid, strategy = client_grid(3, RUN_CONFIG), strategy_of()
    late = grid.nodes.pop(FIRST + 2)
    arrays = play(strategy, grid)
    grid.nodes[FIRST + 2] = late
    play(strategy, grid, 2, arrays)
    assert len(list(tmp_path.glob(f"state/runs/*/{FIRST + 2}/virtual-data@000002"))) == 1
    assert payloads(grid) == [True] * 3


def test_one_node_is_enough(client_grid):
    grid = client_grid(1, RUN_CONFIG)
    strategy = strategy_of(min_train_nodes=1, min_available_nodes=1)
    arrays = play(strategy, grid)
    assert play(strategy, grid, 2, arrays) is not None
    assert strategy.global_data.steps == 3


def with_nan(name):
    def change(content):
        arrays = numbers(content.array_records[name])
        first = next(iter(arrays))
        arrays[first] = np.full_like(arrays[first], np.nan)
        content[name] = ArrayRecord({n: torch.tensor(a) for n, a in arrays.items()})

    return change


def without(name):
    return lambda content: content.pop(name)


@pytest.mark.parametrize(
    "change",
    [with_nan("arrays"), with_nan(GRADIENT), without("arrays"), without(GRADIENT)],
    ids=["nan model", "nan gradient", "no model", "no gradient"],
)
def test_a_bad_reply_is_set_aside_and_the_round_goes_on(client_grid, change):
    bad, good = client_grid(2, RUN_CONFIG), client_grid(2, RUN_CONFIG)
    spoil(bad, FIRST, change)
    good.nodes[FIRST] = lambda message: None
    strategy, expected = strategy_of(), strategy_of()
    assert_equal(play(strategy, bad), play(expected, good))
    assert torch.equal(strategy.global_data.images, expected.global_data.images)


def test_a_gradient_that_is_out_of_line_does_not_move_the_servers_data(
    client_grid, caplog, monkeypatch
):
    def longer_and_reversed(content):
        arrays = numbers(content.array_records[GRADIENT])
        content[GRADIENT] = ArrayRecord({n: torch.tensor(-100 * a) for n, a in arrays.items()})

    targets = []

    def noted(images, labels, target, *given, **options):
        targets.append(torch.cat([array.flatten() for array in target.values()]))
        return images

    monkeypatch.setattr(flwr_distill.strategies.fedlgd.strategy, "match_gradient", noted)
    grid = client_grid(6, {**RUN_CONFIG, "partition.scheme": "iid"})
    play(strategy_of(), grid)
    spoil(grid, FIRST, longer_and_reversed)
    play(strategy_of(aggregator=Agreement()), grid)
    honest, found = targets
    assert functional.cosine_similarity(honest, found, dim=0) > 0.5  # with it, it is below 0
    lines = [message for message in caplog.messages if " rejected: " in message]
    assert lines == [
        f"Reply of node {FIRST} to train.virtual rejected: its gradient is out of line with most"
    ]


def test_a_round_without_usable_replies_leaves_everything_as_it_was(client_grid):
    grid, strategy = client_grid(2, RUN_CONFIG), strategy_of()
    for node in grid.nodes:
        spoil(grid, node, with_nan("arrays"))
    assert play(strategy, grid) is None
    assert strategy.global_data is None


def test_rounds_are_selected_at_every_fifth_from_the_first_ten_times(memory_grid):
    asked = []
    grid = memory_grid({1: lambda m: asked.append(m.content[VIRTUAL]), 2: lambda m: None})
    strategy = FedLGD(model=MODEL, spec=SPEC, refine_steps=100, contrast=10.0)
    for server_round in range(1, 61):
        play(strategy, grid, server_round)
    selected = [t for t, request in enumerate(asked) if request["refine-steps"] == 100]
    assert selected == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert all(asked[t]["gradient"] and asked[t]["contrast"] == 0 for t in selected)


def test_without_selected_rounds_nodes_train_on_their_virtual_data_alone(client_grid):
    grid, strategy = client_grid(2, RUN_CONFIG), strategy_of(selections=0)
    play(strategy, grid)
    (request, _) = (message.content[VIRTUAL] for message in grid.pushed)
    assert (request["refine-steps"], request["contrast"]) == (0, 0)
    assert payloads(grid) == []


def test_the_next_round_after_a_restart_is_the_one_that_would_have_been(client_grid):
    grid, first = client_grid(2, RUN_CONFIG), strategy_of()
    arrays = play(first, grid)
    again = strategy_of()
    again.load_state_dict(first.state_dict())
    assert_equal(play(first, grid, 2, arrays), play(again, grid, 2, arrays))
    play(first, client_grid(2, RUN_CONFIG), 3, arrays)
    play(again, client_grid(2, RUN_CONFIG), 3, arrays)
    assert torch.equal(first.global_data.images, again.global_data.images)


def test_a_frozen_network_is_matched_by_the_gradient_of_its_head(client_grid):
    model = create_model("random-features", SPEC, seed=0)
    grid = client_grid(2, {**RUN_CONFIG, "model": "random-features"})
    spec = seen_spec(model, SPEC, TrainSettings())
    strategy = FedLGD(
        model=model, spec=spec, per_class=2, first_steps=2, global_per_class=1, global_steps=1
    )
    before = numbers(ArrayRecord(model.state_dict()))
    after = numbers(play(strategy, grid, arrays=ArrayRecord(model.state_dict())))
    assert strategy.global_data.steps == 1  # the nodes' gradients were used
    assert np.abs(after["head.weight"] - before["head.weight"]).max() > 0
    assert after.keys() == {"head.weight", "head.bias"}


def test_a_private_run_passes_a_hospitals_guard_from_message_to_reply(client_grid, tmp_path):
    """Real messages and real replies, in a selected round and in one with the server's data."""
    private = {"strategy": "fedlgd", "fedlgd.dp-epsilon": 2.0, "fedlgd.refine-steps": 0}
    run_config = {**RUN_CONFIG, **private, "train.dp-delta": 1e-5}
    grid = client_grid(2, run_config)
    account = LifetimeAccount(tmp_path / "account.json")
    passed = []

    def guarded(node, answer):
        def judged(message):
            asked = MessageRequest.read(
                message.content,
                message_type=message.metadata.message_type,
                bundle="",
                run_config=run_config,
            )
            assert judge_message(HOSPITAL, asked, datetime(2026, 1, 5)) is None
            reply = answer(message)
            assert judge_reply(HOSPITAL, asked, reply, {}, NodeIdentity({}, [], b"", "")) is None
            claim = claimed_epsilon(reply)
            account.book(str(node), "run", claim)
            spent = account.left(str(node))
            assert judge_spending(HOSPITAL, epsilon=spent, num_bytes=0, counted=True) is None
            passed.append((asked.records["virtual"]["gradient"] != [], claim))
            return reply

        return judged

    grid.nodes = {node: guarded(node, answer) for node, answer in grid.nodes.items()}
    strategy = strategy_of(dp_epsilon=2.0, refine_steps=0, every=2)
    arrays = play(strategy, grid)
    play(strategy, grid, 2, arrays)
    assert [selected for selected, _ in passed] == [True, True, False, False]
    assert all(1.9 < claim <= 2 for _, claim in passed)
    assert all(1.9 < account.left(str(node)) <= 2 for node in grid.nodes)


def test_virtual_images_are_not_distilled_of_virtual_ones(a_run):
    run = replace(a_run(), train=TrainSettings(on="virtual"))
    with pytest.raises(SettingsError, check=at("train.on", value="virtual")):
        FedLGD.from_run(FedLGDSettings(), run)
