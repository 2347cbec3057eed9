"""DynaFed: FedAvg, tuned at the server on virtual data made from its own trajectory."""

import copy
from collections.abc import Mapping
from logging import INFO, WARNING
from typing import Any, Self

import numpy as np
import torch
from flwr.common import log
from torch import nn
from torch.nn import functional

from flwr_distill.base.text import counted
from flwr_distill.distill.augmentation import draw_augmentation
from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.protocol.arrays import Arrays, arrays_of, as_tensors, load_arrays
from flwr_distill.strategies.common.checked import CheckedFedAvg, Update
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.draws import round_generator
from flwr_distill.strategies.common.images import require_images
from flwr_distill.strategies.common.run import Run
from flwr_distill.strategies.common.virtual_files import virtual_files
from flwr_distill.task.datasets import DataSpec
from flwr_distill_baselines.dynafed.method import DynaFedSettings
from flwr_distill_baselines.dynafed.trajectory_matching import match_trajectory

TUNE_BATCH = 256
"""Virtual images in a step of tuning, at most."""


class DynaFed(CheckedFedAvg):
    """FedAvg whose server learns from the run's own trajectory (Pi et al. 2023).

    The server keeps the global models of the first rounds. Then it distils them once: a few steps
    on the virtual data lead from one of them to a later one, so that they show what the nodes' data
    did to it (`trajectory_matching.match_trajectory`). From then on it trains each
    average on them for a few steps of Adam. Nodes do what they do in FedAvg.

    Parameters
    ----------
    model : nn.Module
        The run's architecture; its weights are not changed.
    spec : DataSpec
        Shape and classes of the images.
    seed : int (default: 0)
        Seed of all draws at the server.
    device : torch.device or str (default: "cpu")
        Where the server distils and tunes.
    **kwargs
        Settings (`method.DynaFedSettings`), and what Flower's FedAvg takes.

    Notes
    -----
    Unlike the published code, images are never flipped, and batch normalisation keeps the running
    statistics of the nodes' average. If the distillation fails, the server collects a new
    trajectory. A round whose model does not move adds nothing to it.
    """

    settings: DynaFedSettings = DynaFedSettings()
    run_arguments = ("model", "spec", "seed", "device", "directory")
    state_keys = ("trajectory",)

    def __init__(
        self,
        *,
        model: nn.Module,
        spec: DataSpec,
        seed: int = 0,
        device: torch.device | str = "cpu",
        directory: Directory | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_images(spec, "dynafed")
        self.trajectory: dict[int, Arrays] = {}
        """Trained parameters of the start and of the global models since, until distilled."""
        self.virtual: VirtualData | None = None
        """The server's virtual data; None until they are distilled."""
        self._payload = b""
        self._directory = directory or Directory()
        self._spec = spec
        self._model = copy.deepcopy(model).to(device)
        # Each parameter once, also if layers share it: a trajectory is of parameters.
        self._trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self._seed = seed

    @classmethod
    def from_run(cls, settings: DynaFedSettings, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp; warns of a run that is too short."""
        strategy = super().from_run(settings, run, **arguments)
        length = strategy.settings.trajectory
        if 0 < run.num_rounds <= length:
            log(
                WARNING,
                "dynafed.trajectory = %d: this run has %s, so that it is FedAvg up to the last one "
                "(set dynafed.trajectory to %d, or num-rounds above %d)",
                length,
                counted(run.num_rounds, "round"),
                max(run.num_rounds // 2, 1),
                length,
            )
        return strategy

    def combine(self, updates: list[Update]) -> Arrays:
        """Average the models; distil the trajectory once it is long enough, tune the average."""
        mean = super().combine(updates)
        if not self._payload:
            self._add_to_trajectory(mean)
        return self._tuned(mean) if self.virtual else mean

    def artifacts(self) -> dict[str, bytes]:
        """Files of the run's result: the virtual data, and a picture of them."""
        return virtual_files(self._payload, self._directory.class_name)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, besides the global model."""
        return {**super().state_dict(), "virtual": self._payload}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; see `CheckedFedAvg`."""
        super().load_state_dict(state)
        self._replace(state["virtual"])

    def _add_to_trajectory(self, mean: Arrays) -> None:
        """Add a global model to the trajectory, and distil that when it is long enough."""
        for arrays in [mean] if self.trajectory else [self.start_of_round, mean]:
            own = {name: np.array(arrays[name]) for name in self._trained}
            self.trajectory[len(self.trajectory)] = own
        if len(self.trajectory) > self.settings.trajectory:
            self._distil(mean)
            self.trajectory = {}

    def _distil(self, mean: Arrays) -> None:
        models, steps = len(self.trajectory), self.settings.distill_steps
        log(INFO, "DynaFed: distilling %d global models in %s", models, counted(steps, "step"))
        load_arrays(self._model, mean)
        try:
            virtual = match_trajectory(
                [as_tensors(point) for point in self.trajectory.values()],
                self._model,
                self._spec.shape,
                self._spec.num_classes,
                per_class=self.settings.per_class,
                steps=steps,
                follow_steps=self.settings.follow_steps,
                learning_rate=self.settings.image_lr,
                generator=round_generator(self._seed, self.server_round),
            )
        except DistillError as error:
            log(WARNING, "DynaFed has no virtual data and starts a new trajectory: %s", error)
            return
        self._replace(virtual.to_bytes())

    def _tuned(self, mean: Arrays) -> Arrays:
        """The average after some steps of Adam on the virtual data."""
        virtual, device = self.virtual, next(self._model.parameters()).device
        if virtual is None or virtual.soft_labels is None:
            return mean
        images, labels = virtual.images.to(device), virtual.soft_labels.to(device)
        load_arrays(self._model, mean)
        self._model.eval()
        generator = round_generator(self._seed, self.server_round)
        optimizer = torch.optim.Adam(self._model.parameters(), lr=self.settings.tune_lr)
        for _ in range(self.settings.tune_steps):
            rows = torch.randperm(len(images), generator=generator)[:TUNE_BATCH].to(device)
            augment = draw_augmentation(*self._spec.shape[1:], generator).to(device)
            optimizer.zero_grad(set_to_none=True)
            logits = self._model(augment(images[rows]))
            functional.cross_entropy(logits, labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return arrays_of(self._model)

    def _replace(self, payload: bytes) -> None:
        """Keep virtual data, decoded as after a resume, with 8 bits per pixel."""
        self._payload = payload
        self.virtual = VirtualData.from_bytes(payload) if payload else None
