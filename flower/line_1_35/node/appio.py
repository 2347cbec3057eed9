"""The connection from a node's executor and its child to a SuperNode of Flower 1.35 to 1.37."""

from __future__ import annotations

from typing import Any

import flwr.proto.runtime_pb2 as messages

from flwr_distill.flower.line_1_35.node.http import (
    REFUSED,
    TOO_LATE,
    HttpAppIo,
    has_ended,
    pull_message,
    pull_task_input,
)

__all__ = ["REFUSED", "TOO_LATE", "AppIo", "has_ended", "pull_message", "pull_task_input"]


class AppIo(HttpAppIo):
    """A SuperNode's API for apps; pending tasks are pulled, and the oldest is claimed."""

    claiming = ("PullPendingTasks", "ClaimTask")

    def _claimed(self, calls: Any) -> str | None:
        pending = calls.PullPendingTasks(messages.PullPendingTasksRequest()).tasks
        if not pending:
            return None
        claim = messages.ClaimTaskRequest(task_id=pending[0].task_id)
        token = calls.ClaimTask(claim).token
        return str(token) or None
