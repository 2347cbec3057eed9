"""The connection from a node's executor and its child to the node's SuperNode."""

from __future__ import annotations

import grpc
from flwr.supercore.grpc import GRPC_MAX_MESSAGE_LENGTH
from flwr.supercore.interceptors import RuntimeVersionClientInterceptor

_OPTIONS = [
    ("grpc.max_send_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.max_receive_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


def open_channel(address: str, root_certificates: bytes | None) -> grpc.Channel:
    """Open a channel to a SuperNode's ClientAppIo API.

    Calls on it are not retried, unlike those of Flower's own processes, whose retry code sends
    SIGINT to its process on an UNAUTHENTICATED reply.

    Parameters
    ----------
    address : str
        ``host:port`` of the API.
    root_certificates : bytes | None
        PEM of the authority that signed the API's certificate. `None`: no TLS.

    Returns
    -------
    grpc.Channel
        A channel that connects on first use and again after an outage.
    """
    if root_certificates is None:
        channel = grpc.insecure_channel(address, options=_OPTIONS)
    else:
        credentials = grpc.ssl_channel_credentials(root_certificates)
        channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
    return grpc.intercept_channel(channel, RuntimeVersionClientInterceptor("flwr-clientapp"))
