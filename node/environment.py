"""The environment of our processes: our packages come first, and loopback needs no proxy."""

from __future__ import annotations

from collections.abc import Mapping

from node.own_modules import own_first_in
from node.proxies import exempt_loopback

_PYTHON_PATH = "PYTHONPATH"


def process_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for our processes and Flower's, from that of this process."""
    prepared = {**environment, **exempt_loopback(environment)}
    if python_path := environment.get(_PYTHON_PATH):
        prepared[_PYTHON_PATH] = own_first_in(python_path)
    return prepared
