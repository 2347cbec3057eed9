"""Measures how far a SuperLink's clock is ahead, by how it judges signed calls.

Flower refuses a call of a node whose time stamp is over 5 s in the future or over 305 s in the
past, before it checks who signed it (`NodeAuthServerInterceptor`, Flower 1.32.1). So any key will
do; the calls are refused in any case and change nothing.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import (
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
)
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.supercore.date import now
from flwr.supercore.grpc import create_channel
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from flwr_distill.flower.clock import MAX_AHEAD, MAX_BEHIND, ClockError

MAX_MEASURED = 3600
"""Seconds by which clocks may differ for `clock_offset` to measure it."""

_PRECISION = 0.02


def clock_offset(address: str, *, insecure: bool, root_certificates: Path | None) -> float:
    """Seconds by which a SuperLink's clock is ahead of this machine's, to 0.02 s and a call's time.

    `address` is its Fleet API, host:port. Raises `ClockError` if it does not answer as Flower does,
    or the clocks are over an hour apart.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    channel = create_channel(
        server_address=address,
        insecure=insecure,
        root_certificates=root_certificates.read_bytes() if root_certificates else None,
    )
    with channel:
        return _offset(lambda shift: _accepts_time_stamp(FleetStub(channel), key, shift))


def _offset(accepts: Callable[[float], bool]) -> float:
    """Find by bisection where shifted stamps are no longer accepted: at the offset + 5 s."""
    shifts = sorted(range(-MAX_MEASURED, MAX_MEASURED + 1, TIMESTAMP_TOLERANCE), key=abs)
    low = next((float(shift) for shift in shifts if accepts(shift)), None)
    if low is None:
        raise ClockError(f"the clocks are over {MAX_MEASURED} s apart")
    high = low + MAX_AHEAD + MAX_BEHIND
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    return (low + high) / 2 - MAX_AHEAD


def _accepts_time_stamp(stub: FleetStub, key: ec.EllipticCurvePrivateKey, shift: float) -> bool:
    stamp = (now() + datetime.timedelta(seconds=shift)).isoformat()
    metadata = (
        (PUBLIC_KEY_HEADER, public_key_to_bytes(key.public_key())),
        (TIMESTAMP_HEADER, stamp),
        (SIGNATURE_HEADER, sign_message(key, stamp.encode("ascii"))),
    )
    try:
        stub.SendNodeHeartbeat(SendNodeHeartbeatRequest(), metadata=metadata, timeout=5)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            if error.details() == "Invalid timestamp":
                return False
            if error.details() == "Invalid node ID":
                return True
        raise ClockError(f"the SuperLink answers {error.code().name}: {error.details()}") from error
    raise ClockError("the SuperLink takes calls of nodes that it does not know")
