"""Measures how far a SuperLink's clock is ahead of this machine's."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from flwr_distill.node.reachability import headers_of, tls_context
from flwr_distill.node.stock import FLEET_OVER_HTTP, installed_line
from flwr_distill.task.errors import ReportedError

MAX_AHEAD = SYSTEM_TIME_TOLERANCE
MAX_BEHIND = TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
"""Seconds by which Flower lets a node's clock differ from the SuperLink's."""


class ClockError(ReportedError):
    """The clock cannot be measured."""


def clock_offset(address: str, *, insecure: bool, root_certificates: Path | None) -> float:
    """Seconds by which a SuperLink's clock is ahead of this machine's; over HTTP to half a second.

    `address` is its Fleet API, host:port. Raises `ClockError` if it cannot be measured.
    """
    if installed_line() < FLEET_OVER_HTTP:
        by_calls: Any = import_module("flwr_distill.flower.line_1_32.fleet.clock")
        offset: float = by_calls.clock_offset(
            address, insecure=insecure, root_certificates=root_certificates
        )
        return offset
    began = time.time()
    try:
        headers = headers_of(address, None if insecure else tls_context(root_certificates))
        date = parsedate_to_datetime(headers["date"]).timestamp()
    except (OSError, KeyError, ValueError) as error:
        raise ClockError(f"the SuperLink does not say what time it is: {error}") from error
    return date + 0.5 - (began + time.time()) / 2  # whole seconds are cut off
