"""What only a real GPU shows: recorded graphs, precisions, pinned copies, memory that runs out."""

import logging

import pytest
import torch
from flwr.app import Context, Message, RecordDict

import flwr_distill.client.training
import flwr_distill.distill.distribution_matching
import flwr_distill.distill.kip
from flwr_distill.client.session import Session
from flwr_distill.client.training import epoch_batches, fit, train_round
from flwr_distill.client.training_together import train_together
from flwr_distill.distill import distiller
from flwr_distill.task.augmentation import Augment
from flwr_distill.task.compute import device as compute_device
from flwr_distill.task.compute.cuda_graph import graphed
from flwr_distill.task.compute.device import place
from flwr_distill.task.compute.precision import products_in
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import CHANGES, TrainSettings
from tests.gpu.work import ADAM, ONE_PASS, REAL_GPU, SGD, SPEC, Place, generator, samples
from tests.node.workers import notes_of_worker

pytestmark = pytest.mark.gpu

GPU = torch.device(REAL_GPU)
REAL = Place(REAL_GPU)


@pytest.fixture(autouse=True)
def whole_float32():
    """As in a node's app."""
    with products_in("float32"):
        yield


@pytest.fixture
def replayed(monkeypatch, caplog):
    """Graphs at each of their replays; fails if a step could not be recorded."""
    graphs = []
    make = torch.cuda.CUDAGraph

    def noting():
        graph = make()
        replay = graph.replay
        graph.replay = lambda: graphs.append(graph) or replay()
        return graph

    caplog.set_level(logging.INFO, "task")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", noting)
    yield graphs
    assert not [record for record in caplog.get_records("call") if record.name == "task"]


def distilled(name, **options):
    images, labels = torch.randn(18, 1, 8, 8, generator=generator()), torch.arange(18) % 3
    losses = []
    made = distiller(name)(
        images,
        labels,
        num_classes=4,
        per_class=2,
        steps=8,
        generator=generator(5),
        device=REAL_GPU,
        progress=lambda step, steps, loss: losses.append(loss),
        **options,
    )
    return losses, made.images


def trained(name="resnet8", precision="float32", epochs=3, data=None, augment=True, lr=0.05):
    """Losses and weights after training with momentum; the last minibatch is smaller."""
    data = samples(60) if data is None else data
    model = create_model(name, SPEC, seed=0).to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    batches = [
        batch for _ in range(epochs) for batch in epoch_batches(data.labels, 16, generator())
    ]
    changes = Augment(CHANGES, generator(1)) if augment else None
    with products_in(precision):
        result = fit(model, data, batches, optimizer, (), precision, changes)
    return list(result), model.state_dict()


RECORDED = {
    "kip": (lambda: distilled("kip"), 7, ADAM),
    "dm": (lambda: distilled("dm", bank=2), 4, ADAM),
    # A rounding error that turns a ReLU off grows: 1e-6 of the weights becomes 0.03, and 0.1 at
    # lr 0.05. Other minibatches make 1.3.
    "training": (lambda: trained(lr=0.01), 8 + 2, ADAM),
    "training in bf16": (lambda: trained("digits-cnn", "bf16"), 8 + 2, ADAM),
    "training from main memory": (lambda: trained("digits-cnn"), 8 + 2, SGD),
    "training from the GPU": (lambda: trained("digits-cnn", data=samples(60).to(GPU)), 10, SGD),
}
"""Work with recorded steps, the fewest replays, and how near to it without graphs it must be."""


@pytest.mark.parametrize("work", RECORDED)
def test_steps_are_recorded_and_replayed_and_give_what_they_give_one_by_one(
    replayed, monkeypatch, work
):
    do, fewest, tolerance = RECORDED[work]
    losses, result = do()
    assert len(replayed) >= fewest
    number = len(replayed)
    for module in (
        flwr_distill.client.training,
        flwr_distill.distill.kip,
        flwr_distill.distill.distribution_matching,
    ):
        monkeypatch.setattr(module, "graphed", lambda step, device: step)
    expected_losses, expected = do()
    assert len(replayed) == number
    REAL.check(losses, expected_losses, tolerance)
    REAL.check(result, on_cpu(expected), tolerance)


def on_cpu(values):
    if isinstance(values, dict):
        return {name: value.cpu() for name, value in values.items()}
    return values.cpu()


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_lower_precision_changes_the_numbers_little_and_training_learns(precision):
    digits = load_dataset("digits")
    data = digits.train.to_samples(digits.spec).subset(range(480))

    def run(precision):  # with a larger learning rate, rounding alone doubles the loss
        (loss, accuracy, _), weights = trained(
            "digits-cnn", precision, epochs=20, data=data, augment=False, lr=0.01
        )
        return loss, accuracy, weights

    loss, accuracy, weights = run(precision)
    wide_loss, wide_accuracy, wide = run("float32")
    assert any(not torch.equal(weights[name], wide[name]) for name in wide)
    assert all(weight.dtype == wide[name].dtype for name, weight in weights.items())
    assert loss == pytest.approx(wide_loss, rel=0.1)
    assert accuracy == pytest.approx(wide_accuracy, abs=0.05)
    assert accuracy > 0.6


def test_products_in_float32_keep_all_digits_and_in_tf32_do_not():
    x = torch.randn(256, 256, generator=generator())
    images = x.reshape(16, 16, 16, 16)
    wide = x.double() @ x.double()
    filters = torch.randn(8, 16, 3, 3, generator=generator(1))
    wide_maps = torch.nn.functional.conv2d(images.double(), filters.double())

    def errors():
        products = (x.to(GPU) @ x.to(GPU)).cpu() - wide
        maps = torch.nn.functional.conv2d(images.to(GPU), filters.to(GPU)).cpu() - wide_maps
        return float(products.abs().mean()), float(maps.abs().mean())

    with products_in("float32"):
        assert max(errors()) < 1e-4
    with products_in("tf32"):
        assert errors()[0] > 1e-4  # cuDNN may have no faster way for this convolution


def test_samples_over_half_of_the_free_memory_stay_in_main_memory_and_train_the_same(monkeypatch):
    data = samples(60)
    monkeypatch.setattr(compute_device, "SHARE_FOR_DATA", 1e-9)
    kept = place(data, GPU)
    monkeypatch.undo()
    moved = place(data, GPU)
    assert not kept.inputs.is_cuda
    assert moved.inputs.is_cuda
    losses, weights = trained("digits-cnn", data=kept)
    expected_losses, expected = trained("digits-cnn", data=moved)
    REAL.check(losses, expected_losses, SGD)
    REAL.check(weights, on_cpu(expected), SGD)


def test_minibatches_from_main_memory_are_pinned_and_arrive_whole(monkeypatch):
    """While the GPU is busy, more of them wait than PyTorch keeps pinned blocks for at first."""
    pinned = []
    pin = torch.Tensor.pin_memory

    def noting(tensor):
        pinned.append(pin(tensor))
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", noting)
    data = samples(640)
    busy = torch.randn(2048, 2048, device=GPU)
    for _ in range(20):
        busy = busy @ busy * 1e-3
    arrived = []
    for rows in torch.split(torch.arange(640), 16):
        arrived.append(data.minibatch(rows, GPU))
        if len(pinned) > 4:
            pinned.clear()  # freed while its copy may still wait
    assert all(x.is_cuda for pair in arrived for x in pair)
    assert torch.equal(torch.cat([inputs for inputs, _ in arrived]).cpu(), data.inputs)
    assert torch.equal(torch.cat([labels for _, labels in arrived]).cpu(), data.labels)


@pytest.mark.parametrize("changes", [(), CHANGES], ids=["plain", "changed"])
def test_virtual_nodes_in_one_batch_get_what_each_gets_by_itself(changes):
    settings = TrainSettings(local_epochs=2, batch_size=8)
    data = samples(40).to(GPU)
    sets = [data.subset(range(40 - 3 * (number % 2))) for number in range(5)]
    start = create_model("digits-cnn", SPEC, seed=0)
    draws = [generator(number) for number in range(5)]
    together = train_together(start.to(GPU), sets, settings, draws, changes)
    for number, (weights, measures) in enumerate(together):
        model = create_model("digits-cnn", SPEC, seed=0).to(GPU)
        alone = train_round(model, sets[number], settings, generator(number), changes=changes)
        REAL.check(measures, alone, SGD)
        REAL.check(weights, on_cpu(model.state_dict()), SGD, on_cpu(start.state_dict()))


def test_two_sessions_on_one_gpu_train_as_each_does_alone(tmp_path):
    def trained_by(partition, folder):
        node_config = {
            "partition-id": partition,
            "num-partitions": 20,
            "state-dir": str(tmp_path / folder),
            "device": REAL_GPU,
        }
        session = Session.of(Context(1, 5 + partition, node_config, RecordDict(), {}))
        model = create_model("digits-cnn", SPEC, seed=0).to(session.device)

        def one_round():
            settings = session.task.train.model_copy(update={"local_epochs": 1})
            train_round(model, session.data.train, settings, generator(partition))
            return model

        return one_round

    alone = []
    for partition in range(2):
        one_round = trained_by(partition, "alone")
        one_round()
        alone.append(on_cpu(one_round().state_dict()))
    turns = [trained_by(partition, "beside") for partition in range(2)]
    for _ in range(2):
        models = [turn() for turn in turns]
    for model, expected in zip(models, alone, strict=True):
        REAL.check(model.state_dict(), expected, ONE_PASS)


def test_a_full_gpu_is_explained_and_what_the_message_held_is_free_for_the_next(monkeypatch):
    """In a worker that trains, fills the GPU, fails, and trains again for the next message."""
    calls, reserved = [], []

    def app(message, context):
        calls.append(1)
        trained("digits-cnn", epochs=1)
        if len(calls) == 1:
            filled = [torch.empty(2**30, dtype=torch.uint8, device=GPU)]
            while True:
                filled.append(torch.empty(2**30, dtype=torch.uint8, device=GPU))
        reserved.append(torch.cuda.memory_reserved(GPU))
        message.metadata.__dict__["_message_id"] = "id"
        return Message(RecordDict(), reply_to=message)

    notes = notes_of_worker(monkeypatch, app, REAL_GPU, {"train.batch-size": 512})
    (kind, _, reason), done = notes
    assert kind == "failed"
    assert reason.startswith(f"{REAL_GPU} ({torch.cuda.get_device_name(GPU)}")
    assert "is out of memory: lower train.batch-size=512, take a smaller model" in reason
    assert done == ("done", 0, "")
    assert reserved[0] < 4 * 2**30


def test_recordings_one_after_the_other_take_the_memory_of_one():
    """Each stream on which cuBLAS works keeps memory of its own."""

    def recorded():
        step = graphed(lambda x: (x @ x).sum(), GPU)
        for _ in range(3):
            step(torch.ones(64, 64, device=GPU))

    recorded()
    before = torch.cuda.memory_allocated(GPU)
    for _ in range(10):
        recorded()
    assert torch.cuda.memory_allocated(GPU) < before + 2**25
