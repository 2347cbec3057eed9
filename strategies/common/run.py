"""What our ServerApp passes to a run's strategy, besides the method's settings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from flwr_distill.links.records import LinkMode
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.task.auxiliary_names import RESERVED
from flwr_distill.task.backbones import seen_spec
from flwr_distill.task.datasets import DatasetError, DataSpec, auxiliary_images
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import TrainSettings


@dataclass(frozen=True)
class Run:
    """A run, as a strategy's ``from_run`` sees it."""

    seed: int
    """Of every random draw."""
    model: nn.Module
    """The architecture; its weights are not to be changed."""
    spec: DataSpec
    """Shape and classes of the samples."""
    device: torch.device
    """Where the server computes."""
    train: TrainSettings
    """Local training."""
    data_root: str
    """Folder of data sets on the server; empty for the default."""
    links: LinkMode
    """How nodes send to each other."""
    phase_timeout: float
    """Seconds to wait for replies in each phase."""
    fraction_train: float
    """Share of the nodes that train in a round."""
    fraction_evaluate: float
    """Share of the nodes that evaluate in a round."""
    directory: Directory
    """The nodes that were met."""
    create: Callable[[str], Strategy]
    """Makes another strategy of this run, given its name, for one that leaves the work to it."""
    norm_threshold: float = 5.0
    """Score above which the norm of an update is absurd (`protocol.outliers.absurdly_large`)."""
    aggregator: Strategy | None = None
    """What combines models in place of the weighted mean."""
    num_rounds: int = 0
    """Rounds of the run; 0 if unknown."""
    down_codec: str = "float32"
    """Codec of models to nodes."""
    up_codec: str = "float32"
    """Codec of what nodes send."""
    secure_sums: bool = False
    """Whether the strategy gets means in place of single models (`Method.summed`)."""
    reserved: Callable[[int], Tensor] | None = None
    """Gives so many of the training samples that no node gets (``partition.reserved``)."""

    @property
    def seen_spec(self) -> DataSpec:
        """What nodes train on: `spec`, or that of a frozen network's features."""
        return seen_spec(self.model, self.spec, self.train)

    @property
    def num_classes(self) -> int:
        """Classes of the task."""
        return self.spec.num_classes

    @property
    def feature_layer(self) -> str:
        """Name of the last dense layer; see :func:`task.models.last_dense`."""
        return self.train.feature_layer

    @property
    def sampling(self) -> dict[str, Any]:
        """Constructor arguments of Flower's FedAvg.

        The ServerApp has met ``min-nodes`` before; a node that is lost later must not hang a round.
        """
        return {
            "fraction_train": self.fraction_train,
            "fraction_evaluate": self.fraction_evaluate,
            "min_available_nodes": 1,
            "min_train_nodes": 1,
            "min_evaluate_nodes": 1,
        }

    def auxiliary(self, name: str, size: int, setting: str) -> Callable[[], Any]:
        """Loader of samples without labels, (size, ...); see `auxiliary_images` and `reserved`.

        The set is loaded at once, so that a run without it ends before any node trains.

        Raises SettingsError if it cannot be loaded; names `setting`.
        """
        try:
            if name == RESERVED and self.reserved:
                samples = self.reserved(size)
            else:
                root = self.data_root or None
                samples = auxiliary_images(name, self.spec, size, self.seed, root)
        except DatasetError as error:
            raise SettingsError(f"on the server: {error}", where=setting, value=name) from error
        return lambda: samples
