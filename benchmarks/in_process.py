"""Run a whole federation in this process: the real ServerApp and ClientApp with a local grid."""

import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from flwr_distill.client.app import app as client_app
from flwr_distill.server.app import main as server_app

FIRST_NODE = 2**64 - 1000
"""As large as Flower's node ids, which fit neither a float nor a signed 64-bit integer."""
Settings = Mapping[str, bool | int | float | str]
Node = Callable[[Message], RecordDict | None]
"""Returns a reply's content, or None to send none; an exception becomes an error reply."""


class InProcessGrid(Grid):
    """Runs a node's function for each message, one after the other.

    `replies` has those not yet pulled, by message id.
    """

    def __init__(self, nodes: Mapping[int, Node]) -> None:
        self.nodes = nodes
        self._ids = count()
        self.replies: dict[str, Message] = {}
        self._run: Any

    def set_run(self, run: Any) -> None:
        """Set the run of this grid."""
        self._run = run

    @property
    def run(self) -> Any:
        """Run information."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Deprecated in Flower, but part of its interface."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Ids of all nodes."""
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Run the nodes and store their replies."""
        ids = []
        for message in messages:
            message_id = str(next(self._ids))
            message.metadata.__dict__["_message_id"] = message_id
            try:
                content = self.nodes[message.metadata.dst_node_id](message)
                reply = None if content is None else Message(content, reply_to=message)
            except Exception as error:
                reply = Message(Error(0, str(error)), reply_to=message)
            if reply is not None:
                self.replies[message_id] = reply
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return stored replies."""
        return [self.replies.pop(i) for i in list(message_ids) if i in self.replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Run the nodes and return their replies."""
        return self.pull_messages(self.push_messages(messages))


@contextmanager
def only_errors() -> Iterator[None]:
    """Within the block, Flower's logger is silent but for errors."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def run_in_process(
    run_config: Settings,
    nodes: Sequence[Settings],
    runs_dir: Path | None = None,
    wrap: Callable[[int, Node], Node] = lambda place, node: node,
    min_nodes: int | None = None,
) -> list[dict[str, Any]]:
    """Run a strategy on nodes in this process; return the lines of ``metrics.jsonl``.

    Parameters
    ----------
    run_config : Mapping[str, bool | int | float | str]
        Flat, as for ``-c``.
    nodes : Sequence[Mapping[str, bool | int | float | str]]
        Node config of each.
    runs_dir : Path, optional (default: None)
        For the run's folder, ``1``, and the nodes' files; None keeps nothing.
    wrap : callable, optional
        Replaces a node, given its index and itself.
    min_nodes : int, optional (default: None)
        Nodes that must be able to take part; None for all.
    """
    with only_errors(), tempfile.TemporaryDirectory() as temporary:
        folder = runs_dir or Path(temporary)
        needed = min_nodes or len(nodes)
        config = {**run_config, "runs-dir": str(folder), "min-nodes": needed}

        def node(place: int, node_config: Settings) -> Node:
            state = str(folder / "nodes")
            settings = {"partition-id": place, "device": "cpu", "state-dir": state, **node_config}
            context = Context(1, FIRST_NODE + place, settings, RecordDict(), config)
            return wrap(place, lambda message: client_app(message, context).content)

        grid = InProcessGrid({FIRST_NODE + i: node(i, own) for i, own in enumerate(nodes)})
        server_app(grid, Context(1, 1, {}, RecordDict(), config))
        lines = (folder / "1" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
