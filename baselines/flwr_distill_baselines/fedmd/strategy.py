"""FedMD: nodes keep models of their own and learn the mean of their logits on public samples."""

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message

from flwr_distill.protocol.arrays import Arrays, as_record, sent_arrays
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.checked import Update
from flwr_distill.strategies.common.own_models import OwnModels
from flwr_distill_baselines.fedmd.method import (
    DIGEST,
    EVALUATE_OWN,
    LOGITS,
    TRAIN_CONSENSUS,
    FedMDSettings,
    logits_of,
)


class FedMD(OwnModels):
    """Heterogenous federated learning via model distillation (Li & Wang 2019, Algorithm 1).

    Each node has its own model, of any architecture (node config ``model``). A node first trains
    on its own samples alone. In each round nodes send their logits on the same public samples, and
    the server takes their mean, the consensus. Nodes learn it for an epoch (digest), then train on
    their own samples again (revisit). There is no global model: nodes evaluate their own ones.

    One message a round serves: it brings the consensus, and the reply the logits after revisiting.
    The first round is that of pre-training and of the first logits.

    Parameters
    ----------
    num_classes : int
        Classes of the run.
    **kwargs
        Settings (`method.FedMDSettings`), and what Flower's FedAvg takes.

    Notes
    -----
    The paper first trains all models on the public samples' labels; ours do with
    ``public_epochs``. It draws other public samples in each round; here they are the same ones
    throughout.
    """

    settings: FedMDSettings = FedMDSettings()
    run_arguments = ("num_classes",)
    state_keys = ("consensus",)
    train_type = TRAIN_CONSENSUS
    evaluate_type = EVALUATE_OWN

    def __init__(self, *, num_classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.consensus: Arrays = {}
        """Mean logits, (public samples, classes); empty before the first."""
        self._shape = self.settings.auxiliary_size, num_classes

    def records(self) -> Mapping[str, ArrayRecord | ConfigRecord]:
        """Ask for logits, and send the consensus once there is one."""
        consensus = {LOGITS: as_record(self.consensus)} if self.consensus else {}
        return {DIGEST: self.settings.request, **consensus}

    def evaluate_records(self) -> Mapping[str, ArrayRecord | ConfigRecord]:
        """The settings alone: nodes evaluate their models as they are."""
        return {DIGEST: self.settings.request}

    def sent(self, reply: Message) -> Arrays:
        """Logits of a node."""
        return logits_of(sent_arrays(reply, LOGITS), self._shape)

    def combine(self, updates: list[Update]) -> Arrays:
        """Take the mean of the logits, all alike; the arrays of Flower's loop stay."""
        self.consensus = weighted_mean((1.0, update.arrays) for update in updates)
        return self.start_of_round
