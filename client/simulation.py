"""Virtual nodes of a simulation, where a process can stand for each of them."""

import fcntl
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context

from flwr_distill.client.session import RunSource, Session, source_of
from flwr_distill.protocol.messages import PARTITION_ID

LOCKED_WITHIN = 3600.0
"""Seconds to wait for another process, which may be distilling for many virtual nodes."""

SIMULATED = "simulated"
"""Key of the node config: true says that the nodes differ in their partition alone."""


def in_simulation(context: Context) -> bool:
    """Whether the node is a virtual one: in Flower's simulation runtime, or by its node config.

    Where data come from someone's function, a process can stand for its own node alone.
    """
    if PARTITION_ID not in context.node_config or source_of(context) != RunSource():
        return False
    ray = sys.modules.get("ray")
    in_ray = ray is not None and bool(ray.is_initialized())
    return in_ray or bool(context.node_config.get(SIMULATED))


def session_of(context: Context, partition: int) -> Session:
    """Session of the virtual node with another partition."""
    node_config = {**context.node_config, PARTITION_ID: partition}
    return Session.of(
        Context(context.run_id, context.node_id, node_config, context.state, context.run_config)
    )


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock that the processes of a simulation share; its folder is made if missing.

    Raises
    ------
    TimeoutError
        If another process holds the lock for longer than `LOCKED_WITHIN`.
    """
    deadline = time.monotonic() + LOCKED_WITHIN
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with file.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{file}: another process keeps it locked") from None
            time.sleep(random.uniform(0.02, 0.1))
        yield
