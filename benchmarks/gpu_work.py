"""Steps that `benchmarks.gpu` measures, by name; some beside the papers' own, or as CUDA graphs."""

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import distill_steps
from benchmarks.distill_steps import CLASSES, Comparison, Setting
from benchmarks.in_process import Settings, run_in_process
from flwr_distill.client.dp_sgd import PrivacyAccount, PrivateTraining
from flwr_distill.client.training import fit
from flwr_distill.distill import VirtualData, distill_dm
from flwr_distill.distill.ensemble import HELD_OUT, distil_ensemble
from flwr_distill.distill.gradient_matching import match_gradient
from flwr_distill.distill.kip import distill_kip, distill_kip_many
from flwr_distill.distill.registry import _DISTILLERS
from flwr_distill.simulation.grid import Node
from flwr_distill.storage.store import NodeStore
from flwr_distill.task.compute import cuda_graph
from flwr_distill.task.compute.precision import products_in
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import Precision

PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")
PRIVATE_BATCH = ENSEMBLE_BATCH = 128
GREY = DataSpec("random", (1, 28, 28), CLASSES, (0.0,), (1.0,))
"""Images as MNIST's, for the network that takes no others."""
Steps = Callable[[int], object]
"""Does so many steps."""


@dataclass(frozen=True)
class Work:
    """A piece of work to measure.

    Parameters
    ----------
    prepare : callable
        Makes what does its steps in a setting.
    first : int (default: 1)
        Steps after which each further one costs the same.
    precision : str (default: "float32")
        Whose peak its floor is taken from.
    recorded : bool (default: False)
        Whether a GPU replays its steps as CUDA graphs.
    published : callable, optional (default: None)
        Whose reference is the step as the paper publishes it.
    counted_as : str, optional (default: None)
        The row that launches and computes the same; the counter does not see precisions.
    """

    prepare: Callable[[Setting], Steps]
    first: int = 1
    precision: Precision = "float32"
    recorded: bool = False
    published: Callable[[Setting], Comparison] | None = None
    counted_as: str | None = None

    def published_steps(self, setting: Setting) -> Steps | None:
        """Make what does the published steps, if there are any."""
        if self.published is None:
            return None
        step = self.published(setting).reference
        return in_float32(lambda steps: [step() for _ in range(steps)])


@contextmanager
def without_graphs() -> Iterator[None]:
    """Within the block no step is recorded: each runs as it does where graphs fail."""
    with mock.patch.object(cuda_graph, "_Graphed", lambda step, stream: step):
        yield


def in_float32(run: Steps) -> Steps:
    """Multiply in float32, as server and nodes do except in training."""

    def done(steps: int) -> object:
        with products_in("float32"):
            return run(steps)

    return done


def distilling(
    setting: Setting, method: Callable[..., VirtualData], points: int | None = None
) -> Steps:
    """Ten virtual images a class, or `points` in all, of 256 real ones a class."""
    sizes = setting.sizes
    data = setting.samples(CLASSES * sizes.real_per_class)
    return in_float32(
        lambda steps: method(
            data.inputs,
            data.labels,
            num_classes=CLASSES,
            per_class=sizes.per_class if points is None else points // CLASSES,
            steps=steps,
            generator=setting.generator(),
            device=setting.device,
        )
    )


def wide_matching(setting: Setting) -> Steps:
    """Distribution matching as published in all but its bank."""
    return distilling(setting, functools.partial(distill_dm, bank=2, width=setting.sizes.width))


def large_kip(setting: Setting) -> Steps:
    """KIP of 400 virtual images."""
    return distilling(setting, distill_kip, setting.sizes.kip_points)


def kip_of_nodes(setting: Setting) -> Steps:
    """KIP of ten nodes together; each has ten real images, and learns ten."""
    nodes = [setting.samples(CLASSES) for _ in range(10)]
    return in_float32(
        lambda steps: distill_kip_many(
            [(node.inputs, node.labels) for node in nodes],
            num_classes=CLASSES,
            per_class=1,
            steps=steps,
            generators=[setting.generator() for _ in nodes],
            device=setting.device,
        )
    )


def gradient_matching(setting: Setting) -> Steps:
    """FedLGD's server with ConvNet-3."""
    model = create_model("convnet3", setting.spec, seed=0).to(setting.device)
    data = setting.samples(CLASSES * setting.sizes.per_class)
    target = {name: torch.randn_like(weight) for name, weight in model.named_parameters()}
    return in_float32(
        lambda steps: match_gradient(data.inputs, data.labels, target, model, steps=steps)
    )


def training(
    setting: Setting,
    model_name: str,
    batch: int,
    precision: Precision,
    spec: DataSpec | None = None,
) -> Steps:
    """Local training on one minibatch again and again."""
    model = create_model(model_name, spec or setting.spec, seed=0).to(setting.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = setting.samples(batch, spec)
    minibatch = torch.arange(batch, device=setting.device)

    def run(steps: int) -> None:
        with products_in(precision):
            fit(model, data, [minibatch] * steps, optimizer, precision=precision)

    return run


def private_training(setting: Setting) -> Steps:
    """DP-SGD with each sample in each step, so that steps are of one size."""
    model = create_model("convnet3", setting.spec, seed=0).to(setting.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = setting.samples(PRIVATE_BATCH)

    def run(steps: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            account = PrivacyAccount(NodeStore(Path(folder)), delta=1e-5, budget=0.0)
            privacy = PrivateTraining(1.0, 1.0, account, setting.generator())
            privacy.fit(model, data, optimizer, batch_size=PRIVATE_BATCH, steps=steps)

    return in_float32(run)


def ensemble_distilling(setting: Setting) -> Steps:
    """One epoch; a step has its share of the samples that are held out, too."""
    student = create_model("convnet3", setting.spec, seed=0).to(setting.device)
    inputs = setting.samples(round(ENSEMBLE_BATCH / (1 - HELD_OUT))).inputs
    teacher = torch.full((len(inputs), CLASSES), 1 / CLASSES, device=setting.device)

    def run(steps: int) -> None:
        distil_ensemble(
            student,
            _repeated(inputs, steps),
            _repeated(teacher, steps),
            epochs=1,
            batch_size=ENSEMBLE_BATCH,
            generator=setting.generator(),
        )

    return in_float32(run)


def federation(setting: Setting, strategy: str) -> Steps:
    """Server and nodes in one process, on digits; a step is a whole run."""
    tiny = setting.sizes == distill_steps.TINY
    nodes, rounds, steps = (2, 1, 2) if tiny else (10, 3, 50)
    run_config: Settings = {
        "strategy": strategy,
        "num-rounds": rounds,
        "hfldd.distilled-size": 10,
        "hfldd.distill-steps": steps,
        "server-device": str(setting.device),
    }
    node: Settings = {"num-partitions": 10, "device": str(setting.device)}

    def run(times: int) -> None:
        failures: list[Exception] = []
        for _ in range(times):
            run_in_process(run_config, [node] * nodes, wrap=functools.partial(noting, failures))
        if failures:  # a run continues without a node that fails
            raise failures[0]

    return run


def all_work() -> dict[str, Work]:
    """All that can be measured, by name."""
    methods: dict[str, Callable[..., VirtualData]] = {**_DISTILLERS}
    del methods["auto"]  # takes one of the others
    methods["dm"] = functools.partial(distill_dm, bank=2)  # complete after two steps
    work = {
        f"distil-{name}": Work(functools.partial(distilling, method=m), first=2, recorded=True)
        for name, m in sorted(methods.items())
    }
    naive = functools.partial(distill_steps.kip_large, dtype=torch.float64)
    work["distil-dm-w128"] = Work(wide_matching, first=2, recorded=True, published=distill_steps.dm)
    work["distil-kip-n40"] = Work(
        functools.partial(distilling, method=distill_kip, points=40),
        recorded=True,
        published=functools.partial(naive, points=40),
    )
    work["distil-kip-n400"] = Work(large_kip, recorded=True, published=naive)
    work["distil-kip-10-nodes"] = Work(
        kip_of_nodes, recorded=True, published=distill_steps.kip_clients
    )
    work["match-gradient"] = Work(gradient_matching, published=distill_steps.gradient_matching)
    models = itertools.product(("digits-cnn", "convnet3", "resnet18"), (16, 128), PRECISIONS)
    small = ("hfldd-mnist", 32, PRECISIONS[0])
    for name, batch, precision in (*models, small):
        work[f"train-{name}-{batch}-{precision}"] = Work(
            functools.partial(
                training,
                model_name=name,
                batch=batch,
                precision=precision,
                spec=GREY if name == "hfldd-mnist" else None,
            ),
            precision=precision,
            recorded=True,
            counted_as=f"train-{name}-{batch}-float32",
        )
    work["train-privately"] = Work(private_training)
    work["distil-ensemble"] = Work(ensemble_distilling)
    for strategy in ("fedavg", "hfldd"):
        work[f"run-{strategy}"] = Work(functools.partial(federation, strategy=strategy), first=0)
    return work


WORK = all_work()
QUICK = (
    "distil-dm-w128",
    "distil-kip-n400",
    "train-digits-cnn-16-float32",
    "train-hfldd-mnist-32-float32",
    "match-gradient",
    "distil-kip-n40",
    "distil-kip-10-nodes",
    "train-convnet3-128-float32",
    "train-convnet3-128-tf32",
    "train-convnet3-128-bf16",
    "train-resnet18-128-float32",
    "train-resnet18-128-bf16",
    "train-privately",
    "distil-ensemble",
)
"""What a short run on a GPU measures, in this order: first what has goals."""


def noting(failures: list[Exception], place: int, node: Node) -> Node:
    """A node that also notes its failures."""

    def answer(message: Any) -> Any:
        try:
            return node(message)
        except Exception as error:
            failures.append(error)
            raise

    return answer


def _repeated(rows: Tensor, times: int) -> Tensor:
    return rows.repeat(times, *(1,) * (rows.ndim - 1))
