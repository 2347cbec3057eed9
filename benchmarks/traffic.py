"""Bytes through the server as the nodes grow in number: FedHEAD, HFLDD, FedAvg, and the formulas.

Run with ``python -m benchmarks.traffic [--quick] [--json FILE]``. A federation of real processes
trains on digits: FedHEAD in M = 2 sectors over direct and over relayed links, HFLDD over direct
links, and FedAvg, first with 16 nodes, then with 8 and 4 after the others have left; with
``--quick`` for one round, and HFLDD and FedAvg with 16 nodes alone. Local work is as little as
there can be, for bytes do not depend on it.

Model bytes are a run's arrays (models; soft labels in HFLDD) and sealed parcels through the server,
both ways, as its ledger books them in ``traffic.json``. What is left out are the control messages
of every node: settings, routes, receipts, metrics. The formulas are the papers': FedAvg's and
HFLDD's (eq. 3 and 18) count (2T - 1) transfers of the model, without the first way down.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fleet.local_federation import LocalFederation
from node.processes import stop

APP_DIR = Path(__file__).resolve().parent.parent
NODES = (16, 8, 4)
SECTORS = 2
LEAST_WORK = {
    "train.local-epochs": 1,
    "fedhead.sectors": SECTORS,
    "fedhead.distill-epochs": 1,
    "hfldd.distill-steps": 3,
}


@dataclass(frozen=True)
class System:
    """What is measured, under which key, and beside which formula."""

    key: str
    strategy: str
    links: str
    formula: str


SYSTEMS = (
    System("fedhead_direct", "fedhead", "direct", "fedhead (table 1)"),
    System("fedhead_relay", "fedhead", "relay", "fedhead (table 1)"),
    System("hfldd_direct", "hfldd", "direct", "hfldd (eq. 18)"),
    System("fedavg", "fedavg", "auto", "fedavg (eq. 3)"),
)


@dataclass(frozen=True)
class Bytes:
    """Bytes of one run.

    Parameters
    ----------
    server_model : int
        Arrays and parcels through the server.
    server : int
        All that the server sent and received.
    link : int
        What nodes sent each other.
    formula : float
        The paper's.
    """

    server_model: int
    server: int
    link: int
    formula: float


def measure(federation: LocalFederation, system: System, nodes: int, rounds: int) -> Bytes:
    """Run one system on the federation's nodes, and read what its ledger booked."""
    runs_dir = federation.state_dir / "runs"
    outcome = federation.run(
        APP_DIR,
        {
            **LEAST_WORK,
            "strategy": system.strategy,
            "links": system.links,
            "num-rounds": rounds,
            "min-nodes": nodes,
            "runs-dir": str(runs_dir),
        },
    )
    folder = runs_dir / str(outcome.run_id)
    if not outcome.completed or not (folder / "summary.json").exists():
        raise RuntimeError(f"{system.key} failed:\n" + "\n".join(outcome.lines[-40:]))
    traffic = json.loads((folder / "traffic.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    return Bytes(
        server_model=sum(sum(links.values()) for links in traffic["payloads"].values()),
        server=summary["server_bytes"],
        link=summary["link_bytes"],
        formula=traffic["formulas"][system.formula],
    )


def measure_all(rounds: int, *, quick: bool) -> dict[str, dict[int, Bytes]]:
    """Bytes of each system by number of nodes, on one federation that grows smaller."""
    began = time.monotonic()
    found: dict[str, dict[int, Bytes]] = {system.key: {} for system in SYSTEMS}
    with tempfile.TemporaryDirectory() as directory:
        federation = LocalFederation(max(NODES), Path(directory), direct_links=True)
        federation.start(timeout=240)
        with federation:
            for nodes in NODES:
                stop([node.process for node in federation.nodes[nodes:]])
                for system in SYSTEMS:
                    if quick and nodes < max(NODES) and system.strategy != "fedhead":
                        continue
                    found[system.key][nodes] = row = measure(federation, system, nodes, rounds)
                    seconds = time.monotonic() - began
                    print(f"{seconds:4.0f} s: {nodes} nodes, {system.key}: {row}", flush=True)
    return {key: dict(sorted(by_nodes.items())) for key, by_nodes in found.items()}


def as_json(found: dict[str, dict[int, Bytes]], rounds: int) -> dict[str, Any]:
    """Gather the figures: ``<system>_<what>_bytes`` by number of nodes."""
    figures: dict[str, Any] = {"rounds": rounds, "sectors": SECTORS}
    for what in ("server_model", "server", "link", "formula"):
        for key, by_nodes in found.items():
            figures[f"{key}_{what}_bytes"] = {
                str(nodes): getattr(row, what) for nodes, row in by_nodes.items()
            }
    return figures


def show(found: dict[str, dict[int, Bytes]]) -> None:
    """Print the figures as a table, in thousands of bytes."""
    table = Table(title=f"kB through the server, M = {SECTORS} sectors")
    for column in ("system", "nodes", "models and parcels", "formula", "all", "node to node"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for key, by_nodes in found.items():
        for nodes, row in by_nodes.items():
            sizes = (row.server_model, row.formula, row.server, row.link)
            table.add_row(key, str(nodes), *(f"{size / 1e3:.1f}" for size in sizes))
        table.add_section()
    console = Console()
    console.print(table)
    direct = [row.server_model for row in found["fedhead_direct"].values()]
    console.print(f"FedHEAD, direct: most over least nodes' bytes {max(direct) / min(direct):.4f}")


def main() -> None:
    """Measure, print and, if asked, write the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.traffic", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, fewer runs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    rounds = 1 if args.quick else 3
    found = measure_all(rounds, quick=args.quick)
    show(found)
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(found, rounds), indent=2) + "\n")


if __name__ == "__main__":
    main()
