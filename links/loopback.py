"""Whether an address is this machine's own."""

import ipaddress


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` can be reached from this machine only; names but localhost cannot be.

    Parameters
    ----------
    address : str
        ``host:port``, an IPv6 host in brackets.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
