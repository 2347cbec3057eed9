"""The systems: the command of each, and its environment variables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import BLAZEFL, PFL, Project
from benchmarks.peers.ours import run_config
from benchmarks.peers.work import Work, cores
from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.node.stock import QUIET

ROOT = Path(__file__).resolve().parents[2]
STOCK_APP = Path(__file__).with_name("stock_app")
Command = list[str]
Variables = Mapping[str, str]


@dataclass(frozen=True)
class System:
    """A way to run a simulation.

    Parameters
    ----------
    name : str
        For tables.
    start : callable
        Gives command and environment variables for a piece of work.
    project : Project, optional (default: None)
        A project with an environment of its own; None for this one's.
    """

    name: str
    start: Callable[[Work], tuple[Command, Variables]]
    project: Project | None = None


def _module(name: str, **variables: str) -> Callable[[Work], tuple[Command, Variables]]:
    return lambda work: (["python", "-m", f"benchmarks.peers.{name}"], variables)


def _torchrun(work: Work) -> tuple[Command, Variables]:
    """As pfl-research's guide does on one machine; torchrun gives each process one thread."""
    options = ["--standalone", "--nnodes=1", f"--nproc_per_node={cores()}"]
    return ["torchrun", *options, "-m", "benchmarks.peers.pfl_research"], {}


def _simulate(work: Work) -> tuple[Command, Variables]:
    command = ["flwr-distill", "simulate", "-c", _text(run_config(work))]
    where = ["--nodes", str(work.clients), "--device", "cpu", "--runs-dir", f"{work.folder}/runs"]
    return [*command, *where], {}


def _flwr_run(
    app: Path, settings: Callable[[Work], Mapping[str, bool | int | float | str]]
) -> Callable[[Work], tuple[Command, Variables]]:
    """With an actor a core, on a SuperLink that Flower starts for the run."""

    def start(work: Work) -> tuple[Command, Variables]:
        nodes = f"num-supernodes={work.clients} client-resources-num-cpus=1"
        command = [
            *("flwr", "run", str(app), "local", "--stream"),
            *("--federation-config", f"{nodes} init-args-num-cpus={cores()}"),
        ]
        if given := settings(work):
            command += ["--run-config", _text(given)]
        (port,) = free_ports(1)
        return command, {
            **QUIET,
            "FLWR_HOME": f"{work.folder}/flower",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_LOCAL_CONTROL_API_PORT": str(port),
            "GRPC_ENABLE_FORK_SUPPORT": "0",  # without it, Ray sometimes does not start
        }

    return start


def _our_settings(work: Work) -> dict[str, bool | int | float | str]:
    return {**run_config(work), "runs-dir": f"{work.folder}/runs"}


def _text(settings: Mapping[str, bool | int | float | str]) -> str:
    return " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())


PLAIN = System("plain loop", _module("plain", OMP_NUM_THREADS="1"))
"""What ratios are to. One thread, as each process of the others has."""
APART = System("plain loops apart", _module("plain_apart", OMP_NUM_THREADS="1"))
"""One a core, without a common model: all cores without the cost of a federation."""
WORKERS = System("ours, workers", _simulate)
SYSTEMS = [
    PLAIN,
    APART,
    System("plain loop, all cores", _module("plain")),
    System("pfl-research", _torchrun, PFL),
    # Its threads are one a core; with more threads in each, it is slower.
    System("BlazeFL", _module("blazefl", OMP_NUM_THREADS="1"), BLAZEFL),
    WORKERS,
    System("ours, one process", _module("ours")),
    System("ours, flwr run", _flwr_run(ROOT, _our_settings)),
    System("stock Flower, flwr run", _flwr_run(STOCK_APP, lambda work: {})),
]
