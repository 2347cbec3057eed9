"""Whose task a process works on, which some Flowers want to know for each message that it makes."""

from typing import Any

from flwr_distill.flower.lines import module_of_line

_of_line: Any = module_of_line("node", "task_identity")


def identify(task_id: int, run_id: int, node_id: int) -> None:
    """Let messages that this process makes from now on be of a task of a run, and from a node."""
    if _of_line is not None:
        _of_line.identify(task_id, run_id, node_id)
