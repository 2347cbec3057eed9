"""Does a tier of edges cost accuracy? 10 edges of 20 nodes beside 200 nodes on one server.

    python -m benchmarks.edges [--edges 10] [--nodes 20] [--rounds 10] [--seeds 1] [--json FILE]
        [--strategy fedavg] [--tiers flat]

Digits, six of them on each node, so that a FedHEAD leader has samples to distil on. FedAvg on both
tiers stands beside FedAvg of all nodes, and edges that are FedHEAD's sectors beside FedHEAD with as
many sectors. Everything is in this process, with the real ServerApps and ClientApps, and real
sockets between an edge's node and its run.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from flwr.app import Context, RecordDict

from benchmarks.edges_in_process import (
    ThreadControl,
    edge_in_process,
    edge_node,
    partition_nodes,
)
from benchmarks.figures import read_lines, write_json
from benchmarks.in_process import FIRST_NODE, InProcessGrid, Settings, only_errors
from flwr_distill.server.app import main as server_app
from flwr_distill.server.page.run_files import flat
from flwr_distill.server.settings import RunSettings

STRATEGIES = ("fedavg", "fedhead")
COMMON: dict[str, bool | int | float | str] = {
    **{"dataset": "digits", "partition.scheme": "pathological", "partition.classes": 6},
    **{"train.holdout": 0.0, "phase-timeout": 3600.0, "keep-checkpoints": 1},
}


DISTIL: Settings = {"fedhead.least-classes": 0.0, "fedhead.least-gain": 0.0}
"""Leaders distil whatever they hold; by default none of them would, with so few samples."""


def full(settings: Settings) -> dict[str, Any]:
    """As Flower hands a run config out: with all keys."""
    return flat(RunSettings.from_run_config(settings).model_dump(by_alias=True))


def accuracies(folder: Path) -> list[float]:
    """Accuracy after each round of the only run in a folder."""
    (file,) = folder.glob("*/metrics.jsonl")
    return [row["accuracy"] for row in read_lines(file)]


def alone(strategy: str, edges: int, nodes: int, settings: Settings, folder: Path) -> list[float]:
    """All nodes on one server; FedHEAD with as many sectors as there are edges."""
    total = edges * nodes
    own: dict[str, Any] = {
        "strategy": strategy,
        "fedhead.sectors": edges,
        "min-nodes": total,
        **DISTIL,
    }
    config = full({**settings, **own, "runs-dir": str(folder / "runs")})
    grid = InProcessGrid(partition_nodes(range(total), total, folder / "nodes")(1, config))
    server_app(grid, Context(1, 1, {}, RecordDict(), config))
    return accuracies(folder / "runs")


def in_tiers(
    strategy: str, edges: int, nodes: int, settings: Settings, folder: Path
) -> list[float]:
    """Edges whose runs below have the strategy, below FedAvg."""
    own: dict[str, Any] = {
        "strategy": "fedavg",
        "min-nodes": edges,
        "runs-dir": str(folder / "runs"),
    }
    config, above = full({**settings, **own}), {}
    with ExitStack() as stack:
        for i in range(edges):
            below = range(i * nodes, (i + 1) * nodes)
            control = ThreadControl(partition_nodes(below, edges * nodes, folder / "nodes"))
            mine: dict[str, Any] = {
                "strategy": strategy,
                "min-nodes": nodes,
                "keep-checkpoints": 1,
                **DISTIL,
            }
            state = folder / f"edge-{i}"
            _, sockets = stack.enter_context(edge_in_process(control, mine, state / "below"))
            node = edge_node(1, FIRST_NODE + i, f"edge-{i}", sockets, state, config)
            above[FIRST_NODE + i] = node
        server_app(InProcessGrid(above), Context(1, 1, {}, RecordDict(), config))
    return accuracies(folder / "runs")


TIERS = {"flat": alone, "edges": in_tiers}


def rows(
    edges: int, nodes: int, rounds: int, seeds: int, strategies: list[str], tiers: list[str]
) -> Iterator[dict[str, Any]]:
    """Results, one by one."""
    for seed in range(seeds):
        for strategy in strategies:
            for name in tiers:
                settings = {**COMMON, "seed": seed, "num-rounds": rounds}
                start = time.process_time()
                with TemporaryDirectory() as folder, only_errors():
                    found = TIERS[name](strategy, edges, nodes, settings, Path(folder))
                yield {
                    **{"strategy": strategy, "tiers": name, "seed": seed, "accuracies": found},
                    "connections": edges if name == "edges" else edges * nodes,
                    "cpu_seconds": round(time.process_time() - start, 1),
                }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--edges", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=20, help="of each edge")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--strategy", action="append", choices=STRATEGIES, default=[])
    parser.add_argument("--tiers", action="append", choices=tuple(TIERS), default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    strategies, tiers, found = args.strategy or [*STRATEGIES], args.tiers or [*TIERS], []
    for row in rows(args.edges, args.nodes, args.rounds, args.seeds, strategies, tiers):
        print(row, flush=True)
        found.append(row)
        write_json(args.json, {"rows": found})
    print("\n| strategy | tiers | connections at the top | accuracy | by seed |")
    print("|---|---|---|---|---|")
    for strategy in strategies:
        for name in tiers:
            mine = [r for r in found if (r["strategy"], r["tiers"]) == (strategy, name)]
            last = [row["accuracies"][-1] for row in mine]
            by_seed = ", ".join(f"{100 * each:.1f}" for each in last)
            connections = mine[0]["connections"]
            print(
                f"| {strategy} | {name} | {connections} | {100 * fmean(last):.1f} % | {by_seed} |"
            )


if __name__ == "__main__":
    main()
