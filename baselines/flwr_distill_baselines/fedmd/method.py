"""FedMD: messages between server and nodes, settings and declaration."""

from typing import Annotated

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from pydantic import AfterValidator, Field

from flwr_distill.protocol.arrays import Arrays, finite_arrays
from flwr_distill.protocol.method import Method, Phase
from flwr_distill.protocol.schema import (
    EVALUATE,
    EVALUATE_REQUEST,
    TRAIN_REQUEST,
    Reply,
    TrainMetrics,
)
from flwr_distill.task.auxiliary_names import check_auxiliary
from flwr_distill.task.settings import Block, TrainSettings

TRAIN_CONSENSUS = "train.consensus"
"""Have a node learn the consensus, train on its own samples, and send its logits."""

EVALUATE_OWN = "evaluate.own_model"
"""Have a node evaluate its own model."""

DIGEST = "digest"
"""Name of the record with the request to learn the consensus, see `FedMDSettings`."""

LOGITS = "logits"
"""Name of the record of logits on public samples, the nodes' or their mean, and of its array."""

OPTIONAL = ("public_epochs", "test_set")
"""Settings that the record ``digest`` omits if they are off."""


class FedMDSettings(Block):
    """Settings of FedMD (``fedmd.*``), also its request to nodes."""

    auxiliary: Annotated[str, AfterValidator(check_auxiliary)] = "noise"
    """Public samples, which every node builds for itself: ``noise``, ``cifar100``,
    ``fashion-mnist``, ``tiny-imagenet``, ``reserved`` for training samples that no node gets
    (``partition.reserved``), or a folder or npz that is on every node, or ``@NAME`` for what nodes'
    owners call so."""
    auxiliary_size: Annotated[int, Field(ge=2)] = 5000
    """Number of public samples."""
    public_epochs: Annotated[int, Field(ge=0)] = 0
    """Epochs on the public samples' labels before all others, as in the paper; 0 uses no labels.
    ``reserved``, named sets and npz files may have some."""
    pretrain_epochs: Annotated[int, Field(ge=1)] = 25
    """Epochs on the node's own samples in its first round, before it sends logits."""
    digest_epochs: Annotated[int, Field(ge=1)] = 1
    """Epochs on the public samples in which a node learns the mean logits."""
    digest_lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate of Adam in these."""
    digest_batch_size: Annotated[int, Field(ge=2)] = 256
    """Public samples in a minibatch."""
    private_epochs: Annotated[int, Field(ge=1)] = 4
    """Epochs on the node's own samples after that, in place of ``train.local-epochs`` (the paper: 4
    on FEMNIST, 10 on CIFAR)."""
    test_set: bool = False
    """Whether nodes evaluate on the test samples of the run's named data set, in place of their own
    held-out ones."""

    @property
    def request(self) -> ConfigRecord:
        """These settings as the record ``digest``."""
        empty = {name for name in OPTIONAL if not getattr(self, name)}
        return ConfigRecord(self.model_dump(by_alias=True, exclude=empty))


def logits_of(record: ArrayRecord, shape: tuple[int, int] | None = None) -> Arrays:
    """Read a node's record of logits, float32 (public samples, classes), checked.

    None as `shape` takes any. A ValueError says what is wrong.
    """
    if list(record) != [LOGITS]:
        raise ValueError(f"its arrays are not {LOGITS}")
    arrays = finite_arrays(record)
    logits = arrays[LOGITS]
    if logits.dtype != np.float32 or logits.ndim != 2 or shape not in (None, logits.shape):
        wanted = shape or "(public samples, classes)"
        raise ValueError(f"its {LOGITS} are {logits.dtype} {logits.shape}, need float32 {wanted}")
    return arrays


def _check_logits(record: ArrayRecord, model: Arrays) -> None:
    logits_of(record)


def _unprotected(settings: FedMDSettings, train: TrainSettings) -> str:
    return (
        "nodes keep models that were trained without differential privacy, and send their logits "
        "(take another strategy)"
    )


def _disclosed(settings: FedMDSettings) -> str:
    return (
        f"Nodes sent the logits of their models on {settings.auxiliary_size} public samples. "
        "Models stayed on nodes."
    )


METHOD = Method(
    name="fedmd",
    strategy="flwr_distill_baselines.fedmd.strategy:FedMD",
    summary="Nodes keep their models, and learn the mean of their logits on public samples.",
    settings=FedMDSettings,
    phases=(
        Phase(
            TRAIN_CONSENSUS,
            "nodes learn the consensus and train",
            (Reply(metrics=TrainMetrics, arrays={LOGITS: _check_logits}),),
            "flwr_distill_baselines.fedmd.client:train_consensus",
            request=TRAIN_REQUEST.plus({DIGEST: FedMDSettings}, (LOGITS,)),
            leaves="logits of its own model on public samples",
            quorum=True,
            averaged="own",
        ),
        Phase(
            EVALUATE_OWN,
            "nodes evaluate their own models",
            (EVALUATE,),
            "flwr_distill_baselines.fedmd.client:evaluate_own",
            request=EVALUATE_REQUEST.plus({DIGEST: FedMDSettings}),
            leaves="accuracy and loss of its own model on held-out samples",
            averaged="own",
        ),
    ),
    needs="flwr_distill_baselines.fedmd.client:needs",
    unprotected=_unprotected,
    outcome="personal",
    panels=("flwr_distill.strategies.common.panels:own_models",),
    disclosed=_disclosed,
)
