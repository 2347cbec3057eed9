"""Local training whose steps are recorded as a CUDA graph; a stand-in records on the CPU."""

import pytest
import torch

import flwr_distill.client.training
from flwr_distill.client.terms import Proximal
from flwr_distill.client.training import epoch_batches, fit
from flwr_distill.task.augmentation import Augment
from flwr_distill.task.compute.cuda_graph import graphed
from flwr_distill.task.datasets import DataSpec, Samples
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import CHANGES
from tests.task import cpu_graphs

SPEC = DataSpec("some-set", (3, 32, 32), 4, (0.5,) * 3, (0.5,) * 3)


@pytest.fixture
def graphs(monkeypatch):
    """Graphs of `fit`, which takes its device for a GPU."""
    recorded = cpu_graphs.install(monkeypatch)
    gpu = torch.device("cuda")
    monkeypatch.setattr(
        flwr_distill.client.training, "graphed", lambda step, device: graphed(step, gpu)
    )
    return recorded


def trained(optimizer=torch.optim.SGD, term=False, changes=(), **settings):
    generator = torch.Generator().manual_seed(3)
    samples = Samples(torch.randn(21, 3, 32, 32, generator=generator), torch.arange(21) % 4)
    model = create_model("resnet8", SPEC, seed=0)
    batches = [b for _ in range(2) for b in epoch_batches(samples.labels, 6, generator)]
    terms = [Proximal(model, 0.5)] if term else []
    chosen = optimizer(model.parameters(), lr=0.05, **settings)
    augment = Augment(changes, generator) if changes else None
    result = fit(model, samples, batches, chosen, terms, augment=augment)
    return result, model.state_dict()


@pytest.mark.parametrize("changes", [(), CHANGES], ids=["plain", "changed"])
def test_recorded_steps_train_as_steps_one_by_one(graphs, changes):
    """With momentum, BatchNorm, and a last minibatch of another size."""
    (recorded, weights) = trained(momentum=0.9, weight_decay=0.01, changes=changes)
    assert [graph.replays for graph in graphs] == [5, 1]  # of 6 full minibatches and 2 others
    graphs.clear()
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(flwr_distill.client.training, "graphed", lambda step, device: step)
        expected, expected_weights = trained(momentum=0.9, weight_decay=0.01, changes=changes)
    assert not graphs
    assert recorded == pytest.approx(expected)
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight)


@pytest.mark.parametrize("changed", [{"optimizer": torch.optim.Adam}, {"term": True}])
def test_adam_and_loss_terms_are_not_recorded(graphs, changed):
    trained(**changed)
    assert not graphs
