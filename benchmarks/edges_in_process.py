"""An edge in this process: its node's ClientApp, its sockets, its runs' ServerApps in threads."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from flwr.app import Context, RecordDict

from benchmarks.in_process import FIRST_NODE, InProcessGrid, Settings
from flwr_distill.client.app import app as client_app
from flwr_distill.fleet.edge_runs import EdgeRuns
from flwr_distill.flower.control import RunStatus
from flwr_distill.server.app import main as server_app
from flwr_distill.simulation.grid import Node

RUN_IDS = count(1000)


class ThreadControl:
    """Starts ServerApps in threads of this process, where a SuperLink starts processes.

    Parameters
    ----------
    nodes : callable
        Makes the nodes below of a run, given its id and its run config.
    """

    def __init__(self, nodes: Any) -> None:
        self._nodes = nodes
        self._threads: dict[int, threading.Thread] = {}
        self._ended: dict[int, RunStatus] = {}
        self.configs: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def start_run(self, bundle: bytes, run_config: Mapping[str, Any]) -> int:
        """Start a ServerApp."""
        run_id, config = next(RUN_IDS), dict(run_config)
        self.configs.append(config)
        grid = InProcessGrid(self._nodes(run_id, config))

        def run() -> None:
            try:
                server_app(grid, Context(run_id, 1, {}, RecordDict(), config))
                self._ended[run_id] = RunStatus("finished:completed")
            except BaseException as error:
                self._ended[run_id] = RunStatus("finished:failed", str(error))

        self._threads[run_id] = threading.Thread(target=run, daemon=True)
        self._threads[run_id].start()
        return run_id

    def run_status(self, run_id: int) -> RunStatus:
        """How far a run is."""
        return self._ended.get(run_id, RunStatus("running"))

    def join(self, seconds: float) -> dict[int, RunStatus]:
        """Wait for all runs; return how they ended."""
        for thread in self._threads.values():
            thread.join(seconds)
        return self._ended


@contextmanager
def edge_in_process(
    control: ThreadControl, own: Settings, state_dir: Path
) -> Iterator[tuple[EdgeRuns, Path]]:
    """An edge's runs, and the folder of its sockets.

    Parameters
    ----------
    own : Mapping[str, bool | int | float | str]
        The edge's own settings of its runs.
    """
    with TemporaryDirectory(prefix="edge-") as sockets:
        runs = EdgeRuns(Path(sockets), state_dir, own, lambda: control, b"")  # type: ignore
        server = runs.listen()
        try:
            yield runs, Path(sockets)
        finally:
            runs.end()
            control.join(60.0)
            server.stop(grace=None).wait()


def edge_node(
    run_id: int, node_id: int, name: str, sockets: Path, state_dir: Path, run_config: Settings
) -> Node:
    """The node above of an edge."""
    config: dict[str, bool | int | float | str] = {
        "name": name,
        "edge": str(sockets),
        "state-dir": str(state_dir),
    }
    context = Context(run_id, node_id, config, RecordDict(), dict(run_config))
    return lambda message: client_app(message, context).content


def partition_nodes(places: range, total: int, state_dir: Path) -> Any:
    """What makes nodes of partitions of a data set, for `ThreadControl`."""

    def nodes(run_id: int, run_config: Settings) -> dict[int, Node]:
        def node(place: int) -> Node:
            config: dict[str, bool | int | float | str] = {
                **{"partition-id": place, "num-partitions": total, "device": "cpu"},
                "state-dir": str(state_dir),
            }
            context = Context(run_id, FIRST_NODE + place, config, RecordDict(), dict(run_config))
            return lambda message: client_app(message, context).content

        return {FIRST_NODE + place: node(place) for place in places}

    return nodes
