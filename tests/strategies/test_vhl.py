"""VHL with our real ClientApp, against the paper's loss by hand."""

import copy
from itertools import chain, repeat

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from torch.nn import functional

from flwr_distill.client.session import Session
from flwr_distill.client.training import epoch_batches
from flwr_distill.task.datasets import DataSpec, Samples
from flwr_distill.task.errors import SettingsError
from flwr_distill_baselines.vhl.client import MAKERS, VirtualTask, virtual_images
from flwr_distill_baselines.vhl.generator import style_images
from flwr_distill_baselines.vhl.method import VIRTUAL_TASK, VirtualTaskRequest
from flwr_distill_baselines.vhl.strategy import VHL
from tests.errors import at

from .rounds import MODEL, SPEC

NODES = 2
PARTITIONS = 8
LR = 0.02
RUN_CONFIG = {
    "partition.classes": 5,
    "train.batch-size": 64,
}  # each node misses half of the classes
LITTLE = {"per_class": 4, "virtual_batch": 16, "weight": 0.7, "alignment": 0.5, "contrast": 0.2}


def contrastive(features, labels, counts_as_constant=0):
    """Khosla et al. 2020, anchor by anchor; the last features are constants."""
    if counts_as_constant:
        kept = features[:-counts_as_constant]
        features = torch.cat([kept, features[-counts_as_constant:].detach()])
    unit = features / features.norm(dim=1, keepdim=True)
    losses = []
    for j in range(len(labels)):
        others = [a for a in range(len(labels)) if a != j]
        positives = [p for p in others if labels[p] == labels[j]]
        if not positives:
            continue
        total = torch.stack([unit[j] @ unit[a] / 0.07 for a in others]).logsumexp(0)
        found = [unit[j] @ unit[p] / 0.07 - total for p in positives]
        losses.append(-torch.stack(found).mean())
    return torch.stack(losses).mean() if losses else torch.zeros(())


def trained_by_hand(session, server_round):
    """A node's round: plain SGD on both minibatches of each step."""
    virtual, samples = virtual_images(SPEC, 4, seed=3), session.data.train
    draws = session.generator("virtual-task", server_round)
    endless = chain.from_iterable(epoch_batches(virtual.labels, 16, draws) for _ in repeat(None))
    own = epoch_batches(samples.labels, 64, session.generator("train", server_round))
    model = copy.deepcopy(MODEL).train()
    for batch, rows in zip(own, endless, strict=False):
        natural, images = model[:-1](samples.inputs[batch]), model[:-1](virtual.inputs[rows])
        labels, classes = samples.labels[batch], virtual.labels[rows]
        loss = functional.cross_entropy(model[-1](natural), labels)
        loss = loss + 0.7 * functional.cross_entropy(model[-1](images), classes)
        both, of_both = torch.cat([natural, images]), torch.cat([labels, classes])
        loss = loss + 0.5 * contrastive(both, of_both, counts_as_constant=len(classes))
        loss = loss + 0.2 * contrastive(images, classes)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= LR * gradient
    return model.state_dict(), len(samples)


def test_a_round_is_the_mean_of_nodes_that_learn_both_tasks(client_grid, tmp_path):
    few = {"num-partitions": PARTITIONS}
    grid = client_grid(NODES, RUN_CONFIG, node_config=few)
    strategy = VHL(**LITTLE, seed=3, fraction_evaluate=0.0)
    config = ConfigRecord({"lr": LR, "local-epochs": 1})
    messages = strategy.configure_train(1, ArrayRecord(MODEL.state_dict()), config, grid)
    found, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    expected = []
    for node in range(NODES):
        config = {"partition-id": node, "state-dir": str(tmp_path / "own"), **few}
        session = Session.of(Context(9, node, config, RecordDict(), RUN_CONFIG))
        expected.append(trained_by_hand(session, 1))
    total = sum(size for _, size in expected)
    for name, array in found.items():
        mean = sum(size / total * state[name] for state, size in expected)
        torch.testing.assert_close(torch.tensor(array.numpy()), mean, atol=1e-5, rtol=0)


COLOUR = DataSpec("faces", (3, 28, 24), 10, (0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(
    ("make", "spec", "least"),
    [(virtual_images, SPEC, 0.95), (style_images, SPEC, 0.7), (style_images, COLOUR, 0.7)],
)
def test_all_nodes_draw_the_same_images_which_show_their_class(make, spec, least):
    one, other = (make(spec, 20, seed=3) for _ in range(2))
    assert torch.equal(one.inputs, other.inputs)
    assert not torch.equal(one.inputs, make(spec, 20, seed=4).inputs)
    assert one.labels.bincount().tolist() == [20] * SPEC.num_classes
    assert one.inputs.shape[1:] == spec.shape
    assert abs(float(one.inputs.mean())) < 0.1
    assert float(one.inputs.std()) == pytest.approx(1, abs=0.1)
    flat = one.inputs.flatten(1)
    means = torch.stack([flat[one.labels == c].mean(0) for c in range(SPEC.num_classes)])
    nearest = torch.cdist(flat, means).argmin(1)
    assert (nearest == one.labels).float().mean() > least


def test_images_of_a_style_differ_within_a_class_and_are_smooth():
    images = style_images(COLOUR, 5, seed=3).inputs
    assert torch.cdist(images[:5].flatten(1), images[:5].flatten(1)).add(torch.eye(5)).min() > 0.5
    steps = (images[..., 1:] - images[..., :-1]).abs().mean()
    rows = images.flatten(1)
    shuffled = rows[:, torch.randperm(rows.shape[1])].reshape(images.shape)
    assert steps < 0.5 * (shuffled[..., 1:] - shuffled[..., :-1]).abs().mean()


def test_a_node_learns_the_images_that_the_run_names(client_grid, monkeypatch):
    made = []
    monkeypatch.setitem(MAKERS, "stylegan", lambda *a: made.append(a) or virtual_images(*a))
    ask(client_grid(2, RUN_CONFIG), images="stylegan")
    assert made == [(SPEC, 2, 1)] * 2


def test_what_a_node_lacks_of_classes_it_learns_of_virtual_images():
    virtual = virtual_images(SPEC, 4, seed=3)
    only_ones = Samples(torch.randn(8, *SPEC.shape), torch.ones(8, dtype=torch.int64))
    model = copy.deepcopy(MODEL)
    request = VirtualTaskRequest(per_class=4, virtual_batch=40, seed=3)
    term = VirtualTask(model, virtual, request, torch.Generator().manual_seed(0))
    term(only_ones.inputs, only_ones.labels, model(only_ones.inputs)).backward()
    assert (model[-1].weight.grad.abs().sum(1) > 0).all()


def test_texts_are_refused_before_any_node_is_asked(a_run):
    from flwr_distill_baselines.vhl.method import VHLSettings

    spec = DataSpec("letters", (1, 1, 12), 4, (0.5,), (0.5,), kind="text", vocabulary=50)
    with pytest.raises(SettingsError, match="'letters'", check=at("strategy", value="vhl")):
        VHL.from_run(VHLSettings(), a_run(spec=spec))
    assert VHL.from_run(VHLSettings(), a_run()).request.seed == 7
    table = DataSpec("rows", (12, 1, 1), 4, (0.5,) * 12, (0.5,) * 12, kind="table")
    with pytest.raises(SettingsError, check=at("vhl.images", value="stylegan")):
        VHL.from_run(VHLSettings(images="stylegan"), a_run(spec=table))


def ask(grid, **changed):
    request = {**VirtualTaskRequest(seed=1, per_class=2).model_dump(by_alias=True), **changed}
    strategy = VHL(fraction_evaluate=0.0)
    strategy.records = lambda: {VIRTUAL_TASK: ConfigRecord(request)}
    arrays = ArrayRecord(MODEL.state_dict())
    messages = strategy.configure_train(1, arrays, ConfigRecord({"local-epochs": 1}), grid)
    return grid.send_and_receive(messages)


def test_a_node_refuses_a_malformed_request(client_grid):
    for reply in ask(client_grid(2, RUN_CONFIG), seed=-1):
        assert "seed = -1" in reply.error.reason
