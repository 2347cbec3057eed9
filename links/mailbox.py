"""A node's mailbox: accepts other nodes' sealed parcels, whatever the node's app is doing.

It is a process (`node.mailbox`) beside the app and cannot open parcels. It accepts each parcel with
the server's permit once, and stores it until the app takes it or it expires. Peers may be hostile:
their number, time and space are limited (`links.streams`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from logging import INFO, WARNING
from pathlib import Path

import grpc
from flwr.common import log
from pydantic import ValidationError

from flwr_distill.links.credentials import Credentials
from flwr_distill.links.errors import LinkError
from flwr_distill.links.folder import LinkFolder
from flwr_distill.links.links_pb2 import Accepted, Header, Part
from flwr_distill.links.links_pb2_grpc import MailboxServicer, add_MailboxServicer_to_server
from flwr_distill.links.records import Waybill
from flwr_distill.links.streams import (
    CAPACITY,
    HEADER_TIMEOUT,
    STREAMS,
    Admission,
    BusyError,
    Peer,
    closed_after,
    time_for,
)
from flwr_distill.storage.store import NodeStore

EXPIRY = 86_400.0
"""Seconds after which an unopened parcel is removed: as long as an app has for any message."""

_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
]


class Mailbox(MailboxServicer):
    """Accepts parcels into a node's state directory, of up to `capacity` bytes together."""

    def __init__(self, state_dir: Path, *, capacity: int = CAPACITY) -> None:
        self._state_dir = state_dir
        self._admission = Admission(state_dir, capacity)

    def Deliver(  # noqa: N802 (the name in links.proto)
        self, parts: Iterator[Part], context: grpc.ServicerContext
    ) -> Accepted:
        """Accept a parcel, or reject it and log why."""
        peer, header, close = _peer(context), Header(), partial(_close, context)
        try:
            with self._admission.stream(peer):
                with closed_after(HEADER_TIMEOUT, close):
                    header = next(parts, Part()).header
                waybill, folder = self._permitted(header)
                target, chunks = folder.parcel(waybill.token), (part.chunk for part in parts)
                with (
                    self._admission.space(peer, header.size, target),
                    closed_after(time_for(header.size), close),
                ):
                    folder.put(waybill.token, chunks, header.size, header.sha256)
        except ValidationError as error:
            return _reject(context, f"its header is malformed ({error.error_count()} errors)")
        except BusyError as error:
            return _reject(context, str(error), grpc.StatusCode.RESOURCE_EXHAUSTED)
        except LinkError as error:
            return _reject(context, f"from node {header.sender}: {error}")
        except OSError as error:
            return _reject(context, f"from node {header.sender}: {error.strerror}")
        except grpc.RpcError:
            log(WARNING, "Mailbox: a stream from %s broke off", context.peer())
            return Accepted()
        log(INFO, "Mailbox: %d bytes from node %s", header.size, header.sender)
        return Accepted()

    def _permitted(self, header: Header) -> tuple[Waybill, LinkFolder]:
        waybill = Waybill(**{name: getattr(header, name) for name in Waybill.model_fields})
        store = NodeStore.open(self._state_dir, header.run_id, int(waybill.receiver))
        folder = LinkFolder(store)
        permit = waybill.permit_from(folder.existing_permit_key())
        if not hmac.compare_digest(header.permit.encode(), permit.encode()):
            raise LinkError("the server has not permitted it: wrong node, run, purpose or token")
        waybill.check_size(header.size)
        return waybill, folder


def _peer(context: grpc.ServicerContext) -> Peer:
    certificate = context.auth_context().get("x509_pem_cert")
    if certificate:
        return Peer(hashlib.sha256(certificate[0]).hexdigest(), certified=True)
    address, _, _ = str(context.peer()).rpartition(":")  # without the port
    return Peer(address, certified=False)


def _close(context: grpc.ServicerContext) -> None:
    log(WARNING, "Mailbox: a stream from %s is too slow: it is closed", context.peer())
    context.cancel()


def _reject(
    context: grpc.ServicerContext,
    reason: str,
    code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION,
) -> Accepted:
    log(WARNING, "Mailbox: rejected a parcel %s", reason)
    context.abort(code, reason)
    return Accepted()


def start_server(
    mailbox: Mailbox, address: str, node_config: Mapping[str, object]
) -> tuple[grpc.Server, int]:
    """Serve a mailbox; return the server and its port.

    With credentials in the node's config, only nodes with a certificate of the same authority can
    connect; without, no TLS. A renewed certificate counts from the next connection on.
    """
    credentials = Credentials.of(node_config)
    server = grpc.server(
        ThreadPoolExecutor(max_workers=STREAMS), options=_OPTIONS, maximum_concurrent_rpcs=STREAMS
    )
    add_MailboxServicer_to_server(mailbox, server)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            tls = grpc.dynamic_ssl_server_credentials(
                _tls(credentials),
                partial(_renewed, node_config),
                require_client_authentication=True,
            )
            port = server.add_secure_port(address, tls)
    except (RuntimeError, ValueError) as error:
        problem = f"the mailbox cannot listen there: {error}"
        raise LinkError(problem, where="peer-address", value=address) from error
    server.start()
    return server, port


def _tls(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.key, credentials.certificate)], credentials.authority
    )


def _renewed(node_config: Mapping[str, object]) -> grpc.ServerCertificateConfiguration | None:
    try:
        credentials = Credentials.of(node_config)
    except LinkError as error:
        log(WARNING, "Mailbox: keeping the previous certificate: %s", error)
        return None
    return None if credentials is None else _tls(credentials)
