"""FedDM on nodes: their data, distilled around the received model."""

from flwr.app import Context, Message

from flwr_distill.client.dp_sgd import require_no_privacy
from flwr_distill.client.local_round import LocalRound
from flwr_distill.client.session import Session, virtual_per_class
from flwr_distill.client.virtual_data import virtual_reply
from flwr_distill.distill.perturbed_matching import distill_around
from flwr_distill.strategies.feddm.method import DISTILL_AROUND, AroundModel


def distill(message: Message, context: Context) -> Message:
    """Distil the node's data around the received model and send them, with their privacy card."""
    session, content = Session.of(context), message.content
    require_no_privacy(session.task.train, "FedDM's virtual data")
    request = AroundModel.checked(content.config_records[DISTILL_AROUND], "message")
    local, data = LocalRound.of(session, content), session.data
    virtual = distill_around(
        data.train.inputs,
        data.train.labels,
        local.model,
        num_classes=data.spec.num_classes,
        per_class=virtual_per_class(session, request.per_class),
        radius=request.radius,
        steps=request.distill_steps,
        layer=local.settings.feature_layer,
        generator=session.generator("feddm", local.round),
    )
    return Message(virtual_reply(virtual, data), reply_to=message)
