"""A node's mailbox: accepts other nodes' sealed parcels whatever the node's app is doing.

If the node has a peer address, `node.supervisor` runs the mailbox as a process beside SuperNode and
executor. It cannot open parcels. It accepts each parcel with the server's permit once, and keeps it
on disk until the node's app takes it or it expires.
"""

from __future__ import annotations

import hmac
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from logging import INFO, WARNING
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
from flwr.common import log
from pydantic import ValidationError

from links.credentials import Credentials
from links.errors import LinkError
from links.folder import LARGEST_PARCEL, LinkFolder, remove_expired
from links.links_pb2 import Accepted, Header, Part
from links.links_pb2_grpc import MailboxServicer, add_MailboxServicer_to_server
from links.records import Waybill
from links.store import NodeStore

EXPIRY = 3600.0
"""Seconds after which an unopened parcel is removed."""

_SWEEP = 60.0
_OPTIONS = [("grpc.so_reuseport", 0)]


class Mailbox(MailboxServicer):
    """Accepts parcels of up to `largest` bytes into a node's state directory."""

    def __init__(self, state_dir: Path, *, largest: int = LARGEST_PARCEL) -> None:
        self._state_dir = state_dir
        self._largest = largest

    def Deliver(  # noqa: N802 (the name in links.proto)
        self, parts: Iterator[Part], context: grpc.ServicerContext
    ) -> Accepted:
        """Accept a parcel, or reject it and log why."""
        header = next(parts, Part()).header
        try:
            waybill = Waybill(**{name: getattr(header, name) for name in Waybill.model_fields})
            self._accept(header, waybill, (part.chunk for part in parts))
        except ValidationError as error:
            return _reject(context, f"its header is malformed ({error.error_count()} errors)")
        except LinkError as error:
            return _reject(context, f"from node {header.sender}: {error}")
        log(INFO, "Mailbox: %d bytes from node %s", header.size, header.sender)
        return Accepted()

    def _accept(self, header: Header, waybill: Waybill, chunks: Iterator[bytes]) -> None:
        if header.size > self._largest:
            raise LinkError(f"{header.size} bytes are more than the {self._largest} allowed")
        store = NodeStore.open(self._state_dir, header.run_id, int(waybill.receiver))
        folder = LinkFolder(store)
        permit = waybill.permit_from(folder.existing_permit_key())
        if not hmac.compare_digest(header.permit.encode(), permit.encode()):
            raise LinkError("the server has not permitted it: wrong node, run, purpose or token")
        folder.put(waybill.token, chunks, header.size, header.sha256)


def _reject(context: grpc.ServicerContext, reason: str) -> Accepted:
    log(WARNING, "Mailbox: rejected a parcel %s", reason)
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
    return Accepted()


def start_server(
    mailbox: Mailbox, address: str, credentials: Credentials | None
) -> tuple[grpc.Server, int]:
    """Serve a mailbox; return the server and its port.

    With credentials, only nodes with a certificate of the same authority can connect; without, no
    TLS. Port 0 listens at a free port.
    """
    server = grpc.server(ThreadPoolExecutor(max_workers=8), options=_OPTIONS)
    add_MailboxServicer_to_server(mailbox, server)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            tls = grpc.ssl_server_credentials(
                [(credentials.key, credentials.certificate)],
                credentials.authority,
                require_client_auth=True,
            )
            port = server.add_secure_port(address, tls)
    except (RuntimeError, ValueError) as error:
        raise LinkError(
            f"peer-address={address}: the mailbox cannot listen there: {error}"
        ) from error
    server.start()
    return server, port


def main() -> None:
    """Run the mailbox; arguments: the report's file descriptor, and the node config file."""
    report = Connection(int(sys.argv[1]))
    node_config = tomllib.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    state_dir, address = Path(node_config["state-dir"]), node_config["peer-address"]
    try:
        credentials = Credentials.of(node_config)
        server, _ = start_server(Mailbox(state_dir), address, credentials)
    except LinkError as error:
        report.send(("unfit", str(error)))
        return
    log(INFO, "Mailbox: listening at %s", address)
    if credentials is None:
        log(WARNING, "Mailbox: no TLS, so only for nodes on this machine; parcels are sealed")
    while server.wait_for_termination(_SWEEP):
        remove_expired(state_dir, EXPIRY)


if __name__ == "__main__":
    main()
