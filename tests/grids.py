"""Grids as the ServerApp composes them, over any Flower Grid."""

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from benchmarks.in_process import FIRST_NODE, InProcessGrid
from flwr_distill.protocol.registry import phases_of
from flwr_distill.server.grid.failures import Failures
from flwr_distill.server.grid.grid import RunGrid
from flwr_distill.server.grid.screening import Screening
from flwr_distill.server.grid.secure_sums import SecureSums
from flwr_distill.server.grid.transport import Transport
from flwr_distill.strategies.common.directory import Directory


def plain_grid(grid, deadline, journal=None, names=(), **settings):
    """A grid that accepts all replies; `settings` are those of `RunGrid`."""
    return RunGrid(Transport(grid, deadline, Failures(journal), names), **settings)


def screening_grid(
    grid,
    deadline=60,
    *,
    journal=None,
    phases=None,
    directory=None,
    model=None,
    norm_threshold=5.0,
    summed=None,
    **settings,
):
    """A grid that screens replies; `summed` are arguments of `SecureSums`, if it has them."""
    directory = directory or Directory()
    phases = phases_of(None) if phases is None else phases
    screening = Screening(phases, directory, model or {}, norm_threshold)
    return RunGrid(
        Transport(grid, deadline, Failures(journal), directory.names, model or {}),
        screening,
        SecureSums(screening, **summed) if summed else None,
        phases=phases,
        **settings,
    )


def screened(answers, messages=(), message_type="train", records=(), **settings):
    """Replies of nodes in a phase, after screening; `messages` are by default the same for all."""
    nodes = {FIRST_NODE + place: answer for place, answer in enumerate(answers)}
    grid = screening_grid(InProcessGrid(nodes), **settings)
    return grid.send_and_receive(messages or messages_to(nodes, message_type, **dict(records)))


def messages_to(nodes, message_type="train", **records):
    """Messages with the same records to nodes."""
    content = RecordDict(records or {"config": ConfigRecord()})
    return [Message(content, node, message_type) for node in nodes]


def answering(**metrics):
    """A node that answers with these metrics, whose names have hyphens for underscores."""
    numbers = {key.replace("_", "-"): value for key, value in metrics.items()}
    return lambda message: RecordDict({"metrics": MetricRecord(numbers)})


def silent(message):
    """A node that receives messages and never replies."""


def broken(message):
    """A node whose ClientApp fails."""
    raise ValueError("no data")
