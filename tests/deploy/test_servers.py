"""Where a SuperLink listens, by the installed Flower."""

import socket
from pathlib import Path
from typing import Any

import pytest

from flwr_distill.fleet import servers
from flwr_distill.fleet.servers import (
    Addresses,
    listening_arguments,
    serverapps_command,
    why_not_free,
)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_an_address_is_free_until_somebody_listens_there(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host.strip("[]"), 0), family=family) as server:
        address = f"{host}:{server.getsockname()[1]}"
        assert address in why_not_free(address)
    assert why_not_free(address) == ""


@pytest.mark.parametrize(
    ("line", "control", "apps", "options"),
    [
        ((1, 32), "127.0.0.1:7001", "127.0.0.1:7002", {"--serverappio-api-address"}),
        ((1, 36), "127.0.0.1:7001", "127.0.0.1:7002", {"--host", "--port"}),
        ((1, 37), "127.0.0.1:7002", "127.0.0.1:7002", {"--host", "--port"}),
        ((1, 42), "127.0.0.1:7000", "127.0.0.1:7000", {"--host", "--port"}),
    ],
)
def test_users_and_apps_have_loopback_alone_until_all_apis_share_a_port(
    line: Any, control: str, apps: str, options: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "installed_line", lambda: line)
    addresses = Addresses.beside("0.0.0.0:7000", 7001, 7002)
    assert addresses == Addresses("0.0.0.0:7000", control, apps)
    listening = listening_arguments(addresses)
    given = dict(zip(listening[::2], listening[1::2], strict=True))
    listens = {given.pop("--host", ""): given.pop("--port", "")}
    if line >= (1, 35):
        assert listens == ({"0.0.0.0": "7000"} if line >= (1, 40) else {"127.0.0.1": "7002"})
    assert options <= set(listening)
    assert given.get("--fleet-api-address", "0.0.0.0:7000") == "0.0.0.0:7000"
    assert ("--fleet-api-address" in given) == (line < (1, 40))
    assert ("--control-api-address" in given) == (line < (1, 37))


@pytest.mark.parametrize(
    ("line", "option"),
    [
        *(((1, 32), "--appio-api-address"), ((1, 35), "--appio-api-address")),
        *(((1, 36), "--runtime-api-address"), ((1, 42), "--runtime-api-address")),
    ],
)
def test_the_process_for_server_apps_gets_its_address_by_the_name_of_its_flower(
    line: Any, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "installed_line", lambda: line)
    command = serverapps_command(Addresses("a:1", "b:2", "c:3"), Path("secret"), 7)
    assert command[command.index(option) + 1] == "c:3"
