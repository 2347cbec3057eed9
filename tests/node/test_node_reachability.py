"""What is said of a SuperLink that is not there, or speaks otherwise than the node."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from flwr_distill.node.reachability import check_superlink
from flwr_distill.node.settings import NodeError
from tests.errors import at


@pytest.fixture
def serve(certificates: Any) -> Iterator[Callable[[bool], str]]:
    """Start a real gRPC server, with or without TLS, and return its address."""
    servers = []

    def start(tls: bool) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(1))
        if tls:
            pair = (certificates.key.read_bytes(), certificates.server.read_bytes())
            credentials = grpc.ssl_server_credentials([pair])
            port = server.add_secure_port("127.0.0.1:0", credentials)
        else:
            port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None)


def check(address: str, authority: Path | None = None, timeout: float = 0.3) -> None:
    check_superlink(
        address, insecure=authority is None, root_certificates=authority, timeout=timeout
    )


@pytest.mark.parametrize("tls", [False, True])
def test_a_superlink_that_speaks_as_expected_is_found(
    serve: Callable[[bool], str], certificates: Any, tls: bool
) -> None:
    check(serve(tls), certificates.authority if tls else None)


@pytest.mark.parametrize("address", ["nonsense", "host:", "host:port", ":9092", "host:70000"])
def test_what_is_no_address_is_said_at_once(address: str) -> None:
    with pytest.raises(NodeError, check=at("superlink", value=address)):
        check(address, timeout=60)


def test_an_address_where_nobody_listens_is_given_up_after_the_timeout() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(NodeError, match="answers after"):
            check(f"127.0.0.1:{port}")


def test_a_superlink_that_starts_later_is_waited_for(serve: Callable[[bool], str]) -> None:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = grpc.server(futures.ThreadPoolExecutor(1))
    timer = threading.Timer(
        0.5, lambda: (server.add_insecure_port(f"127.0.0.1:{port}"), server.start())
    )
    timer.start()
    check(f"127.0.0.1:{port}", timeout=20)
    timer.join()
    server.stop(None)


def test_a_certificate_of_another_authority_is_named(
    serve: Callable[[bool], str], certificates: Any
) -> None:
    with pytest.raises(NodeError, match="not trusted"):
        check(serve(True), certificates.other_authority, timeout=60)


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.crt"
    wrong.write_text("no certificate")
    with pytest.raises(NodeError, check=at("root-certificates", value=str(wrong))):
        check("127.0.0.1:9", wrong, timeout=60)


def test_tls_that_the_superlink_does_not_speak_is_said_at_once(
    serve: Callable[[bool], str], certificates: Any
) -> None:
    with pytest.raises(NodeError, match="no TLS"):
        check(serve(False), certificates.authority, timeout=60)


def test_tls_that_the_node_was_not_told_of_is_hinted_at(serve: Callable[[bool], str]) -> None:
    with pytest.raises(NodeError, match="does TLS match"):
        check(serve(True))
