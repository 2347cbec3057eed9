"""Training in turn on nodes.

A node stores the model that it trained, in case the next node fails and another takes it.
"""

from logging import WARNING

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import log
from safetensors.numpy import load, save

from flwr_distill.client.local_round import LocalRound, received_arrays
from flwr_distill.client.parcels import received_model
from flwr_distill.client.session import Session, deadline_of
from flwr_distill.links import LinkError, send
from flwr_distill.protocol.arrays import Arrays, arrays_of, as_record, check_arrays, not_finite
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    DELIVERY,
    LINK_ERROR,
    METRICS,
    PARCEL,
    REJECTED,
    ROUTE,
)
from flwr_distill.protocol.parcels import asked_codec, to_payload
from flwr_distill_baselines.common.passing.messages import PASSED_MODEL

TRAINED = "trained-in-turn"


def train_in_turn(message: Message, context: Context) -> Message:
    """Train the model of the server, or of the node before, and pass it on.

    The reply has the parcel for the next node. A model that does not fit is rejected, and so is one
    with which training goes to infinity: the next node then starts from the global model.
    """
    return _trained(message, context, is_last=False)


def train_last(message: Message, context: Context) -> Message:
    """Do what `train_in_turn` does, but send the model to the server."""
    return _trained(message, context, is_last=True)


def _trained(message: Message, context: Context, *, is_last: bool) -> Message:
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
    session.store.write(TRAINED, save(arrays))
    if is_last:
        reply[ARRAYS] = local.trained_model()
    elif ROUTE in content.config_records:
        reply.update(sent(session, content, arrays, deadline))
    return Message(reply, reply_to=message)


def pass_again(message: Message, context: Context) -> Message:
    """Send the stored trained model along the message's route, or to the server without one."""
    deadline = deadline_of(message)
    session, content = Session.of(context), message.content
    payload = session.store.read(TRAINED)
    if payload is None:
        raise ValueError("this node has no trained model to pass on")
    if ROUTE in content.config_records:
        passed = sent(session, content, load(payload), deadline)
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
    arrays = received_model(session, content.config_records[DELIVERY], PASSED_MODEL)
    return check_arrays(arrays, arrays_of(session.new_model()))


def sent(session: Session, content: RecordDict, model: Arrays, deadline: float) -> RecordDict:
    """The parcel by a message's route, or why it could not be sent: training is not lost by that.

    A coded model is whole: the next node has none to which this one could be a difference.
    """
    payload = to_payload(model, asked_codec(content))
    try:
        return RecordDict({PARCEL: send(session, content.config_records[ROUTE], payload, deadline)})
    except LinkError as error:
        return RecordDict({CONFIG: ConfigRecord({LINK_ERROR: str(error)})})
