"""FedSeq of Chen et al. on a cluster's head."""

from flwr.app import Context, Message

from flwr_distill.client.local_round import received_arrays
from flwr_distill.client.session import Session, deadline_of
from flwr_distill_baselines.common.passing.client import sent


def pass_on(message: Message, context: Context) -> Message:
    """Send the server's model to the first node of the ring, as it is."""
    deadline = deadline_of(message)
    content = message.content
    passed = sent(Session.of(context), content, received_arrays(content), deadline)
    return Message(passed, reply_to=message)
