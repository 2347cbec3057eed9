"""Reports to a SuperNode's supervisor, from the places in Flower's code that know."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from flwr_distill.node.notes import Notes, shortened

_REMEDIES = {
    "No SuperNode found with the given public key": (
        "the SuperLink does not know this node's key: register it there with "
        "`flwr-distill register`"
    ),
    "All SuperNodes must be registered via the CLI": (
        "the SuperLink admits registered nodes only: give the node a key (auth-key; "
        "`flwr-distill certs node` makes one) and register it with `flwr-distill register`"
    ),
}
"""By the text of a SuperLink that does not admit a node: its status codes say less."""
_EXIT = "flwr_exit"
"""Flower's function that ends a process, under its name in the modules that import it."""
_EXITING = (
    *("flwr.supernode.cli.flower_supernode", "flwr.supernode.start_client_internal"),
    *("flwr.supernode.fleet_http_connection", "flwr.supercore.tls"),
)
"""Modules that end a SuperNode for its settings or its SuperLink; not every Flower has each."""


class Reports:
    """Reports ``("online", node_id)``, or before ``("unfit", reason)``: restarts do not help."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._online = False

    def online(self, node_id: int) -> None:
        """The SuperLink has admitted the node."""
        self._online = True
        self._notes.send("online", node_id)

    def refused(self, reason: str) -> None:
        """The SuperLink does not admit the node; it may the next time."""
        self._unfit(_remedy(reason))

    def exits(self, code: int, message: str) -> None:
        """Flower ends the process, with one of its exit codes; below 100, by request."""
        if code >= 100:
            self._unfit(_remedy(message) or message.partition("\n")[0])

    def _unfit(self, reason: str) -> None:
        if reason and not self._online:
            self._notes.send("unfit", shortened(reason))


def _remedy(reason: str) -> str:
    """The remedy for a SuperLink's refusal that no restart would change; else ''."""
    return next((remedy for text, remedy in _REMEDIES.items() if text in reason), "")


def patch_reports(reports: Reports) -> None:
    """Have Flower's code report; raises if the code has moved, since nodes wait for reports."""
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState as State

    set_node_id = State.set_node_id

    def set_and_report(self: State, node_id: int) -> None:
        set_node_id(self, node_id)
        reports.online(node_id)

    setattr(State, "set_node_id", set_and_report)  # noqa: B010
    for module in (import_module(name) for name in _EXITING if find_spec(name)):
        setattr(module, _EXIT, _reporting(getattr(module, _EXIT), reports.exits))


def _reporting(end: Callable[..., Any], exits: Callable[[int, str], None]) -> Callable[..., Any]:
    def report_and_end(code: int, message: str | None = None, **details: Any) -> Any:
        exits(code, message or "")
        return end(code, message, **details)

    return report_and_end
