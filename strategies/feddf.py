"""FedDF: FedAvg, and then the nodes' ensemble distilled on the server."""

from collections.abc import Callable, Iterable
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from strategies.arrays import as_arrays, as_record
from strategies.replies import number, usable
from strategies.sectors import Arrays, check_arrays, weighted_mean
from strategies.server_distillation import ServerDistillation
from task.messages import ARRAYS, NUM_EXAMPLES
from task.requests import EnsembleDistillation


class FedDF(FedAvg):
    """Ensemble distillation on the server: FedHEAD+ without sectors (Lin et al. 2020).

    The server averages the nodes' models as FedAvg does, and distils their weighted ensemble into
    the mean on a reference set without labels.

    Parameters
    ----------
    model : nn.Module
        The run's architecture.
    reference : callable
        Gives the reference set, samples (n, ...); called once, when first needed.
    ensemble_distillation : EnsembleDistillation, optional (default: None)
        How to distil; None takes the defaults. The published FedDF averages ``logits``.
    server_epochs : int (default: 20)
        Most epochs of a distillation.
    seed : int (default: 0)
        Seed of the held-out part and of the minibatches.
    **kwargs
        As Flower's FedAvg takes them.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        reference: Callable[[], Tensor],
        ensemble_distillation: EnsembleDistillation | None = None,
        server_epochs: int = 20,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        request = ensemble_distillation or EnsembleDistillation()
        request = request.model_copy(update={"distill_epochs": server_epochs})
        self._distil = ServerDistillation(model, reference, request, seed)
        self._global: Arrays

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have the sampled nodes train, as FedAvg does."""
        self._global = as_arrays(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the nodes' models and distil their ensemble into the mean."""
        members: list[tuple[float, Arrays]] = []
        loss = 0.0
        for reply in usable(replies):
            sent = reply.content.array_records.get(ARRAYS, ArrayRecord())
            try:
                weight, mean_loss = number(reply, NUM_EXAMPLES), number(reply, "train-loss")
                if weight <= 0:
                    raise ValueError(f"it was trained on {weight} samples")
                members.append((weight, check_arrays(as_arrays(sent), self._global)))
            except ValueError as error:
                log(WARNING, "Model of node %d set aside: %s", reply.metadata.src_node_id, error)
                continue
            loss += weight * mean_loss
        if not members:
            return None, None
        distilled = self._distil(members, weighted_mean(members), server_round)
        total = sum(weight for weight, _ in members)
        return as_record(distilled), MetricRecord({"train-loss": loss / total})
