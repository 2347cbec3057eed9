"""FedNova, FedDyn, SCAFFOLD, MOON and FedFA with our real ClientApp, against naive loops."""

import copy
import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn
from torch.nn import functional

from flwr_distill.client.session import Session
from flwr_distill.client.training import epoch_batches
from flwr_distill.protocol.arrays import as_record
from flwr_distill.strategies.common.checked import CheckedFedAvg
from flwr_distill.strategies.feddyn.strategy import FedDyn
from flwr_distill.strategies.fedfa.strategy import FedFA
from flwr_distill.strategies.fednova.strategy import FedNova
from flwr_distill.strategies.moon.strategy import MOON
from flwr_distill.strategies.scaffold.method import CONTROL_VARIATE
from flwr_distill.strategies.scaffold.strategy import SCAFFOLD
from flwr_distill.task.models import create_model

from .rounds import FIRST, MODEL, SPEC

NODES = 3
LR = 0.02
RUN_CONFIG = {
    "partition.scheme": "pareto",  # nodes of unequal size
    "partition.classes": 4,
    "partition.alpha": 3.0,
    "train.batch-size": 64,
}
BASELINES = {
    FedNova: {"model": MODEL},
    FedDyn: {"model": MODEL, "alpha": 0.05},
    SCAFFOLD: {},
    MOON: {"mu": 2.0, "temperature": 0.7},
    FedFA: {"model": MODEL, "beta": 0.3, "gamma": 0.8, "server_lr": 0.2},
}


def strategy_of(kind, **settings):
    return kind(fraction_evaluate=0.0, **{**BASELINES[kind], **settings})


def ask(strategy, grid, server_round, arrays):
    """Send a round's messages, as Flower's loop does it."""
    config = ConfigRecord({"lr": LR, "local-epochs": 1})
    messages = strategy.configure_train(server_round, arrays, config, grid)
    replies = grid.send_and_receive(messages)
    return sorted(replies, key=lambda reply: reply.metadata.src_node_id)


def play(strategy, grid, rounds):
    arrays = ArrayRecord(MODEL.state_dict())
    for server_round in range(1, rounds + 1):
        arrays = strategy.aggregate_train(server_round, ask(strategy, grid, server_round, arrays))[
            0
        ]
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}


class Node:
    """Local training by hand: plain SGD on lists of tensors."""

    def __init__(self, index, tmp_path):
        config = {
            "partition-id": index,
            "num-partitions": NODES,
            "state-dir": str(tmp_path / "by-hand"),
        }
        self.session = Session.of(Context(1, index, config, RecordDict(), RUN_CONFIG))
        self.samples = self.session.data.train
        self.size = len(self.samples)
        self.state = {}

    def train(self, w, server_round, correction=None, loss_term=None, momentum=0.0):
        """Local SGD from ``w``; gives the weights, the number of steps and the accuracy."""
        draws = self.session.generator("train", server_round)
        size = self.session.task.train.batch_size
        batches = list(epoch_batches(self.samples.labels, size, draws))
        model, right = copy.deepcopy(MODEL), []
        model.load_state_dict(w)
        model.train()
        velocity = dict.fromkeys(w, 0.0)
        for batch in batches:
            inputs, labels = self.samples.inputs[batch], self.samples.labels[batch]
            logits = model(inputs)
            right.append((logits.argmax(1) == labels).float().mean().item())
            loss = functional.cross_entropy(logits, labels)
            if loss_term:
                loss = loss + loss_term(model, inputs)
            named = dict(model.named_parameters())
            gradients = torch.autograd.grad(loss, list(named.values()))
            with torch.no_grad():
                for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
                    step = gradient + (correction(name, parameter) if correction else 0.0)
                    velocity[name] = momentum * velocity[name] + step
                    parameter -= LR * velocity[name]
        trained = {name: p.detach().double() for name, p in model.named_parameters()}
        return trained, len(batches), sum(right) / len(right)


def double(w):
    return {name: value.double() for name, value in w.items()}


def single(w):
    return {name: value.float() for name, value in w.items()}


def fednova_by_hand(nodes, w, server_round, state):
    results = [node.train(single(w), server_round) for node in nodes]
    n = sum(node.size for node in nodes)
    tau_eff = sum(node.size / n * tau for node, (_, tau, _) in zip(nodes, results, strict=True))
    new = {}
    for name in w:
        normalised = 0.0
        for node, (trained, tau, _) in zip(nodes, results, strict=True):
            normalised += node.size / n * (w[name] - trained[name]) / tau
        new[name] = w[name] - tau_eff * normalised
    return new


def feddyn_by_hand(nodes, w, server_round, state):
    alpha, trained_models = 0.05, []
    for node in nodes:
        g = node.state or {name: torch.zeros_like(value) for name, value in w.items()}
        trained, _, _ = node.train(
            single(w),
            server_round,
            lambda name, p, g=g: (-g[name] + alpha * (p - w[name])).float(),
        )
        node.state = {name: g[name] - alpha * (trained[name] - w[name]) for name in w}
        trained_models.append(trained)
    h, new = state.setdefault("h", {}), {}
    for name in w:
        drift = sum(trained[name] - w[name] for trained in trained_models)
        h[name] = h.get(name, 0.0) - alpha / NODES * drift
        new[name] = sum(t[name] for t in trained_models) / len(trained_models) - h[name] / alpha
    return new


def scaffold_by_hand(nodes, w, server_round, state):
    zero = {name: torch.zeros_like(value) for name, value in w.items()}
    c, changes, trained_models = state.get("c", zero), [], []
    for node in nodes:
        own = node.state or zero
        trained, steps, _ = node.train(
            single(w), server_round, lambda name, p, own=own: (c[name] - own[name]).float()
        )
        node.state = {n: own[n] - c[n] + (w[n] - trained[n]) / (steps * LR) for n in w}
        changes.append({name: node.state[name] - own[name] for name in w})
        trained_models.append(trained)
    state["c"] = {name: c[name] + sum(d[name] for d in changes) / NODES for name in w}
    return {name: sum(t[name] for t in trained_models) / len(nodes) for name in w}


def moon_by_hand(nodes, w, server_round, state):
    """Eq. 3, sample by sample; features are the input of the model's last dense layer."""

    def features(model, inputs):
        *body, last = model.net if hasattr(model, "net") else model.children()
        assert isinstance(last, nn.Linear)
        return nn.Sequential(*body)(inputs)

    def frozen(weights):
        model = copy.deepcopy(MODEL)
        model.load_state_dict(single(weights))
        return model.eval()

    new, n = {}, sum(node.size for node in nodes)
    for node in nodes:
        at_start, previous = frozen(w), frozen(node.state or w)

        def contrast(model, inputs, at_start=at_start, previous=previous):
            total = 0.0
            sent_through = [features(m, inputs) for m in (model, at_start, previous)]
            for z, z_g, z_p in zip(*sent_through, strict=True):
                s_g = (z @ z_g.detach() / (z.norm() * z_g.norm().detach())) / 0.7
                s_p = (z @ z_p.detach() / (z.norm() * z_p.norm().detach())) / 0.7
                total = total - torch.log(s_g.exp() / (s_g.exp() + s_p.exp()))
            return 2.0 * total / len(inputs)

        trained, _, _ = node.train(single(w), server_round, loss_term=contrast)
        node.state = trained
        for name in w:
            new[name] = new.get(name, 0.0) + node.size / n * trained[name]
    return new


def fedfa_by_hand(nodes, w, server_round, state):
    results = [node.train(single(w), server_round, momentum=0.8) for node in nodes]
    accuracy = [a for _, _, a in results]
    by_accuracy = [-math.log2(a / sum(accuracy)) for a in accuracy]
    by_rounds = [-math.log2(1 - server_round / (NODES * server_round))] * NODES
    weights = [
        0.7 * a / sum(by_accuracy) + 0.3 * f / sum(by_rounds)
        for a, f in zip(by_accuracy, by_rounds, strict=True)
    ]
    m, new = state.setdefault("m", {}), {}
    for name in w:
        mean = sum(p * t[name] for p, (t, _, _) in zip(weights, results, strict=True))
        m[name] = 0.8 * m.get(name, 0.0) + 0.2 * (w[name] - mean)
        new[name] = mean - 0.2 * m[name]
    return new


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [
        (FedNova, fednova_by_hand),
        (FedDyn, feddyn_by_hand),
        (SCAFFOLD, scaffold_by_hand),
        (MOON, moon_by_hand),
        (FedFA, fedfa_by_hand),
    ],
)
def test_two_rounds_equal_the_papers_steps_by_hand(client_grid, tmp_path, kind, by_hand):
    found = play(strategy_of(kind), client_grid(NODES, RUN_CONFIG), rounds=2)
    nodes, w, state = [Node(i, tmp_path) for i in range(NODES)], double(MODEL.state_dict()), {}
    assert len({node.size for node in nodes}) == NODES
    for server_round in (1, 2):
        w = by_hand(nodes, w, server_round, state)
    for name, value in found.items():
        torch.testing.assert_close(value.double(), w[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [(FedNova, fednova_by_hand), (FedDyn, feddyn_by_hand), (SCAFFOLD, scaffold_by_hand)],
)
def test_rounds_of_some_nodes_equal_the_papers_steps_by_hand(client_grid, tmp_path, kind, by_hand):
    """Two nodes drawn of three train in each round: |S| and |P| are not N."""
    grid, strategy = client_grid(NODES, RUN_CONFIG), strategy_of(kind, fraction_train=0.67)
    nodes = {FIRST + i: Node(i, tmp_path) for i in range(NODES)}
    arrays, w, state = ArrayRecord(MODEL.state_dict()), double(MODEL.state_dict()), {}
    for server_round in (1, 2, 3):
        replies = ask(strategy, grid, server_round, arrays)
        arrays, _ = strategy.aggregate_train(server_round, replies)
        drawn = [nodes[reply.metadata.src_node_id] for reply in replies]
        assert len(drawn) == 2
        w = by_hand(drawn, w, server_round, state)
    for name, array in arrays.items():
        found = torch.from_numpy(array.numpy().copy()).double()
        torch.testing.assert_close(found, w[name], atol=1e-6, rtol=0)


def spoil(reply, how):
    """A reply as a broken or hostile node would send it."""
    content = copy.deepcopy(reply.content)
    arrays = {name: array.numpy().copy() for name, array in content["arrays"].items()}
    first = next(iter(arrays))
    if how == "nan":
        arrays[first][...] = np.nan
    elif how == "shape":
        arrays[first] = arrays[first][..., None]
    elif how == "names":
        arrays["odd"] = arrays.pop(first)
    content["arrays"] = as_record(arrays)
    if how == "no model":
        del content["arrays"]
    if how == "no metrics":
        del content["metrics"]
    if how.startswith("metric"):
        _, key, value = how.split()
        content["metrics"][key] = float(value)
    if how.startswith("control"):
        change = {name: array.numpy() for name, array in content[CONTROL_VARIATE].items()}
        name = next(iter(change))
        if how == "control nan":
            change[name] = np.full_like(change[name], np.nan)
        if how == "control shape":
            change[name] = change[name][..., None]
        if how == "control name":
            change["odd"] = change.pop(name)
        content[CONTROL_VARIATE] = as_record({} if how == "control none" else change)
    return content


SPOILT = ["nan", "shape", "names", "no model", "no metrics", "metric num-examples 0"]
OWN = {
    FedNova: ["metric num-steps 0", "metric num-steps nan"],
    SCAFFOLD: ["control nan", "control shape", "control name", "control none"],
    FedFA: ["metric train-accuracy nan", "metric train-accuracy 2"],
}


@pytest.mark.parametrize(
    ("kind", "how"), [(kind, how) for kind in BASELINES for how in SPOILT + OWN.get(kind, [])]
)
def test_a_malformed_reply_is_set_aside_with_a_line_in_the_log(memory_grid, kind, how, flower_log):
    grid = memory_grid({node: fake_node(node) for node in range(1, 4)})
    strategy = strategy_of(kind)
    *good, bad = ask(strategy, grid, 1, ArrayRecord(MODEL.state_dict()))
    twin = copy.deepcopy(strategy)
    spoilt = Message(spoil(bad, how), reply_to=grid.pushed[-1])
    found, metrics = strategy.aggregate_train(1, [*good, spoilt])
    expected, expected_metrics = twin.aggregate_train(1, good)
    for name, array in expected.items():
        assert np.array_equal(found[name].numpy(), array.numpy())
    assert metrics == expected_metrics
    assert any("rejected" in record.message for record in flower_log.records)
    assert_same_state(strategy.state_dict(), twin.state_dict())


def test_a_control_variate_of_what_is_not_trained_ends_no_other_nodes_training(client_grid):
    """One node's change may name statistics of batch normalisation: all get it in the server's."""
    grid = client_grid(NODES, {**RUN_CONFIG, "model": "resnet8"})
    strategy, arrays = (
        strategy_of(SCAFFOLD),
        ArrayRecord(create_model("resnet8", SPEC).state_dict()),
    )
    *good, bad = ask(strategy, grid, 1, arrays)
    statistics = next(name for name in arrays if name.endswith("running_mean"))
    bad.content[CONTROL_VARIATE][statistics] = Array(np.ones_like(arrays[statistics].numpy()))
    arrays, _ = strategy.aggregate_train(1, [*good, bad])
    assert not any(reply.has_error() for reply in ask(strategy, grid, 2, arrays))


def fake_node(seed):
    """A node that sends a random model with all that any baseline wants."""

    def answer(message):
        rng = np.random.default_rng(seed)
        sent = {
            name: array.numpy() + rng.normal(size=array.shape).astype(np.float32)
            for name, array in message.content["arrays"].items()
        }
        metrics = {
            "num-examples": 10 * seed,
            "num-steps": seed,
            "train-loss": 1.0 * seed,
            "train-accuracy": 0.2 * seed,
        }
        return RecordDict(
            {
                "arrays": as_record(sent),
                "metrics": MetricRecord(metrics),
                CONTROL_VARIATE: as_record(sent),
            }
        )

    return answer


@pytest.mark.parametrize("kind", BASELINES)
def test_the_training_loss_of_a_round_is_the_nodes_mean_by_samples(memory_grid, kind):
    grid = memory_grid({node: fake_node(node) for node in range(1, 4)})
    strategy = strategy_of(kind)
    replies = ask(strategy, grid, 1, ArrayRecord(MODEL.state_dict()))
    _, metrics = strategy.aggregate_train(1, replies)
    mean = (10 * 1.0 + 20 * 2.0 + 30 * 3.0) / (10 + 20 + 30)
    assert metrics == {"train-loss": pytest.approx(mean)}


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            assert value.keys() == other[key].keys()
            assert all(np.array_equal(value[name], other[key][name]) for name in value)
        else:
            assert value == other[key]


@pytest.mark.parametrize("kind", BASELINES)
def test_a_round_without_a_usable_reply_changes_nothing(memory_grid, kind):
    def broken(message):
        raise RuntimeError("this node is broken")

    grid = memory_grid({1: broken, 2: broken})
    strategy = strategy_of(kind)
    before = strategy.state_dict()
    replies = ask(strategy, grid, 1, ArrayRecord(MODEL.state_dict()))
    assert strategy.aggregate_train(1, replies) == (None, None)
    assert_same_state(strategy.state_dict(), before)


@pytest.mark.parametrize("kind", BASELINES)
def test_a_strategy_goes_on_from_its_state_as_if_it_had_not_stopped(memory_grid, kind):
    grid = memory_grid({node: fake_node(node) for node in range(1, 4)})
    strategy, arrays = strategy_of(kind), ArrayRecord(MODEL.state_dict())
    arrays, _ = strategy.aggregate_train(1, ask(strategy, grid, 1, arrays))
    again = strategy_of(kind)
    again.load_state_dict(strategy.state_dict())
    fresh = strategy_of(kind)
    results = [s.aggregate_train(2, ask(s, grid, 2, arrays))[0] for s in (strategy, again, fresh)]
    name = next(iter(arrays))
    stopped, resumed, forgetful = (result[name].numpy() for result in results)
    assert np.array_equal(stopped, resumed)
    assert_same_state(strategy.state_dict(), again.state_dict())
    if kind in (FedDyn, FedFA):  # SCAFFOLD's c enters by way of the nodes
        assert not np.array_equal(stopped, forgetful)


def test_the_state_of_another_strategy_is_refused():
    state = strategy_of(SCAFFOLD).state_dict()
    with pytest.raises(ValueError, match=r"need the state of \('FedDyn', 1\), found .*SCAFFOLD"):
        strategy_of(FedDyn).load_state_dict(state)


def test_scaffold_is_refused_by_nodes_that_train_with_momentum(client_grid):
    grid = client_grid(2, {**RUN_CONFIG, "train.momentum": 0.9})
    replies = ask(strategy_of(SCAFFOLD), grid, 1, ArrayRecord(MODEL.state_dict()))
    assert all("SCAFFOLD reads its control variates" in reply.error.reason for reply in replies)


def test_what_is_not_trained_is_averaged(memory_grid):
    """Running statistics and counters of batch normalisation, which drift cannot be read off."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))

    def node(seed):
        def answer(message):
            sent = {
                n: a.numpy() + a.numpy().dtype.type(seed)
                for n, a in message.content["arrays"].items()
            }
            metrics = {
                "num-examples": 10,
                "num-steps": 5 - seed,
                "train-loss": 1.0,
                "train-accuracy": 0.5,
            }
            return RecordDict({"arrays": as_record(sent), "metrics": MetricRecord(metrics)})

        return answer

    grid = memory_grid({seed: node(seed) for seed in (1, 3)})
    start = ArrayRecord(model.state_dict())
    for kind in (FedNova, FedDyn, FedFA):
        strategy = kind(model=model, fraction_evaluate=0.0)
        found, _ = strategy.aggregate_train(1, ask(strategy, grid, 1, start))
        assert found["1.num_batches_tracked"].numpy() == 2
        assert found["1.num_batches_tracked"].numpy().dtype == np.int64
        np.testing.assert_allclose(found["1.running_var"].numpy(), 3.0)
        assert not np.allclose(found["0.bias"].numpy(), start["0.bias"].numpy() + 2.0)


def test_a_checked_average_of_whole_replies_is_flowers_own(memory_grid):
    from flwr.serverapp.strategy import FedAvg

    def plain(node):
        def answer(message):
            content = fake_node(node)(message)
            del content[CONTROL_VARIATE]
            return content

        return answer

    grid = memory_grid({node: plain(node) for node in range(1, 4)})
    checked, theirs = CheckedFedAvg(fraction_evaluate=0.0), FedAvg(fraction_evaluate=0.0)
    start = ArrayRecord(MODEL.state_dict())
    found, _ = checked.aggregate_train(1, ask(checked, grid, 1, start))
    expected, _ = theirs.aggregate_train(1, ask(theirs, grid, 1, start))
    for name, array in expected.items():
        np.testing.assert_allclose(found[name].numpy(), array.numpy(), rtol=1e-5, atol=1e-6)
