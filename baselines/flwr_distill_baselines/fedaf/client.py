"""FedAF on nodes: what the global model predicts, and virtual data that agree with the peers'."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from safetensors import safe_open
from safetensors.numpy import save
from torch import Tensor

from flwr_distill.client.dp_sgd import require_no_privacy
from flwr_distill.client.local_round import LocalRound, received_arrays, server_round
from flwr_distill.client.session import Session, virtual_per_class
from flwr_distill.client.virtual_data import virtual_reply
from flwr_distill.protocol.arrays import Arrays
from flwr_distill.protocol.messages import CONFIG, METRICS, NUM_EXAMPLES
from flwr_distill_baselines.common.class_tables import means_by_class, table
from flwr_distill_baselines.fedaf.method import (
    CLASS_KNOWLEDGE,
    DISTILL_WITH_PEERS,
    KNOWLEDGE,
    LOGITS,
    SOFT_LABELS,
    SoftLabelRequest,
    WithPeers,
)
from flwr_distill_baselines.fedaf.peer_matching import distill_with_peers

MODEL = "fedaf-model"
"""Blob: the global model of a round, for its second message."""


def report_knowledge(message: Message, context: Context) -> Message:
    """Store the received model, and send its mean predictions on the samples of each class."""
    session, content = Session.of(context), message.content
    require_no_privacy(session.task.train, "what FedAF's nodes say of their classes")
    request = SoftLabelRequest.checked(content.config_records[CLASS_KNOWLEDGE], "message")
    local, data = LocalRound.of(session, content), session.data
    arrays = dict(received_arrays(content))
    local.session.store.write(MODEL, save(arrays, {"round": str(local.round)}))
    model = local.model.eval()

    def outputs(inputs: Tensor) -> dict[str, Tensor]:
        logits = model(inputs)
        return {LOGITS: logits, SOFT_LABELS: (logits / request.temperature).softmax(1)}

    own = means_by_class(outputs, data.train, data.spec.num_classes, session.device)
    metrics = MetricRecord({NUM_EXAMPLES: len(data.train)})
    return Message(RecordDict({METRICS: metrics, KNOWLEDGE: ArrayRecord(own)}), reply_to=message)


def distill(message: Message, context: Context) -> Message:
    """Distil the node's data with the peers' logits, and send them, with their privacy card."""
    session, content = Session.of(context), message.content
    require_no_privacy(session.task.train, "FedAF's virtual data")
    request = WithPeers.checked(content.config_records[DISTILL_WITH_PEERS], "message")
    stored = _stored_model(session, server_round(content.config_records[CONFIG]))
    local, data = LocalRound.of(session, content, stored), session.data
    num_classes = data.spec.num_classes
    peers, known = table(content.array_records[KNOWLEDGE], LOGITS, num_classes, session.device)
    virtual = distill_with_peers(
        data.train.inputs,
        data.train.labels,
        local.model,
        peers,
        known,
        fresh=session.new_model,
        num_classes=num_classes,
        per_class=virtual_per_class(session, request.per_class),
        weight=request.local_weight,
        gamma=request.gamma,
        steps=request.distill_steps,
        layer=local.settings.feature_layer,
        generator=session.generator("fedaf", local.round),
    )
    return Message(virtual_reply(virtual, data), reply_to=message)


def _stored_model(session: Session, round_: int) -> Arrays:
    """The global model that came with the round's first message."""
    file = session.store.file(MODEL)
    if file is not None:
        with safe_open(file, "numpy") as stored:
            if (stored.metadata() or {}).get("round") == str(round_):
                return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    raise ValueError(f"this node has no global model of round {round_}")
