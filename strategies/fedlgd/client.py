"""FedLGD on nodes: training on virtual data, the node's own and the server's, both stored."""

import hashlib
from collections.abc import Collection
from logging import INFO
from typing import Literal, Self

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import log
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.client.dp_sgd import PrivacyAccount, require_no_privacy
from flwr_distill.client.features import seen_data
from flwr_distill.client.local_round import LocalRound
from flwr_distill.client.private_distillation import distil_privately
from flwr_distill.client.session import Session
from flwr_distill.client.terms import Features, LossTerm, extractor
from flwr_distill.client.training import hard_labels
from flwr_distill.client.virtual_data import samples_of, virtual_images
from flwr_distill.distill.contrastive import mean_discrepancy, supervised_contrastive_loss
from flwr_distill.distill.errors import VirtualDataError
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.protocol.messages import ARRAYS, METRICS, NUM_EXAMPLES
from flwr_distill.strategies.fedlgd.method import (
    GLOBAL_DATA,
    GRADIENT,
    NEEDS_GLOBAL_DATA,
    VIRTUAL,
    GlobalData,
    VirtualTraining,
)
from flwr_distill.task.datasets import Samples
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.evaluation import BATCH
from flwr_distill.task.settings import TrainSettings

OWN = "virtual-data"
PRIVATE = "private-virtual-data"
OF_SERVER = "global-virtual-data"


class Regulariser(LossTerm):
    """``lambda L_con`` over a minibatch's features, the input of a dense layer (FedLGD eq. 2-4).

    Parameters
    ----------
    model : nn.Module
        In training.
    weight : float
        lambda.
    layer : str (default: "")
        Name of the last dense layer; see :func:`task.models.last_dense`.
    reduction : str (default: "mean")
        Of the contrastive loss, over the minibatch.
    anchors : Samples, optional (default: None)
        Samples whose mean features the minibatch's are to meet, class by class, in place of the
        contrastive loss. They pass through the model in each step.
    """

    def __init__(
        self,
        model: nn.Module,
        weight: float,
        layer: str = "",
        reduction: Literal["mean", "sum"] = "mean",
        anchors: Samples | None = None,
    ) -> None:
        self._model = model
        self._features = Features(model, layer)
        self._weight = weight
        self._reduction = reduction
        self._anchors = anchors

    @classmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self | None:
        """Make the term; see `client.terms.LossTerm`."""
        request = VirtualTraining.checked(content.config_records[VIRTUAL], "message")
        if not request.contrast:
            return None
        anchors = None
        if request.regulariser == "mmd":
            anchors = global_samples(session, content.config_records[GLOBAL_DATA])
        is_sum = request.regulariser == "contrastive-sum"
        reduction: Literal["mean", "sum"] = "sum" if is_sum else "mean"
        return cls(model, request.contrast, settings.feature_layer, reduction, anchors)

    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """The term's value; soft labels count as their likeliest class."""
        own, classes = self._features.last.flatten(1), hard_labels(labels)
        if self._anchors is None:
            loss = supervised_contrastive_loss(own, classes, reduction=self._reduction)
        else:
            self._model(self._anchors.inputs)
            others = self._features.last.flatten(1)
            loss = mean_discrepancy(own, classes, others, self._anchors.labels)
        return self._weight * loss


def train_virtual(message: Message, context: Context) -> Message:
    """Train the received model on the node's virtual data and the server's."""
    session, content = Session.of(context), message.content
    request = VirtualTraining.checked(content.config_records[VIRTUAL], "message")
    of_server = None
    if GLOBAL_DATA in content.config_records:
        of_server = global_samples(session, content.config_records[GLOBAL_DATA])
        if of_server is None:
            missing = MetricRecord({NEEDS_GLOBAL_DATA: 1})
            return Message(RecordDict({METRICS: missing}), reply_to=message)
    local = LocalRound.of(session, content)
    require_no_privacy(local.settings, "training on virtual data")
    own = virtual_samples(session, local.model, request, local.round)
    reply = RecordDict()
    if request.gradient:
        reply[GRADIENT] = ArrayRecord(loss_gradient(local.model, own, request.gradient))
    reply.update(local.train(joined(own, of_server)))
    reply.metric_records[METRICS][NUM_EXAMPLES] = len(own)
    if request.dp_epsilon:
        account = PrivacyAccount.of(session, local.settings)
        reply.metric_records[METRICS].update(account.numbers(len(session.data.train)))
    reply[ARRAYS] = local.trained_model()
    return Message(reply, reply_to=message)


def virtual_samples(
    session: Session, model: nn.Module, request: VirtualTraining, server_round: int
) -> Samples:
    """The node's virtual data, on its device: made if there are none, refined if requested.

    Made by distribution matching with random networks; refined with the received model's features
    instead (FedLGD eq. 1). They are read back from the store, so that a restarted node continues
    with identical values.

    With ``dp_epsilon`` they are made from noisy class means. All that the node sends then follows
    from this one release, so they are never refined: that raises SettingsError.
    """
    if request.dp_epsilon and request.refine_steps:
        raise SettingsError(  # the server refuses this too, but data are refined here
            "refined virtual data would have no differential privacy",
            where="fedlgd.dp-epsilon",
            value=request.dp_epsilon,
            remedy="set fedlgd.refine-steps to 0",
        )
    data, store = seen_data(session), session.store.at(server_round)
    if request.dp_epsilon:
        store = session.store  # of no round: a resumed run has them too, and releases no others
    name = PRIVATE if request.dp_epsilon else OWN
    payload = store.read(name)
    if payload is None:
        if request.dp_epsilon:
            virtual = distil_privately(
                session,
                epsilon=request.dp_epsilon,
                per_class=request.per_class,
                steps=request.first_steps,
                formation=request.formation,
            )
        else:
            draws = session.generator("virtual")
            virtual = virtual_images(
                data, request, draws, session.device, steps=request.first_steps
            )
        log(INFO, "Made %d virtual samples", len(virtual))
        payload = virtual.to_bytes()
        store.write(name, payload)
    virtual = VirtualData.from_bytes(payload)
    if request.refine_steps:
        refined = virtual_images(
            data,
            request,
            session.generator("refine", server_round),
            session.device,
            steps=request.refine_steps,
            refined=virtual.images,
            network=extractor(model, session.task.train.feature_layer),
        )
        payload = refined.to_bytes()
        store.write(OWN, payload)
        virtual = VirtualData.from_bytes(payload)
    return samples_of(virtual, session.device)


def global_samples(session: Session, record: ConfigRecord) -> Samples | None:
    """The server's virtual data (`GlobalData`), from the message or the store; None without either.

    Raises VirtualDataError if the message's data are malformed or do not fit the task.
    """
    data, spec = GlobalData.checked(record, "global data"), seen_data(session).spec
    payload = data.payload or session.store.read(OF_SERVER) or b""
    if hashlib.sha256(payload).hexdigest() != data.digest:
        if data.payload:
            raise VirtualDataError("the server's virtual data do not match their digest")
        return None
    virtual = VirtualData.from_bytes(payload)
    virtual.validate(spec.shape, spec.num_classes)
    if data.payload:
        session.store.write(OF_SERVER, payload)
    return samples_of(virtual, session.device)


def joined(own: Samples, other: Samples | None) -> Samples:
    """Both sets as one."""
    return own if other is None else own.with_more(other)


def loss_gradient(model: nn.Module, samples: Samples, names: Collection[str]) -> dict[str, Tensor]:
    """Gradient of the mean cross-entropy with respect to the weights of these names.

    Gradient matching compares them (:func:`distill.gradient_matching.match_gradient`). The model
    is left in evaluation mode, without gradients. Raises ValueError if it does not train one.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if unknown := sorted(set(names) - weights.keys()):
        raise ValueError(f"the model trains no weight {unknown[0]!r:.60}")
    model.eval()
    model.zero_grad()
    parts = (torch.split(part, BATCH) for part in (samples.inputs, samples.labels))
    for inputs, labels in zip(*parts, strict=True):
        loss = functional.cross_entropy(model(inputs), labels, reduction="sum")
        (loss / len(samples)).backward()  # type: ignore[no-untyped-call]
    gradient = {}
    for name in names:
        found = weights[name].grad
        gradient[name] = (
            torch.zeros_like(weights[name]) if found is None else found.detach().clone()
        )
    model.zero_grad()
    return gradient
