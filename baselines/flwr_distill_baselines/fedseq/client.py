"""FedSeq of Chen et al. on a cluster's head."""

from flwr.app import Context, Message
from safetensors.numpy import save

from flwr_distill.client.local_round import received_arrays
from flwr_distill.client.session import Session, deadline_of
from flwr_distill.protocol.messages import ROUTE
from flwr_distill_baselines.common.passing.client import sent


def pass_on(message: Message, context: Context) -> Message:
    """Send the server's model to the first node of the ring, as it is."""
    deadline = deadline_of(message)
    content = message.content
    payload = save(dict(received_arrays(content)))
    passed = sent(Session.of(context), content.config_records[ROUTE], payload, deadline)
    return Message(passed, reply_to=message)
