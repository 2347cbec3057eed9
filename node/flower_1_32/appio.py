"""The connection from a node's executor and its child to the node's SuperNode."""

from __future__ import annotations

import grpc
from flwr.supercore.grpc import GRPC_MAX_MESSAGE_LENGTH
from flwr.supercore.interceptors import (
    RuntimeVersionClientInterceptor,
    SuperExecAuthClientInterceptor,
)
from flwr.supercore.interceptors.superexec_auth_interceptor import CLIENTAPPIO_SUPEREXEC_METHODS

_OPTIONS = [
    ("grpc.max_send_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.max_receive_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


def open_channel(
    address: str, root_certificates: bytes | None, secret: bytes | None = None
) -> grpc.Channel:
    """Open a channel to a SuperNode's ClientAppIo API, with TLS if there are root certificates.

    The secret is the one that the SuperNode wants of whoever claims tasks. Without it, any user of
    the machine could claim them: the API is on loopback.
    """
    # Without Flower's retries: its retry code sends SIGINT to its own process on UNAUTHENTICATED.
    if root_certificates is None:
        channel = grpc.insecure_channel(address, options=_OPTIONS)
    else:
        credentials = grpc.ssl_channel_credentials(root_certificates)
        channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
    if secret is not None:
        signing = SuperExecAuthClientInterceptor(
            master_secret=secret, protected_methods=CLIENTAPPIO_SUPEREXEC_METHODS
        )
        channel = grpc.intercept_channel(channel, signing)
    return grpc.intercept_channel(channel, RuntimeVersionClientInterceptor("flwr-clientapp"))
