"""Links between nodes: sealed parcels, through the server or from node to node.

To send, a handler calls :func:`send` with the route from its message and puts the result into its
reply. To receive, it calls :func:`receive` with the delivery from its message.
"""

from links.errors import LinkError
from links.transfer import introduce, receive, send

__all__ = ["LinkError", "introduce", "receive", "send"]
