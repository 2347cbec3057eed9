"""What is said of a SuperLink that is not there, or speaks otherwise than the node."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from flwr_distill.node import reachability
from flwr_distill.node.reachability import check_superlink
from flwr_distill.node.settings import NodeError
from flwr_distill.node.stock import FLEET_OVER_HTTP
from tests.errors import at
from tests.proxies import VARIABLES, proxy


@pytest.fixture(params=[(1, 32), (1, 42)], ids=["gRPC", "HTTP"])
def flower(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A line of Flower, whose nodes speak gRPC or HTTP."""
    line: tuple[int, int] = request.param
    monkeypatch.setattr(reachability, "installed_line", lambda: line)
    return line


def over_http(port: int = 0, pair: tuple[Path, Path] | None = None) -> ThreadingHTTPServer:
    """A server over HTTP that knows no call."""
    server = ThreadingHTTPServer(("127.0.0.1", port), BaseHTTPRequestHandler)
    if pair is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*pair)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def serve(certificates: Any, flower: tuple[int, int]) -> Iterator[Callable[[bool], str]]:
    """Start a real server of that line, with or without TLS, and return its address."""
    servers: list[grpc.Server] = []
    with ExitStack() as stack:

        def start(tls: bool) -> str:
            if flower < FLEET_OVER_HTTP:
                return of_grpc(tls)
            server = over_http(pair=(certificates.server, certificates.key) if tls else None)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return f"127.0.0.1:{server.server_port}"

        of_grpc = grpc_server(certificates, servers)
        yield start
    for server in servers:
        server.stop(None)


def grpc_server(certificates: Any, servers: list[grpc.Server]) -> Callable[[bool], str]:
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

    return start


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


@pytest.mark.usefixtures("flower")
def test_an_address_where_nobody_listens_is_given_up_after_the_timeout() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(NodeError, match="answers after"):
            check(f"127.0.0.1:{port}")


def test_a_host_that_has_no_address_is_no_question_of_ports_or_tls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*args: Any, **more: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(NodeError) as raised:
        check("superlink.invalid:9092", timeout=0)
    assert "DNS" in raised.value.remedy
    assert "TLS" not in raised.value.remedy


def test_the_nodes_of_a_superlink_that_is_away_call_it_ever_less_and_not_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = list[float]()
    clock = SimpleNamespace(sleep=pauses.append, monotonic=lambda: sum(pauses))
    monkeypatch.setattr(reachability, "time", clock)
    monkeypatch.setattr(reachability, "headers_of", refused)
    monkeypatch.setattr(reachability, "_greet", refused)
    for _ in range(2):
        with pytest.raises(NodeError, match="answers after"):
            check("127.0.0.1:9092", timeout=60)
    half = len(pauses) // 2
    assert len(pauses) < 2 * 45
    assert max(pauses) > 10 * pauses[0]
    assert pauses[:5] != pauses[half : half + 5]


def refused(*args: Any, **more: Any) -> None:
    raise ConnectionRefusedError("Connection refused")


def test_a_superlink_that_starts_later_is_waited_for(flower: tuple[int, int]) -> None:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = grpc.server(futures.ThreadPoolExecutor(1))
    started: list[ThreadingHTTPServer] = []

    def start() -> None:
        if flower < FLEET_OVER_HTTP:
            server.add_insecure_port(f"127.0.0.1:{port}")
            server.start()
        else:
            started.append(over_http(port))

    timer = threading.Timer(0.5, start)
    timer.start()
    check(f"127.0.0.1:{port}", timeout=20)
    timer.join()
    server.stop(None)
    for each in started:
        each.shutdown()
        each.server_close()


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


@pytest.mark.parametrize("tls", [False, True])
def test_over_http_a_proxy_that_wants_a_password_is_reported_and_one_that_gets_it_is_passed(
    certificates: Any, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "installed_line", lambda: FLEET_OVER_HTTP)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    server = over_http(pair=(certificates.server, certificates.key) if tls else None)
    authority = certificates.authority if tls else None
    with proxy(connects_to=f"127.0.0.1:{server.server_port}", password="me:secret") as asking:
        variable = "https_proxy" if tls else "http_proxy"
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv(variable, asking.url)
        address = f"localhost:{server.server_port}"
        with pytest.raises(NodeError, match="407"):
            check(address, authority, timeout=0)
        monkeypatch.setenv(variable, asking.url.replace("//", "//me:secret@"))
        check(address, authority, timeout=0)
        passed = len(asking.requests)
        monkeypatch.setenv("no_proxy", "localhost")
        check(address, authority, timeout=0)
        assert len(asking.requests) == passed
    server.shutdown()
    server.server_close()
