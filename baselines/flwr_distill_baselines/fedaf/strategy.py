"""FedAF: nodes distil their data near what all of them predict, and the server learns both."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flwr_distill.protocol.arrays import Arrays, sent_arrays
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import CONFIG, NUM_EXAMPLES
from flwr_distill.protocol.replies import number, usable
from flwr_distill.strategies.common.virtual_training import Loss, VirtualTraining
from flwr_distill_baselines.common.class_means import mean_by_class, record_of_means
from flwr_distill_baselines.fedaf.method import (
    CLASS_KNOWLEDGE,
    DISTILL_WITH_PEERS,
    KNOWLEDGE,
    LOGITS,
    SOFT_LABELS,
    FedAFSettings,
    class_knowledge,
)

TINY = 1e-12
"""Added to probabilities, which may be 0."""


class FedAF(VirtualTraining):
    """Aggregation-free federated learning (Wang et al. 2024).

    In each round nodes say what the global model predicts on their samples, class by class: mean
    logits and mean soft labels. The server averages both over the nodes. Then nodes make virtual
    data that match the mean features of their own, and whose mean logits come near everyone's
    (:func:`fedaf.peer_matching.distill_with_peers`). The server trains the global model on all of
    these, with a loss that keeps its predictions on them near the mean soft labels
    (`knowledge_matching`).

    Parameters
    ----------
    phase_timeout : float (default: 600.0)
        Seconds to wait for what the model predicts.
    **kwargs
        Settings (`method.FedAFSettings`), and what `VirtualTraining` takes.

    Notes
    -----
    The paper's text was not available: losses and constants are those of its summaries and of a
    public re-implementation. Means over nodes are weighted by their samples of a class.
    """

    name = "fedaf"
    settings: FedAFSettings = FedAFSettings()
    run_arguments = (*VirtualTraining.run_arguments, "phase_timeout")

    def __init__(self, *, phase_timeout: float = 600.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._timeout = phase_timeout
        self._soft_labels: Mapping[int, NDArray[np.float32]] = {}

    def requests(self, sampled: list[Message], grid: Grid) -> list[Message]:
        """Ask what the model predicts; then have nodes that replied distil near the mean of it."""
        soft_labels = ConfigRecord(self.settings.soft_label_request.model_dump(by_alias=True))
        config = {message.metadata.dst_node_id: message.content[CONFIG] for message in sampled}
        for message in sampled:
            message.content[CLASS_KNOWLEDGE] = soft_labels
        knowledge = self._knowledge(
            [Message(m.content, m.metadata.dst_node_id, CLASS_KNOWLEDGE) for m in sampled], grid
        )
        self._soft_labels = mean_by_class(knowledge.values(), SOFT_LABELS)
        if not knowledge:
            return []
        peers = record_of_means(**{LOGITS: mean_by_class(knowledge.values(), LOGITS)})
        request = ConfigRecord(self.settings.with_peers.model_dump(by_alias=True))
        return [
            Message(
                RecordDict({CONFIG: config[node], DISTILL_WITH_PEERS: request, KNOWLEDGE: peers}),
                node,
                DISTILL_WITH_PEERS,
            )
            for node in knowledge
        ]

    def loss(self) -> Loss:
        """Cross-entropy, and how far predictions are from the nodes' mean soft labels."""
        settings, classes = self.settings, self.spec.num_classes
        soft_labels, known = torch.zeros(classes, classes), torch.zeros(classes, dtype=torch.bool)
        for label, soft in self._soft_labels.items():
            soft_labels[label], known[label] = torch.from_numpy(soft), True
        soft_labels, known = soft_labels.to(self.device), known.to(self.device)

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            matching = knowledge_matching(logits, labels, soft_labels, known, settings.temperature)
            return functional.cross_entropy(logits, labels) + settings.global_weight * matching

        return loss

    def _knowledge(self, messages: list[Message], grid: Grid) -> dict[int, tuple[float, Arrays]]:
        """Samples that count and knowledge of each node that says something usable."""
        knowledge: dict[int, tuple[float, Arrays]] = {}
        replies = usable(grid.send_and_receive(messages, timeout=self._timeout))
        for reply in self.in_order(replies):
            try:
                arrays = class_knowledge(sent_arrays(reply, KNOWLEDGE), self.spec.num_classes)
                knowledge[reply.metadata.src_node_id] = number(reply, NUM_EXAMPLES), arrays
            except ValueError as error:
                self.set_aside(reply, one_line(error))
        return knowledge


def knowledge_matching(
    logits: Tensor, labels: Tensor, soft_labels: Tensor, known: Tensor, temperature: float
) -> Tensor:
    """FedAF's local-global knowledge matching, over the classes of a minibatch.

    The mean over classes c of ``(KL(R_c || T_c) + KL(T_c || R_c)) / 2``, where T_c is the mean of
    the softened predictions on the samples of c.

    Parameters
    ----------
    logits, labels : Tensor
        Of the minibatch, (n, classes) and (n,).
    soft_labels : Tensor
        R: the nodes' mean soft labels of each class, (classes, classes).
    known : Tensor
        Which classes have some, bool (classes,). Without any in the minibatch the result is 0.
    temperature : float
        tau, of the predictions as of the soft labels.
    """
    members = functional.one_hot(labels, len(known)).T.to(logits.dtype)
    counts = members.sum(1)
    own = members @ (logits / temperature).softmax(1) / counts.clamp(min=1)[:, None]
    ratios = (soft_labels + TINY).log() - (own + TINY).log()
    divergences = ((soft_labels - own) * ratios).sum(1) / 2
    present = known & (counts > 0)
    return (present * divergences).sum() / present.sum().clamp(min=1)
