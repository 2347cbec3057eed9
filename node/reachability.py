"""Checks that a SuperLink answers at an address, with or without TLS as expected."""

from __future__ import annotations

import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from flwr_distill.node.proxies import Proxy, proxy_hint, proxy_of
from flwr_distill.node.settings import NodeError
from flwr_distill.node.stock import FLEET_OVER_HTTP, installed_line

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_FRAME_HEADER = 9
_SETTINGS_FRAME = 4
_MAX_PROXY_REPLY = 1 << 14
_PROXY_TIMEOUT = _ANSWER_TIMEOUT = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 3.0
"""Seconds between tries: a SuperLink that comes back is not called by all its nodes at once."""
_PROXY_ERRORS = (403, 407, 502, 503, 504)
"""By which a proxy says that it does not connect; a SuperLink answers 404."""


_NOT_SIGNED = "root-certificates must hold the authority that signed it, and it must name "
_NAMES_ANOTHER = (
    "its server's `flwr-distill certs server --host` must name the host that nodes call, "
)
_REMEDIES = {
    10: "is this machine's clock right? Else `flwr-distill certs renew server` there, on ",
    62: _NAMES_ANOTHER,
    64: _NAMES_ANOTHER,
}
"""By OpenSSL's code of a refusal: it has expired, names another host, another IP address."""


def check_superlink(
    address: str,
    *,
    insecure: bool,
    root_certificates: Path | None,
    timeout: float,
) -> None:
    """Wait until a SuperLink's Fleet API answers at an address; `NodeError` if waiting is in vain.

    Flower would retry a wrong address or certificate forever. `root_certificates` None: the
    system's. It goes through a proxy where Flower would.
    """
    host, port = _split(address)
    context = None if insecure else tls_context(root_certificates)
    greet: Callable[[], object] = partial(headers_of, address, context)
    if installed_line() < FLEET_OVER_HTTP:
        if context is not None:
            context.set_alpn_protocols(["h2"])
        greet = partial(_greet, host, port, context, proxy_of(address))
    deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
    while True:
        try:
            greet()
            return
        except ssl.SSLCertVerificationError as error:
            remedy = _REMEDIES.get(error.verify_code, _NOT_SIGNED) + host
            raise _unreachable(
                address, f"its certificate is not trusted: {error.verify_message}", remedy
            ) from error
        except ssl.SSLError as error:
            remedy = "start the SuperLink with certificates, or the node with insecure"
            raise _unreachable(address, f"no TLS there ({error.reason})", remedy) from error
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                unknown = isinstance(error, socket.gaierror)
                remedy = f"is {host} its name, and does this machine's DNS know it?"
                if not unknown:
                    remedy = "is it the Fleet API's address, 9092 by default, and does TLS match?"
                problem = f"no SuperLink answers after {timeout:.0f} s: {error}"
                raise _unreachable(address, problem, remedy + proxy_hint(address)) from error
            time.sleep(random.uniform(0.5, 1.0) * pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)


def _unreachable(address: str, problem: str, remedy: str) -> NodeError:
    return NodeError(problem, where="superlink", value=address, remedy=remedy)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise _unreachable(address, "not an address", "give host:port, as in node7:9092")
    return host.strip("[]"), int(port)


def tls_context(root_certificates: Path | None) -> ssl.SSLContext:
    """A context for a server whose certificate one of these authorities signed."""
    try:
        return ssl.create_default_context(cafile=root_certificates)
    except (ssl.SSLError, OSError) as error:
        raise NodeError(
            f"not a PEM file of certificates: {error}",
            where="root-certificates",
            value=str(root_certificates),
        ) from error


def headers_of(address: str, context: ssl.SSLContext | None) -> Mapping[str, str]:
    """Headers of what a server answers over HTTP to an unknown call of a node; no more is read.

    Raises `OSError` if none answers, of which `ssl.SSLError` is one kind.
    """
    import httpx  # here: gRPC needs none of it

    url = f"{'http' if context is None else 'https'}://{address}/v1/fleet/"
    try:
        with httpx.stream("GET", url, verify=context or False, timeout=_ANSWER_TIMEOUT) as answer:
            if answer.status_code in _PROXY_ERRORS:
                raise OSError(f"a proxy answers {answer.status_code} {answer.reason_phrase}")
            return answer.headers
    except httpx.HTTPError as error:
        raise next(_ssl_errors(error), OSError(str(error))) from error


def _ssl_errors(error: BaseException | None) -> Iterator[ssl.SSLError]:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            yield error
        error = error.__cause__ or error.__context__


def _greet(host: str, port: int, context: ssl.SSLContext | None, proxy: Proxy | None) -> None:
    """Open an HTTP/2 connection as gRPC does, up to the server's first frame."""
    target = (host, port) if proxy is None else (proxy.host, proxy.port)
    with socket.create_connection(target, timeout=5) as plain:
        if proxy is not None:
            _pass_through(plain, host, port, proxy)
        if context is None:
            _expect_settings(plain)
            return
        with context.wrap_socket(plain, server_hostname=host) as secure:
            _expect_settings(secure)


def _pass_through(connection: socket.socket, host: str, port: int, proxy: Proxy) -> None:
    server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {server} HTTP/1.1", f"Host: {server}"]
    if proxy.authorization:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    reply = b""
    deadline = time.monotonic() + _PROXY_TIMEOUT
    while not reply.endswith(b"\r\n\r\n"):  # byte by byte: what follows is the server's
        if time.monotonic() > deadline:
            raise TimeoutError(f"{proxy} does not answer within {_PROXY_TIMEOUT:.0f} s")
        if not (more := connection.recv(1)) or len(reply) > _MAX_PROXY_REPLY:
            raise EOFError(f"{proxy} closes the connection")
        reply += more
    status = reply.partition(b"\r\n")[0].decode("latin-1")
    if not status.partition(" ")[2].startswith("2"):
        raise EOFError(f"{proxy} does not connect to it: {status[:100]!r}")


def _expect_settings(connection: socket.socket) -> None:
    connection.sendall(_HTTP2_PREFACE)
    frame = b""
    while len(frame) < _FRAME_HEADER:
        if not (more := connection.recv(_FRAME_HEADER - len(frame))):
            raise EOFError("the server closes the connection")
        frame += more
    if frame[3] != _SETTINGS_FRAME:
        raise EOFError("the server does not speak HTTP/2")
