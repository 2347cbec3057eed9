"""A node of a site with images of its own: the real guard and the real app, in this process."""

import json
import zipfile
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run
from numpy.typing import NDArray

from flwr_distill.client.app import app
from flwr_distill.client.local_data import LocalData, local_data
from flwr_distill.client.session import RunSource
from flwr_distill.flower.app_config import run_config_of
from flwr_distill.flower.guarding import Guarding
from flwr_distill.node.account import LifetimeAccount
from flwr_distill.node.guard import Guard
from flwr_distill.node.policy import Policy
from flwr_distill.node.settings import NodeSettings
from flwr_distill.node.supervisor import app_config
from flwr_distill.protocol.arrays import as_record
from flwr_distill.protocol.registry import built_in_methods
from flwr_distill.protocol.replies import REFUSED
from flwr_distill.server.settings_catalogue import settings_tables
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.models import create_model
from tests.apps import pyproject

RUN, NODE, SERVER = 7, 5, 1


def images(number: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images of 4 x 4 pixels and their labels, ten of each class at least."""
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 256, (number, 1, 4, 4), dtype=np.uint8)
    return pixels, np.arange(number) % 10


class Site:
    """A node with a policy and `number` images, at which a hostile server sends any message.

    Its owner names all ten classes where the policy needs a list of them.
    """

    def __init__(self, folder: Path, policy: Policy, number: int = 300, **more: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.file = folder / "images.npz"
        self.images, self.labels = images(number)
        np.savez(self.file, images=self.images[:, 0], labels=self.labels)
        if policy.counts_classes and policy.promises_privacy:
            policy = policy.model_copy(update={"classes": [str(label) for label in range(10)]})
        state = folder / "state"
        settings = NodeSettings(policy=policy, data=self.file, state_dir=state, **more)
        self.node_config = app_config(settings)
        self.state_dir = settings.state_dir
        self.start(policy)
        self.config: dict[str, Any] = {}
        self._count = 0

    def start(self, policy: Policy) -> None:
        """Start the node, again with what it finds in its state directory."""
        self.guard = Guard(policy, self.state_dir, self.node_config, run_config_of)
        self.guarding = Guarding(self.guard)

    def run(self, **settings: Any) -> None:
        """Begin a run with these settings, and the defaults of all others."""
        defaults = {
            s.key: s.default for t in settings_tables(built_in_methods()) for s in t.settings
        }
        task = {"dataset": "private", "private.shape": "1x4x4", "model": "digits-cnn"}
        own = {key.replace("__", ".").replace("_", "-"): v for key, v in settings.items()}
        self.config = {**defaults, **task, **own}
        lines = "".join(f"{json.dumps(k)} = {json.dumps(v)}\n" for k, v in self.config.items())
        content = BytesIO()
        with zipfile.ZipFile(content, "w") as file:
            file.writestr(zipfile.ZipInfo("pyproject.toml"), pyproject("app", lines))
        archive = content.getvalue()
        self._bundle = Fab(sha256(archive).hexdigest(), archive, {})

    def ask(self, message_type: str, content: RecordDict) -> Message:
        """Send a message; what the SuperLink gets back."""
        self._count += 1
        request, forwarded = (
            Message(RecordDict(dict(content)), NODE, message_type, ttl=600.0) for _ in range(2)
        )
        for message in (request, forwarded):
            message.metadata.__dict__.update(
                _run_id=RUN, _src_node_id=SERVER, _message_id=str(self._count)
            )
        refusal = self.guarding.admit(request, Run.create_empty(RUN), self._bundle)
        if refusal is not None:
            return self.guarding.release(refusal, 0)
        return self.guarding.release(app(forwarded, self.context()), 1000)

    def context(self) -> Context:
        """What the app works with."""
        config: Any = self.config
        return Context(RUN, NODE, self.node_config, RecordDict(), config)


SPEC = DataSpec("private", (1, 4, 4), 10, (0.5,), (0.5,))
PRIVATE = {"strategy": "fedavg", "train__dp_noise": 1.0}
LIFT = 2.0
"""Makes normalised pixels positive, for networks with ReLU."""


def refused(answer: Message, rule: str) -> bool:
    assert answer.has_error(), answer
    assert answer.error.code == REFUSED, answer.error
    assert answer.error.reason.startswith(f"the node's policy refuses it: {rule}: "), answer.error
    return True


def zeros() -> dict[str, np.ndarray]:
    """The weights of a model, all 0."""
    model = create_model("digits-cnn", SPEC, seed=0)
    return {name: np.zeros(a.shape, np.float32) for name, a in model.state_dict().items()}


def passing() -> dict[str, np.ndarray]:
    """Weights with which a channel has the image's pixels."""
    state = zeros()
    state["0.weight"][0, 0, 1, 1] = state["2.weight"][0, 0, 1, 1] = 1.0
    state["0.bias"][0] = LIFT
    return state


def crafted(bias: Any = 0.0, place: int | None = None, label: int = 0) -> ArrayRecord:
    """A model whose logits are `bias`, and of one label a pixel's value."""
    state = passing()
    if place is not None:
        state["6.weight"][0, place] = state["8.weight"][label, 0] = 1.0
    state["8.bias"] += np.asarray(bias, np.float32)
    return as_record(state)


def evaluated(site: Site, model: ArrayRecord) -> Message:
    return site.ask("evaluate", RecordDict({"arrays": model, "config": ConfigRecord()}))


def account(site: Site) -> float:
    return LifetimeAccount(site.state_dir / "lifetime-epsilon.json").left(str(site.file))


def data_of(site: Site) -> LocalData:
    """The node's data, as the app has them in a run with these settings."""
    config = tuple(sorted(site.node_config.items()))
    return local_data(RunSource().task(site.context()), config, torch.device("cpu"))


def held_out_places(site: Site) -> list[int]:
    """Places of the samples that the app holds out, in a run with these settings."""
    data = data_of(site)
    shown = ((data.holdout.inputs.numpy() + 1) / 2 * 255).round().astype(np.uint8)
    return sorted(int(np.flatnonzero((site.images == image).all((1, 2, 3)))[0]) for image in shown)


HFLDD = {
    "strategy": "hfldd",
    "train__dp_noise": 1.0,
    "hfldd__dp_epsilon": 3.0,
    "hfldd__start": "noise",
    "hfldd__balanced": False,
}
