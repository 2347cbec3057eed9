"""The connection from a node's executor to a SuperNode of Flower 1.38: as from 1.35 on."""

import flwr.proto.runtime_pb2 as messages

from flwr_distill.flower.line_1_35.node.appio import (
    REFUSED,
    TOO_LATE,
    AppIo,
    has_ended,
    pull_message,
    pull_task_input,
)

__all__ = [
    "REFUSED",
    "TOO_LATE",
    "AppIo",
    "has_ended",
    "messages",
    "pull_message",
    "pull_task_input",
]
