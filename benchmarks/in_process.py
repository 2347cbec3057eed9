"""Run a whole federation in this process: the real ServerApp and ClientApp with a local grid."""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from benchmarks.figures import read_lines
from flwr_distill.client.app import app as client_app
from flwr_distill.flower.task_identity import identify
from flwr_distill.node.kernel import keep_freed
from flwr_distill.server.app import main as server_app
from flwr_distill.simulation.coded import Coded
from flwr_distill.simulation.grid import Functions, Node, SimulationGrid
from flwr_distill.storage.store import DURABLE

FIRST_NODE = 2**64 - 1000
"""As large as Flower's node ids, which fit neither a float nor a signed 64-bit integer."""
Settings = Mapping[str, bool | int | float | str]


class InProcessGrid(SimulationGrid):
    """Runs a node's function for each message, one after the other; `nodes` may change.

    With a `state_dir` their links are coded, if the run has that.
    """

    def __init__(self, nodes: Mapping[int, Node], state_dir: str = "") -> None:
        self._functions = Functions(nodes)
        configs: dict[int, Settings] = {
            node: {"state-dir": state_dir, DURABLE: False} for node in nodes
        }
        pool = Coded(self._functions, configs, 1) if state_dir else self._functions
        super().__init__(nodes, pool)

    @property
    def nodes(self) -> Mapping[int, Node]:
        """The nodes by id."""
        return self._functions.nodes

    @nodes.setter
    def nodes(self, nodes: Mapping[int, Node]) -> None:
        self._functions.nodes = nodes

    def get_node_ids(self) -> list[int]:
        """Ids of the nodes."""
        return list(self.nodes)


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
    identify(0, 1, 1)
    keep_freed()  # as each node's worker does
    with only_errors(), tempfile.TemporaryDirectory() as temporary:
        folder = runs_dir or Path(temporary)
        needed = min_nodes or len(nodes)
        config = {**run_config, "runs-dir": str(folder), "min-nodes": needed}

        def node(place: int, node_config: Settings) -> Node:
            state = str(folder / "nodes")
            settings = {
                "partition-id": place,
                "device": "cpu",
                "state-dir": state,
                DURABLE: False,
                **node_config,
            }
            context = Context(1, FIRST_NODE + place, settings, RecordDict(), config)
            return wrap(place, lambda message: client_app(message, context).content)

        functions = {FIRST_NODE + i: node(i, own) for i, own in enumerate(nodes)}
        grid = InProcessGrid(functions, str(folder / "nodes"))
        server_app(grid, Context(1, 1, {}, RecordDict(), config))
        return read_lines(folder / "1" / "metrics.jsonl")
