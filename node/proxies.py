"""Which calls to a SuperLink pass through an HTTP proxy: none on loopback, others as gRPC does.

gRPC reads the first that is set of ``grpc_proxy``, ``https_proxy`` and ``http_proxy``, in lower
case only, and passes through it also to 127.0.0.1 unless ``no_proxy`` names that.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from urllib.parse import unquote, urlsplit

READ_BY_GRPC = ("grpc_proxy", "https_proxy", "http_proxy")
_NAMES = [n for name in (*READ_BY_GRPC, "all_proxy") for n in (name, name.upper())]
LOOPBACK = ("localhost", "127.0.0.1", "127.0.0.0/8", "::1")
"""As in ``no_proxy``: gRPC takes networks, HTTP clients of Python single addresses."""
_DEFAULT_PORT = 443
"""Of a proxy whose URL names none, as for gRPC."""


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy, and the environment variable that names it."""

    variable: str
    host: str
    port: int
    authorization: str = ""

    def __str__(self) -> str:
        return f"the proxy {self.host}:{self.port} ({self.variable})"


def exempt_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables by which loopback needs no proxy; none where no proxy is set."""
    if not proxies_named(environment):
        return {}
    common = environment.get("no_proxy", environment.get("NO_PROXY", ""))
    exempt = {"no_grpc_proxy": _with_loopback(environment.get("no_grpc_proxy", common))}
    if common.strip() != "*":  # HTTP clients know it alone only, and gRPC not at all
        exempt["no_proxy"] = _with_loopback(common)
    return exempt


def proxy_of(address: str, environment: Mapping[str, str] = os.environ) -> Proxy | None:
    """The proxy that gRPC takes to reach ``host:port``, or None."""
    environment = {**environment, **exempt_loopback(environment)}
    variable = next((name for name in READ_BY_GRPC if name in environment), None)
    if variable is None or _is_exempt(address, environment.get("no_grpc_proxy", "")):
        return None
    try:
        url = urlsplit(environment[variable])
        port = url.port or _DEFAULT_PORT
    except ValueError:
        return None
    if url.scheme != "http" or not url.hostname:
        return None
    user = unquote(url.netloc.rpartition("@")[0])
    authorization = f"Basic {base64.b64encode(user.encode()).decode()}" if user else ""
    return Proxy(variable, url.hostname, port, authorization)


def proxies_named(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The variables by which an environment names proxies, in either case."""
    return [name for name in _NAMES if environment.get(name)]


def why_unused(address: str, environment: Mapping[str, str] = os.environ) -> str:
    """Why no proxy is taken to ``host:port`` although the environment names one; or ''."""
    named = proxies_named(environment)
    if not named or proxy_of(address, environment) is not None:
        return ""
    if _is_exempt(address, exempt_loopback(environment)["no_grpc_proxy"]):
        return f"{named[0]} is not used: {host_of(address)} is loopback or in no_proxy"
    return (
        f"{named[0]} is not used: gRPC reads the first that is set of {', '.join(READ_BY_GRPC)}, "
        "in lower case, and only takes http://HOST:PORT"
    )


def proxy_hint(address: str, environment: Mapping[str, str] = os.environ) -> str:
    """What to add to an error of a call to ``host:port``, where proxies are set; or ''."""
    if proxy := proxy_of(address, environment):
        return (
            f"; it is called through {proxy}: let that connect to port "
            f"{address.rpartition(':')[2]}, or add {host_of(address)} to no_proxy"
        )
    return (unused := why_unused(address, environment)) and f"; {unused}"


def host_of(address: str) -> str:
    """The host of ``host:port``."""
    return address.rpartition(":")[0].strip("[]")


def _with_loopback(hosts: str) -> str:
    given = [host.strip() for host in hosts.split(",") if host.strip()]
    return ",".join([*given, *(host for host in LOOPBACK if host not in given)])


def _is_exempt(address: str, hosts: str) -> bool:
    """Whether ``no_proxy`` names a host: itself, its domain, or its network."""
    host = host_of(address).lower()
    return any(_matches(host, each.strip().lower()) for each in hosts.split(","))


def _matches(host: str, exempt: str) -> bool:
    try:
        return ip_address(host) in ip_network(exempt, strict=False)
    except ValueError:
        domain = exempt.removeprefix(".")
        return bool(domain) and f".{host}".endswith(f".{domain}")
