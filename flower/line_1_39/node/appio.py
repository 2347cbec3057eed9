"""The connection from a node's executor and its child to a SuperNode of Flower 1.39 to 1.42."""

from __future__ import annotations

from typing import Any

import flwr.proto.runtime_pb2 as messages
from flwr.supercore.constant import TaskType

from flwr_distill.flower.line_1_35.node.http import (
    REFUSED,
    TOO_LATE,
    HttpAppIo,
    has_ended,
    pull_message,
    pull_task_input,
)

__all__ = ["REFUSED", "TOO_LATE", "AppIo", "has_ended", "pull_message", "pull_task_input"]

_TASKS = (TaskType.CLIENT_APP, TaskType.AGENT_APP)
"""All that a SuperNode creates; an unclaimed task would block those behind it forever.

The message of an app without a ClientApp is answered with the error of loading it.
"""


class AppIo(HttpAppIo):
    """A SuperNode's API for apps; a task is claimed in one call."""

    claiming = ("AcquireTask",)

    def _claimed(self, calls: Any) -> str | None:
        response = calls.AcquireTask(messages.AcquireTaskRequest(supported_task_types=_TASKS))
        return str(response.token) or None
