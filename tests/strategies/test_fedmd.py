"""FedMD with our real ClientApp, against naive loops; only the wire is a grid in memory."""

import copy

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from safetensors.torch import load

from flwr_distill.client.training import train_round
from flwr_distill.server.app import main
from flwr_distill.storage.store import NodeStore
from flwr_distill.task.datasets import Samples, auxiliary_images, load_dataset
from flwr_distill.task.models import create_model
from flwr_distill.task.source import reserved_samples
from flwr_distill_baselines.fedmd.method import EVALUATE_OWN, LOGITS
from flwr_distill_baselines.fedmd.strategy import FedMD

from .naive import play, sessions, start, trained
from .rounds import FIRST, MODEL, SPEC, spoil

NODES, PUBLIC = 2, 40
RUN_CONFIG = {"partition.classes": 4, "train.batch-size": 64}
EPOCHS = {"pretrain_epochs": 2, "private_epochs": 3}


def strategy_of(**settings):
    own = {"auxiliary_size": PUBLIC, "digest_batch_size": 16, "digest_epochs": 2, **EPOCHS}
    return FedMD(num_classes=10, **{**own, **settings})


def digested(model, session, public, consensus, server_round):
    """A copy of the model after Adam's steps on the mean absolute error, element by element."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    draws = session.generator("digest", server_round)
    for _ in range(2):
        for batch in torch.randperm(PUBLIC, generator=draws).split(16):
            optimizer.zero_grad()
            difference = model(public[batch]) - consensus[batch]
            (difference.abs().sum() / difference.numel()).backward()
            optimizer.step()
    return model


def kept(tmp_path, place):
    """Weights that the node of the last run keeps."""
    folders = sorted(tmp_path.glob(f"state/runs/*/{FIRST + place}"))
    return load(NodeStore(folders[-1]).read("own-model"))


def test_rounds_equal_the_papers_steps_as_plain_loops(client_grid, tmp_path):
    """The first round pre-trains; later ones digest and revisit."""
    grid, strategy, arrays = client_grid(NODES, RUN_CONFIG), strategy_of(), start(MODEL)
    nodes = sessions(RUN_CONFIG, tmp_path, NODES)
    public = auxiliary_images("noise", SPEC, PUBLIC, seed=0)
    models, consensus = [MODEL] * NODES, None
    for server_round in (1, 2, 3):
        arrays = play(strategy, grid, server_round, arrays)
        for i, session in enumerate(nodes):
            if consensus is not None:
                models[i] = digested(models[i], session, public, consensus, server_round)
            epochs = EPOCHS["pretrain_epochs" if consensus is None else "private_epochs"]
            models[i] = trained(session, models[i], server_round, epochs=epochs)
        consensus = sum(model(public).detach().double() for model in models).float() / NODES
        found = torch.from_numpy(strategy.consensus[LOGITS])
        torch.testing.assert_close(found, consensus, atol=1e-4, rtol=0)
    for place, model in enumerate(models):
        for name, value in kept(tmp_path, place).items():
            torch.testing.assert_close(value, model.state_dict()[name], atol=1e-4, rtol=0)
    assert arrays.keys() == MODEL.state_dict().keys()


@pytest.mark.parametrize("public", ["reserved", "labelled"])
def test_a_node_learns_the_labels_of_public_samples_first(client_grid, tmp_path, public):
    """Those of other classes with a last layer of their own, which does not stay."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (60, 8, 8), np.uint8), rng.integers(0, 3, 60)
    np.savez(tmp_path / "set.npz", images=images, labels=labels)
    config = {**RUN_CONFIG, "partition.reserved": PUBLIC, "partition.scheme": "iid"}
    name = "reserved" if public == "reserved" else str(tmp_path / "set.npz")
    strategy = strategy_of(auxiliary=name, public_epochs=2)
    play(strategy, client_grid(NODES, config), 1, start(MODEL))
    for place, session in enumerate(sessions(config, tmp_path, NODES)):
        model = copy.deepcopy(MODEL)
        if public == "reserved":
            samples = reserved_samples(session.task, SPEC, PUBLIC)
        else:
            chosen = np.random.default_rng(0).choice(60, PUBLIC, replace=False)
            inputs = auxiliary_images(name, SPEC, PUBLIC, seed=0)
            samples = Samples(inputs, torch.from_numpy(labels[chosen]))
            model[-1] = torch.nn.Linear(MODEL[-1].in_features, 3)
            torch.nn.init.zeros_(model[-1].weight)
            torch.nn.init.zeros_(model[-1].bias)
        settings = session.task.train.model_copy(update={"local_epochs": 2})
        train_round(model, samples, settings, session.generator("public", 1))
        if public != "reserved":
            model[-1] = copy.deepcopy(MODEL[-1])
        model = trained(session, model, 1, epochs=EPOCHS["pretrain_epochs"])
        for key, value in kept(tmp_path, place).items():
            torch.testing.assert_close(value, model.state_dict()[key], atol=1e-4, rtol=0)


def test_nodes_may_be_tested_on_the_common_test_set(client_grid, tmp_path):
    grid, strategy = client_grid(NODES, RUN_CONFIG), strategy_of(test_set=True)
    arrays = play(strategy, grid, 1, start(MODEL))
    messages = strategy.configure_evaluate(1, arrays, ConfigRecord(), grid)
    test = load_dataset("digits").test.to_samples(SPEC)
    for place, reply in enumerate(grid.send_and_receive(messages)):
        model = copy.deepcopy(MODEL)
        model.load_state_dict(kept(tmp_path, place))
        right = (model.eval()(test.inputs).argmax(1) == test.labels).double().mean()
        metrics = reply.content["metrics"]
        assert metrics["num-examples"] == len(test)
        assert metrics["eval-accuracy"] == pytest.approx(float(right))


def test_public_samples_without_labels_are_missing_on_nodes(run):
    with pytest.raises(Exception, match="auxiliary = 'noise': has no labels"):
        run(**{"fedmd__public_epochs": 1})


def test_nothing_but_logits_travels(client_grid):
    grid, strategy = client_grid(NODES, RUN_CONFIG), strategy_of()
    replies = []
    for node in list(grid.nodes):
        spoil(grid, node, replies.append)
    play(strategy, grid, 2, play(strategy, grid, 1, start(MODEL)))
    assert all(reply.keys() == {"metrics", LOGITS} for reply in replies)
    assert [LOGITS in m.content for m in grid.pushed] == [False] * NODES + [True] * NODES
    assert not any("arrays" in m.content for m in grid.pushed)


def test_an_evaluation_brings_no_consensus(client_grid):
    grid, strategy = client_grid(NODES, RUN_CONFIG), strategy_of(fraction_evaluate=1.0)
    arrays = play(strategy, grid, 1, start(MODEL))
    messages = list(strategy.configure_evaluate(1, arrays, ConfigRecord(), grid))
    assert len(messages) == NODES
    assert not any(message.content.array_records for message in messages)


def test_nodes_of_other_architectures_learn_with_each_other(client_grid, tmp_path):
    grid, other = (client_grid(2, RUN_CONFIG, node_config={"model": m}) for m in ("auto", "mlp"))
    grid.nodes[FIRST + 1] = other.nodes[FIRST + 1]
    strategy = strategy_of(fraction_evaluate=1.0)
    arrays = play(strategy, grid, 2, play(strategy, grid, 1, start(MODEL)))
    assert kept(tmp_path, 0).keys() == MODEL.state_dict().keys()
    assert kept(tmp_path, 1).keys() == create_model("mlp", SPEC, seed=0).state_dict().keys()
    messages = list(strategy.configure_evaluate(2, arrays, ConfigRecord(), grid))
    assert {m.metadata.message_type for m in messages} == {EVALUATE_OWN}
    by_node = {
        r.metadata.src_node_id: r.content["metrics"] for r in grid.send_and_receive(messages)
    }
    assert all(metrics["eval-loss"] < np.log(10) for metrics in by_node.values())


def test_a_node_that_joins_late_pre_trains_before_it_digests(client_grid, tmp_path):
    grid = client_grid(3, RUN_CONFIG)
    late = grid.nodes.pop(FIRST + 2)
    strategy = strategy_of()
    arrays = play(strategy, grid, 1, start(MODEL))
    consensus = torch.from_numpy(strategy.consensus[LOGITS].copy())
    grid.nodes[FIRST + 2] = late
    play(strategy, grid, 2, arrays)
    session = sessions(RUN_CONFIG, tmp_path, 3)[2]
    public = auxiliary_images("noise", SPEC, PUBLIC, seed=0)
    model = trained(session, MODEL, 2, epochs=EPOCHS["pretrain_epochs"])
    model = digested(model, session, public, consensus, 2)
    model = trained(session, model, 2, epochs=EPOCHS["private_epochs"])
    for name, value in kept(tmp_path, 2).items():
        torch.testing.assert_close(value, model.state_dict()[name], atol=1e-4, rtol=0)


@pytest.fixture
def run(client_grid, tmp_path):
    """Run our ServerApp on nodes in this process."""

    def start_run(node_config=None, **settings):
        config = {key.replace("__", ".").replace("_", "-"): v for key, v in settings.items()}
        little = {"fedmd.auxiliary-size": PUBLIC, "fedmd.pretrain-epochs": 1}
        config = {"strategy": "fedmd", "num-rounds": 1, "min-nodes": NODES, **little, **config}
        config = {**RUN_CONFIG, **config, "phase-timeout": 5.0, "runs-dir": str(tmp_path)}
        grid = client_grid(NODES, config, node_config=node_config)
        main(grid, Context(7, 1, {}, RecordDict(), config))

    return start_run


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"node_config": {"model": "resnet7"}}, "model = 'resnet7': is unknown here"),
        ({"fedmd__auxiliary": "/nowhere.npz"}, "auxiliary = '/nowhere.npz': is unknown"),
    ],
)
def test_nodes_without_the_model_or_public_samples_say_so_before_anyone_trains(run, settings, said):
    with pytest.raises(Exception, match=said):
        run(**settings)
