"""Which calls pass through an HTTP proxy: compared with what gRPC does, call by call."""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from flwr_distill.flower.control import SuperLinkError
from flwr_distill.flower.line_1_32.fleet.superlink import Control
from flwr_distill.node.processes import start_bound
from flwr_distill.node.proxies import (
    exempt_loopback,
    proxies_named,
    proxy_hint,
    proxy_of,
    why_unused,
)
from flwr_distill.node.reachability import check_superlink
from flwr_distill.node.settings import NodeError
from tests.proxies import VARIABLES, Proxy, proxy

REMOTE = "superlink.example:9092"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server() -> Iterator[str]:
    """Address of a gRPC server without services."""
    serving = grpc.server(ThreadPoolExecutor(1))
    port = serving.add_insecure_port("127.0.0.1:0")
    serving.start()
    yield f"127.0.0.1:{port}"
    serving.stop(None)


@pytest.fixture
def refusing() -> Iterator[Proxy]:
    with proxy() as started:
        yield started


def call(address: str) -> grpc.StatusCode:
    """What a call to a service that is not there ends with."""
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as error:
        channel.unary_unary("/no/service")(b"", timeout=5)
    return error.value.code()


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_local_superlink_is_called_past_any_proxy(
    variable: str, server: str, refusing: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, refusing.url)
    with Control(server) as control, pytest.raises(SuperLinkError) as error:
        control.nodes()
    assert error.value.__cause__.code() is grpc.StatusCode.UNIMPLEMENTED
    assert refusing.requests == []


@pytest.mark.parametrize("no_proxy", ["", "intranet.example", "*"])
def test_processes_that_we_start_call_loopback_past_any_proxy(
    no_proxy: str, server: str, refusing: Proxy, tmp_path: Path
) -> None:
    environment = {**os.environ, **refusing.variables, "no_proxy": no_proxy}
    code = (
        "import grpc, urllib.request\n"
        f"with grpc.insecure_channel({server!r}) as channel:\n"
        "    try: channel.unary_unary('/no/service')(b'', timeout=5)\n"
        "    except grpc.RpcError as error: print(error.code().name)\n"
        "print(urllib.request.proxy_bypass('localhost'), urllib.request.proxy_bypass('127.0.0.1'))"
    )
    log = tmp_path / "log"
    assert start_bound([sys.executable, "-c", code], log=log, env=environment).wait(60) == 0
    assert "UNIMPLEMENTED" in log.read_text()
    assert "True True" in log.read_text()
    assert refusing.requests == []


def test_where_no_proxy_is_set_the_environment_stays_as_it_is() -> None:
    assert exempt_loopback({"no_proxy": "a", "HOME": "/"}) == {}


@pytest.mark.parametrize(
    "variables",
    [
        {"http_proxy": "URL"},
        {"https_proxy": "URL", "http_proxy": "http://other.example"},
        {"grpc_proxy": "URL"},
        {"http_proxy": "USER"},
        {"all_proxy": "URL"},
        {"HTTP_PROXY": "URL"},
        {"HTTPS_PROXY": "URL", "https_proxy": ""},
        {"https_proxy": "", "http_proxy": "URL"},
        {"grpc_proxy": "", "https_proxy": "URL"},
        {"grpc_proxy": "SOCKS", "http_proxy": "URL"},
        {"http_proxy": "NO_SCHEME"},
        {"http_proxy": "URL", "no_proxy": "superlink.example"},
        {"http_proxy": "URL", "no_proxy": " a, .Example"},
        {"http_proxy": "URL", "no_proxy": "ample"},
        {"http_proxy": "URL", "no_proxy": "*"},
        {"http_proxy": "URL", "NO_PROXY": "example"},
        {"http_proxy": "URL", "no_proxy": "example", "no_grpc_proxy": "a"},
    ],
    ids=str,
)
def test_the_proxy_to_a_remote_superlink_is_the_one_that_grpc_takes(
    variables: dict[str, str], refusing: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = refusing.url.removeprefix("http://")
    known = {
        "URL": refusing.url,
        "USER": f"http://me:secret@{address}",
        "SOCKS": f"socks5://{address}",
        "NO_SCHEME": address,
    }
    given = {name: known.get(value, value) for name, value in variables.items()}
    for name, value in (given | exempt_loopback(given)).items():
        monkeypatch.setenv(name, value)
    assert call(REMOTE) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    chosen = proxy_of(REMOTE)
    assert bool(refusing.requests) == (chosen is not None)
    assert proxies_named()
    if chosen is None:
        assert why_unused(REMOTE)
    else:
        assert refusing.url.endswith(f"{chosen.host}:{chosen.port}")
        (header,) = [
            line.partition(": ")[2]
            for line in refusing.requests[0].splitlines()
            if line.lower().startswith("proxy-authorization")
        ] or [""]
        assert chosen.authorization == header
        assert "secret" not in f"{chosen}{proxy_hint(REMOTE)}"


def test_a_node_greets_a_remote_superlink_through_the_proxy(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy(connects_to=server) as connecting:
        monkeypatch.setenv("https_proxy", connecting.url)
        check_superlink(REMOTE, insecure=True, root_certificates=None, timeout=0)
    assert connecting.requests[0].startswith(f"CONNECT {REMOTE} HTTP/1.1\r\n")


def test_a_proxy_that_refuses_is_named_with_its_variable_and_status(
    refusing: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", refusing.url)
    with pytest.raises(NodeError) as error:
        check_superlink(REMOTE, insecure=True, root_certificates=None, timeout=0)
    for named in (refusing.url.removeprefix("http://"), "https_proxy", "no_proxy", "403", REMOTE):
        assert named in str(error.value)


def test_a_proxy_that_grpc_cannot_take_is_named_where_a_superlink_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("all_proxy", "socks5://proxy.example:1080")
    with pytest.raises(NodeError, match="all_proxy"):
        check_superlink(REMOTE, insecure=True, root_certificates=None, timeout=0)


def test_the_command_exempts_loopback_for_itself_and_its_processes(refusing: Proxy) -> None:
    code = (
        "import sys, flwr_distill.command as command\n"
        "sys.argv = ['flwr-distill', '--version']\n"
        "try: command.main()\n"
        "except SystemExit: pass\n"
        "import urllib.request; print(urllib.request.proxy_bypass('127.0.0.1'))\n"
    )
    environment = {**os.environ, **refusing.variables}
    shown = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert shown.splitlines()[-1] == "True"
    assert not urllib.request.getproxies_environment()
