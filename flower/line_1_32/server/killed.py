"""Reports the end of a ServerApp that could not report it itself."""

from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import grpc
from flwr.common.args import add_args_flwr_app_common, try_obtain_flwr_app_token
from flwr.common.constant import SubStatus
from flwr.proto.appio_pb2 import PushTaskOutputRequest
from flwr.proto.serverappio_pb2_grpc import ServerAppIoStub
from flwr.supercore.grpc import create_channel
from flwr.supercore.interceptors import AppIoTokenClientInterceptor, RuntimeVersionClientInterceptor

TIMEOUT = 10.0
"""Seconds for the SuperLink to answer; else it notices by missed heartbeats, within a minute."""


def report(arguments: Sequence[str], details: str) -> None:
    """Tell the SuperLink that a ServerApp has failed; `arguments` are those of its program."""
    parser = ArgumentParser()
    parser.add_argument("--serverappio-api-address", required=True)
    add_args_flwr_app_common(parser)
    given, _ = parser.parse_known_args(arguments)
    certificates = None
    if not given.insecure and given.root_certificates:
        certificates = Path(given.root_certificates).read_bytes()
    token = try_obtain_flwr_app_token(given)
    channel = create_channel(
        server_address=given.serverappio_api_address,
        insecure=given.insecure,
        root_certificates=certificates,
        interceptors=[
            RuntimeVersionClientInterceptor("flwr-serverapp"),
            AppIoTokenClientInterceptor(token),
        ],
    )
    output = PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=details)
    with channel, suppress(grpc.RpcError):  # the SuperLink is away, or the task has ended
        ServerAppIoStub(channel).PushTaskOutput(output, timeout=TIMEOUT)
