"""Tells whether an address is on this machine."""

import ipaddress


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach ``host:port``: localhost or a loopback IP address."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
