"""Links between nodes: sealed parcels, through the server or from node to node.

A handler that sends calls :func:`send` with the route from its message, and puts what it returns
into its reply; one that receives calls :func:`receive` with the delivery from its message.
"""

from links.errors import LinkError
from links.transfer import introduce, receive, send

__all__ = ["LinkError", "introduce", "receive", "send"]
