"""The node's mailbox: takes other nodes' sealed parcels while the node's app is busy or idle.

A process of its own beside SuperNode and executor, which `node.supervisor` starts where the node has
a peer address. It cannot open parcels; it lets in what has the server's permit, once, and keeps it on
disk until the node's app takes it, or until it expires.
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
"""Seconds after which a parcel that nobody took is removed."""

_SWEEP = 60.0
_OPTIONS = [("grpc.so_reuseport", 0)]


class Mailbox(MailboxServicer):
    """Takes parcels into a node's state directory.

    Parameters
    ----------
    state_dir : Path
        The node's.
    largest : int (default: 1 GiB)
        Bytes of a sealed payload above which it is refused.
    """

    def __init__(self, state_dir: Path, *, largest: int = LARGEST_PARCEL) -> None:
        self._state_dir = state_dir
        self._largest = largest

    def Deliver(  # noqa: N802 (the name in links.proto)
        self, parts: Iterator[Part], context: grpc.ServicerContext
    ) -> Accepted:
        """Take a parcel, or refuse it with a line in the log."""
        header = next(parts, Part()).header
        try:
            waybill = Waybill(**{name: getattr(header, name) for name in Waybill.model_fields})
            self._accept(header, waybill, (part.chunk for part in parts))
        except ValidationError as error:
            return _refuse(context, f"its header is malformed ({error.error_count()} errors)")
        except LinkError as error:
            return _refuse(context, f"from node {header.sender}: {error}")
        log(INFO, "Mailbox: %d bytes from node %s", header.size, header.sender)
        return Accepted()

    def _accept(self, header: Header, waybill: Waybill, chunks: Iterator[bytes]) -> None:
        if header.size > self._largest:
            raise LinkError(f"{header.size} bytes are more than the {self._largest} allowed")
        store = NodeStore.open(self._state_dir, header.run_id, int(waybill.receiver))
        folder = LinkFolder(store)
        permit = waybill.permit_from(folder.known_permit_key())
        if not hmac.compare_digest(header.permit.encode(), permit.encode()):
            raise LinkError("the server has not permitted it: wrong node, run, purpose or token")
        folder.put(waybill.token, chunks, header.size, header.sha256)


def _refuse(context: grpc.ServicerContext, reason: str) -> Accepted:
    log(WARNING, "Mailbox: refused a parcel %s", reason)
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
    return Accepted()


def start_server(
    mailbox: Mailbox, address: str, credentials: Credentials | None
) -> tuple[grpc.Server, int]:
    """Serve a mailbox.

    Parameters
    ----------
    mailbox : Mailbox
        Where parcels go.
    address : str
        ``host:port`` to listen at; port 0 takes a free one.
    credentials : Credentials or None
        The node's: only nodes that the same authority vouches for are let in. None: no TLS.

    Returns
    -------
    tuple[grpc.Server, int]
        The server, started, and its port.

    Raises
    ------
    LinkError
        If it cannot listen there, or the credentials are unusable.
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
        log(WARNING, "Mailbox: no TLS, hence for nodes on this machine only; parcels are sealed")
    while server.wait_for_termination(_SWEEP):
        remove_expired(state_dir, EXPIRY)


if __name__ == "__main__":
    main()
