"""FedSeq on nodes: their predictions, and training in turn with the nodes of a superclient.

A node stores the model that it trained, in case the next node fails and another takes it.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from logging import WARNING

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import log
from safetensors.numpy import load, save

from flwr_distill.client.auxiliary import auxiliary_of
from flwr_distill.client.dp_sgd import PrivateTraining
from flwr_distill.client.local_round import LocalRound, received_arrays
from flwr_distill.client.session import Session, deadline_of
from flwr_distill.client.training import soft_labels
from flwr_distill.links import LinkError, receive, send
from flwr_distill.protocol.arrays import Arrays, arrays_of, as_record, check_arrays, not_finite
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    DELIVERY,
    LINK_ERROR,
    METRICS,
    NUM_EXAMPLES,
    PARCEL,
    REJECTED,
    ROUTE,
)
from flwr_distill.task.auxiliary_names import NOISE
from flwr_distill_baselines.fedseq.method import (
    CONFIDENCE,
    PASSED_MODEL,
    TRAIN_LAST,
    FedSeqSettings,
    Pretraining,
)

TRAINED = "fedseq-trained"


def needs(session: Session, settings: FedSeqSettings) -> Iterator[Callable[[], object]]:
    """A call that fails where the node is missing the auxiliary set."""
    if settings.auxiliary != NOISE:
        yield partial(auxiliary_of, session, settings.auxiliary, settings.auxiliary_size)


def report_confidence(message: Message, context: Context) -> Message:
    """Reply with the mean prediction of a model that was trained on the node's data alone."""
    session = Session.of(context)
    request = Pretraining.checked(message.content.config_records[CONFIG], "message")
    samples, settings = session.data.train, session.task.train
    labels = soft_labels(
        session.new_model().to(session.device),
        samples,
        auxiliary_of(session, request.auxiliary, request.auxiliary_size).to(session.device),
        steps=request.pretraining_epochs * math.ceil(len(samples) / settings.batch_size),
        lr=settings.lr,
        batch_size=settings.batch_size,
        generator=session.generator("fedseq-confidence"),
        privacy=PrivateTraining.of(session, settings),
    )
    confidence = labels.double().mean(0).tolist()
    metrics = MetricRecord({NUM_EXAMPLES: len(samples), CONFIDENCE: confidence})
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def train_in_turn(message: Message, context: Context) -> Message:
    """Train the model of the server, or of the node before, and pass it on.

    The reply has the model if this node is the last, else the parcel for the next one. A model that
    does not fit is rejected, and so is one with which training goes to infinity: the next node then
    starts from the global model.
    """
    deadline = deadline_of(message)
    session, content = Session.of(context), message.content
    try:
        start = _model(session, content)
    except Exception as error:  # hostile bytes make the reader raise all sorts
        return _rejected(message, error)
    local = LocalRound.of(session, content, start)
    reply = local.train(session.data.train)
    arrays = arrays_of(local.model)
    if DELIVERY in content.config_records and not_finite(as_record(arrays)):
        return _rejected(message, "training with it goes to infinity")
    payload = save(arrays)
    session.store.write(TRAINED, payload)
    if message.metadata.message_type == TRAIN_LAST:
        reply[ARRAYS] = local.trained_model()
    elif ROUTE in content.config_records:
        reply.update(_sent(session, content.config_records[ROUTE], payload, deadline))
    return Message(reply, reply_to=message)


def pass_again(message: Message, context: Context) -> Message:
    """Send the stored trained model along the message's route, or to the server without one."""
    deadline = deadline_of(message)
    session, content = Session.of(context), message.content
    payload = session.store.read(TRAINED)
    if payload is None:
        raise ValueError("this node has no trained model to pass on")
    if ROUTE in content.config_records:
        passed = _sent(session, content.config_records[ROUTE], payload, deadline)
    else:
        passed = RecordDict({ARRAYS: as_record(load(payload))})
    return Message(passed, reply_to=message)


def _rejected(message: Message, reason: object) -> Message:
    log(WARNING, "Model of the node before rejected: %s", reason)
    return Message(RecordDict({METRICS: MetricRecord({REJECTED: 1})}), reply_to=message)


def _model(session: Session, content: RecordDict) -> Arrays:
    """The model in the message, or in the parcel of the node before, checked."""
    if content.array_records:
        return received_arrays(content)
    payload = receive(session, content.config_records[DELIVERY], PASSED_MODEL)
    return check_arrays(load(payload), arrays_of(session.new_model()))


def _sent(session: Session, route: ConfigRecord, payload: bytes, deadline: float) -> RecordDict:
    """The parcel, or why it could not be sent: the training is not lost by that."""
    try:
        return RecordDict({PARCEL: send(session, route, payload, deadline)})
    except LinkError as error:
        return RecordDict({CONFIG: ConfigRecord({LINK_ERROR: str(error)})})
