"""Whose task a process works on, which these Flowers write into each message that it makes."""

from flwr.supercore.task_identity import TaskIdentity


def identify(task_id: int, run_id: int, node_id: int) -> None:
    """Let messages that this process makes from now on be of a task."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task_id, run_id, node_id
