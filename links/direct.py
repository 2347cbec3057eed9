"""The sender's side of a direct link: streams a sealed parcel into another node's mailbox."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator

import grpc

from flwr_distill.links.credentials import Credentials
from flwr_distill.links.errors import LinkError
from flwr_distill.links.links_pb2 import Header, Part
from flwr_distill.links.links_pb2_grpc import MailboxStub
from flwr_distill.links.loopback import is_loopback
from flwr_distill.links.records import Route, Waybill

_CHUNK = 2**20
_OPTIONS = [
    ("grpc.min_reconnect_backoff_ms", 5_000),  # which is also how long a connection may take
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


def deliver(
    sealed: bytes, route: Route, run_id: int, credentials: Credentials | None, timeout: float
) -> None:
    """Put a sealed parcel into the mailbox of the route's receiver, within `timeout` seconds.

    Credentials are for mutual TLS; without them, the mailbox must be on this machine. A busy
    mailbox is retried.
    """
    deadline = time.monotonic() + timeout
    header = Header(
        **route.model_dump(include=set(Waybill.model_fields)),
        run_id=run_id,
        permit=route.permit,
        size=len(sealed),
        sha256=hashlib.sha256(sealed).hexdigest(),
    )
    with _open_channel(route.address, credentials) as channel:
        while (left := deadline - time.monotonic()) > 0:
            try:
                MailboxStub(channel).Deliver(_parts(header, sealed), timeout=left)
                return
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    problem = f"refused it: {error.details()}"
                    raise LinkError(problem, where=route.address) from None
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise LinkError(
                        f"no transfer to it: {error.details()}",
                        where=route.address,
                        remedy="is it up, reachable, and certified by the same authority?",
                    ) from None
            time.sleep(random.uniform(0.1, 0.5))
    raise LinkError("no transfer to it: no time is left", where=route.address)


def _parts(header: Header, sealed: bytes) -> Iterator[Part]:
    yield Part(header=header)
    for begin in range(0, len(sealed), _CHUNK):
        yield Part(chunk=sealed[begin : begin + _CHUNK])


def _open_channel(address: str, credentials: Credentials | None) -> grpc.Channel:
    if credentials is not None:
        tls = grpc.ssl_channel_credentials(
            credentials.authority, credentials.key, credentials.certificate
        )
        return grpc.secure_channel(address, tls, options=_OPTIONS)
    if not is_loopback(address):
        raise LinkError(
            "is another machine, and this node has no certificate for it",
            where=address,
            remedy="start it with --peer-certificate and --peer-key",
        )
    return grpc.insecure_channel(address, options=_OPTIONS)
