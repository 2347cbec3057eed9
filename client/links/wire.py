"""How a parcel goes from node to node over gRPC.

One method, :data:`METHOD`, takes a stream of bytes: first the :class:`Header` as JSON, then the
sealed payload in chunks. The answer is empty. A refusal is the status FAILED_PRECONDITION with the
reason. There is no .proto: the only message with fields is the header.
"""

from typing import Annotated

from pydantic import Field

from task.links import NodeId, Waybill

SERVICE = "flwr_distill.Mailbox"
METHOD = "Deliver"
CHUNK = 2**20

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Header(Waybill):
    """What a mailbox is told before the sealed payload comes.

    Parameters
    ----------
    run_id : str
        Flower's run id.
    permit : str
        The server's permit for this waybill.
    size : int
        Bytes of the sealed payload.
    sha256 : str
        Its checksum.
    """

    run_id: NodeId
    permit: Digest
    size: Annotated[int, Field(ge=0)]
    sha256: Digest
