"""Whose task a process works on, which Flowers from 1.39 on write into each message it makes."""

from importlib.util import find_spec
from typing import Any

_MODULE = "flwr.supercore.task_identity"


def identify(task_id: int, run_id: int, node_id: int) -> None:
    """Let messages that this process makes from now on be of a task; nothing on older Flowers."""
    if find_spec(_MODULE) is None:
        return
    from flwr.supercore.task_identity import TaskIdentity

    identity: Any = TaskIdentity
    identity.task_id, identity.run_id, identity.node_id = task_id, run_id, node_id
