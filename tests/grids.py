"""Grids as the ServerApp composes them, over any Flower Grid."""

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
