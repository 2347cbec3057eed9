"""Bytes through the server by number of nodes: FedHEAD, HFLDD, FedAvg, and the papers' formulas.

``python -m benchmarks.traffic [--quick] [--json FILE]``

Real processes train on digits with minimal local work: FedHEAD in M = 2 sectors over direct and
over relayed links, HFLDD over direct links, and FedAvg, with 16, then 8, then 4 nodes. ``--quick``
runs one round, and HFLDD and FedAvg with 16 nodes only.

Model bytes are arrays (models; soft labels in HFLDD) and sealed parcels through the server, both
ways, from ``traffic.json``, without control messages (settings, routes, receipts, metrics). Each
run is repeated with models as differences in four bits (`CODECS`). The papers' formulas for FedAvg
and HFLDD (eq. 3 and 18) count (2T - 1) model transfers, without the first download.
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

from benchmarks.figures import write_json
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.node.processes import stop

APP_DIR = Path(__file__).resolve().parent.parent
NODES = (16, 8, 4)
SECTORS = 2
MIN_WORK = {
    "train.local-epochs": 1,
    "fedhead.sectors": SECTORS,
    "fedhead.distill-epochs": 1,
    # The paper's, whose leaders always distil and send a student.
    "fedhead.least-gain": 0.0,
    "fedhead.least-classes": 0.0,
    "hfldd.distill-steps": 3,
}
CODECS = {"down-codec": "delta-int4", "up-codec": "int4"}


@dataclass(frozen=True)
class System:
    """A strategy with links, its key in the results and its formula."""

    key: str
    strategy: str
    links: str
    formula: str


SYSTEMS = (
    System("fedhead_direct", "fedhead", "direct", "fedhead (FedHEAD, table 1)"),
    System("fedhead_relay", "fedhead", "relay", "fedhead (FedHEAD, table 1)"),
    System("hfldd_direct", "hfldd", "direct", "hfldd (HFLDD, eq. 18)"),
    System("fedavg", "fedavg", "auto", "fedavg (HFLDD, eq. 3)"),
)


@dataclass(frozen=True)
class Bytes:
    """Bytes of one run: arrays and parcels through the server, all of the server, node to node.

    `coded` are arrays and parcels of the same run with `CODECS`.
    """

    server_model: int
    coded: int
    server: int
    link: int
    formula: float


def measure(federation: LocalFederation, system: System, nodes: int, rounds: int) -> Bytes:
    """Run one system, without and with codecs, and read its traffic."""
    folder = run(federation, system, nodes, rounds)
    traffic = json.loads((folder / "traffic.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    return Bytes(
        server_model=_payloads(folder),
        coded=_payloads(run(federation, system, nodes, rounds, **CODECS)),
        server=summary["server_bytes"],
        link=summary["link_bytes"],
        formula=traffic["formulas"][system.formula],
    )


def run(
    federation: LocalFederation, system: System, nodes: int, rounds: int, **settings: Any
) -> Path:
    """Run one system; give the folder of its results."""
    runs_dir = federation.state_dir / "runs"
    outcome = federation.run(
        APP_DIR,
        {
            **MIN_WORK,
            "strategy": system.strategy,
            "links": system.links,
            "num-rounds": rounds,
            "min-nodes": nodes,
            "runs-dir": str(runs_dir),
            **settings,
        },
    )
    folder = runs_dir / str(outcome.run_id)
    if not outcome.completed or not (folder / "summary.json").exists():
        raise RuntimeError(f"{system.key} failed:\n" + "\n".join(outcome.lines[-40:]))
    return folder


def _payloads(folder: Path) -> int:
    payloads = json.loads((folder / "traffic.json").read_text())["payloads"]
    return sum(sum(links.values()) for links in payloads.values())


def measure_all(rounds: int, *, quick: bool) -> dict[str, dict[int, Bytes]]:
    """Bytes by system and number of nodes, on one federation that shrinks."""
    start = time.monotonic()
    systems: dict[str, dict[int, Bytes]] = {system.key: {} for system in SYSTEMS}
    with tempfile.TemporaryDirectory() as directory:
        federation = LocalFederation(max(NODES), Path(directory), direct_links=True)
        federation.start(timeout=240)
        with federation:
            for nodes in NODES:
                stop([node.process for node in federation.nodes[nodes:]])
                for system in SYSTEMS:
                    if quick and nodes < max(NODES) and system.strategy != "fedhead":
                        continue
                    systems[system.key][nodes] = row = measure(federation, system, nodes, rounds)
                    seconds = time.monotonic() - start
                    print(f"{seconds:4.0f} s: {nodes} nodes, {system.key}: {row}", flush=True)
    return {key: dict(sorted(by_nodes.items())) for key, by_nodes in systems.items()}


def as_json(systems: dict[str, dict[int, Bytes]], rounds: int) -> dict[str, Any]:
    """Figures: ``<system>_<what>_bytes`` by number of nodes."""
    figures: dict[str, Any] = {"rounds": rounds, "sectors": SECTORS}
    for what in ("server_model", "coded", "server", "link", "formula"):
        for key, by_nodes in systems.items():
            figures[f"{key}_{what}_bytes"] = {
                str(nodes): getattr(row, what) for nodes, row in by_nodes.items()
            }
    return figures


def show(systems: dict[str, dict[int, Bytes]]) -> None:
    """Print a table, in thousands of bytes."""
    table = Table(title=f"kB through the server, M = {SECTORS} sectors")
    columns = ("system", "nodes", "models and parcels", "formula", "coded", "all", "node to node")
    for column in columns:
        table.add_column(column, justify="left" if column == "system" else "right")
    for key, by_nodes in systems.items():
        for nodes, row in by_nodes.items():
            sizes = (row.server_model, row.formula, row.coded, row.server, row.link)
            table.add_row(key, str(nodes), *(f"{size / 1e3:.1f}" for size in sizes))
        table.add_section()
    console = Console()
    console.print(table)
    direct = [row.server_model for row in systems["fedhead_direct"].values()]
    console.print(f"FedHEAD, direct: most over least nodes' bytes {max(direct) / min(direct):.4f}")


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.traffic", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, fewer runs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    rounds = 1 if args.quick else 3
    systems = measure_all(rounds, quick=args.quick)
    show(systems)
    write_json(args.json, as_json(systems, rounds))


if __name__ == "__main__":
    main()
