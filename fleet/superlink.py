"""Client of a SuperLink's Control API."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, StopRunRequest
from flwr.proto.control_pb2_grpc import ControlStub
from flwr.supercore.grpc import create_channel


class Control:
    """A connection to the Control API of a SuperLink; without root certificates, without TLS."""

    def __init__(self, address: str, root_certificates: Path | None = None) -> None:
        self._channel = create_channel(
            server_address=address,
            insecure=root_certificates is None,
            root_certificates=root_certificates.read_bytes() if root_certificates else None,
        )
        self._stub = ControlStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def answers(self, *, timeout: float) -> bool:
        """Whether the SuperLink answers within `timeout` seconds."""
        try:
            self._stub.ListNodes(ListNodesRequest(), timeout=timeout, wait_for_ready=True)
        except grpc.RpcError:
            return False
        return True

    def online_nodes(self) -> int:
        """Count the nodes that are online."""
        nodes = self._stub.ListNodes(ListNodesRequest(), timeout=10).nodes_info
        return sum(node.status == "online" for node in nodes)

    def run_status(self, run_id: int, *, settle: float = 10.0) -> str:
        """Return a run's status, ``status:sub-status`` once it has finished.

        A run's log ends shortly before the run: wait `settle` seconds for it to finish.
        """
        deadline = time.monotonic() + settle
        while True:
            runs = self._stub.ListRuns(ListRunsRequest(run_id=run_id), timeout=10)
            status = runs.run_dict[run_id].status
            if status.status == "finished" or time.monotonic() > deadline:
                return ":".join(part for part in (status.status, status.sub_status) if part)
            time.sleep(0.05)

    def stop_run(self, run_id: int) -> None:
        """Stop a run."""
        self._stub.StopRun(StopRunRequest(run_id=run_id), timeout=10)
