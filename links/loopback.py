"""Tells whether an address is on this machine."""

import ipaddress
import socket
from contextlib import suppress


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach ``host:port``: localhost or a loopback IP address."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local(address: str) -> bool:
    """Whether ``host:port`` is of this machine or its link alone, however it is written.

    A loopback, link-local or unspecified IP address, also IPv4 in IPv6, or localhost. No name is
    looked up in DNS.
    """
    host = address.rpartition(":")[0].strip("[]").lower().rstrip(".")
    if host in ("", "localhost") or host.endswith(".localhost"):
        return bool(host)
    with suppress(OSError):  # 127.1 and 2130706433 are IPv4 addresses to most resolvers
        host = socket.inet_ntoa(socket.inet_aton(host))
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_loopback or ip.is_link_local or ip.is_unspecified
