"""pfl-research, written as its benchmark on CIFAR-10: federated averaging, users' data in memory.

It chooses users with replacement. Users' metrics are computed in the first round only.
"""

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.common_types import Population
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import get_ops
from pfl.metrics import MetricName, Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.peers.work import BATCH, LEARNING_RATE, RoundLog, Work, network, samples


class Network(nn.Module):
    """The network with the loss and the metrics that pfl-research asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return cross_entropy(self.layers(images), labels)

    @torch.no_grad()
    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        """Cross-entropy of these samples."""
        loss = cross_entropy(self.layers(images), labels, reduction="sum").item()
        return {"loss": Weighted(loss, len(labels))}


class Rounds(TrainingProcessCallback):
    """Logs each round, in the first process."""

    def __init__(self, log: RoundLog) -> None:
        self._log = log

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Count steps by the samples that were trained."""
        trained = aggregate_metrics[MetricName("number of data points", Population.TRAIN)]
        steps = int(trained.weighted_value) // BATCH
        self._log.round_ended(model.pytorch_model.parameters(), steps)
        return False, Metrics()


def main() -> None:
    """Train by federated averaging."""
    work = Work.of_this_process()
    np.random.seed(0)  # noqa: NPY002 - what pfl-research draws from
    torch.manual_seed(0)
    module = Network()
    is_first = get_ops().distributed.global_rank == 0
    callbacks = [Rounds(RoundLog(work, module.parameters()))] if is_first else []
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    users = FederatedDataset(
        lambda user: PyTorchTensorDataset(samples(work.clients, user), user_id=user),
        get_user_sampler("random", range(work.clients)),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=work.rounds,
            evaluation_frequency=work.rounds,
            train_cohort_size=work.a_round,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=LEARNING_RATE, local_num_epochs=1, local_batch_size=BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=callbacks,
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
