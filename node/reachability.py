"""Checks that a SuperLink answers at an address, with or without TLS as expected."""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path

from node.settings import NodeError

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_FRAME_HEADER = 9
_SETTINGS_FRAME = 4


def check_superlink(
    address: str,
    *,
    insecure: bool,
    root_certificates: Path | None,
    timeout: float,
) -> None:
    """Wait until a SuperLink's Fleet API answers at an address.

    Flower would retry a wrong address or certificate forever; this raises `NodeError` for them and
    waits only for a SuperLink that is not up yet. `root_certificates` None: the system's.
    """
    host, port = _split(address)
    context = None if insecure else _tls_context(root_certificates)
    deadline = time.monotonic() + timeout
    while True:
        try:
            return _greet(host, port, context)
        except ssl.SSLCertVerificationError as error:
            raise NodeError(
                f"the SuperLink's certificate at {address} is not trusted: {error.verify_message} "
                "(root-certificates must hold the authority that signed it, and it must name "
                f"{host})"
            ) from error
        except ssl.SSLError as error:
            raise NodeError(
                f"no TLS at superlink={address} ({error.reason}): start the SuperLink with "
                "certificates, or the node with insecure"
            ) from error
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise NodeError(
                    f"no SuperLink answers at superlink={address} after {timeout:.0f} s: {error} "
                    "(is it the Fleet API's address, 9092 by default, and does TLS match?)"
                ) from error
            time.sleep(0.2)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise NodeError(f"superlink={address} is not an address: give host:port, as in node7:9092")
    return host.strip("[]"), int(port)


def _tls_context(root_certificates: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=root_certificates)
    except (ssl.SSLError, OSError) as error:
        raise NodeError(
            f"root-certificates={root_certificates} is not a PEM file of certificates: {error}"
        ) from error
    context.set_alpn_protocols(["h2"])
    return context


def _greet(host: str, port: int, context: ssl.SSLContext | None) -> None:
    """Open an HTTP/2 connection as gRPC does, up to the server's first frame."""
    with socket.create_connection((host, port), timeout=5) as plain:
        if context is None:
            _expect_settings(plain)
            return
        with context.wrap_socket(plain, server_hostname=host) as secure:
            _expect_settings(secure)


def _expect_settings(connection: socket.socket) -> None:
    connection.sendall(_HTTP2_PREFACE)
    frame = b""
    while len(frame) < _FRAME_HEADER:
        if not (more := connection.recv(_FRAME_HEADER - len(frame))):
            raise EOFError("the server closes the connection")
        frame += more
    if frame[3] != _SETTINGS_FRAME:
        raise EOFError("the server does not speak HTTP/2")
