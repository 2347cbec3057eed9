"""`flwr-distill demo`: FedAvg and another strategy on a local federation of real processes."""

import json
import shutil
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flwr_distill.base.text import counted
from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.federation import start
from flwr_distill.cli.options import NodesDevice, Seed
from flwr_distill.cli.run_log import RunLog, results_table
from flwr_distill.fleet.federation_record import FederationFile, FederationRunsError
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.fleet.submission import RunError
from flwr_distill.flower.own_app import APP_DIR

SECTORED = ("fedhead", "fedhead-plus")
FEDHEAD_TASK: dict[str, int | float | str] = {
    "partition.scheme": "dirichlet",
    "partition.alpha": 0.1,
    "train.optimizer": "adam",
    "train.lr": 0.001,
    "train.weight-decay": 0.0001,
    "train.batch-size": 128,
    "train.local-epochs": 20,
    "fedhead.sectors": 2,
}
"""The paper's local training, for FedHEAD and the FedAvg run it is compared with."""
HFLDD_TASK = {"train.lr": 0.1}
"""Twice the default, for only ten rounds; SCAFFOLD would diverge."""
ANALYTIC_RUN = {"model": "random-features", "num-rounds": 1}
"""A frozen network that needs no file, and its single round."""
ROUNDS = 10
FEW_ROUNDS = 5
"""Of FedAvg beside the single round of analytic: the demo stays short."""


def demo(
    nodes: Annotated[int, typer.Option(min=2, help="Client nodes, each a process.")] = 10,
    classes: Annotated[int, typer.Option(min=1, max=10, help="Digits per node (not FedHEAD).")] = 2,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rounds of each strategy; analytic takes one, FedAvg beside it "
            f"{FEW_ROUNDS}.  [default: {ROUNDS}]",
        ),
    ] = None,
    seed: Seed = 0,
    strategy: Annotated[str, typer.Option(help="Strategy to compare with FedAvg.")] = "hfldd",
    device: NodesDevice = "auto",
    runs_dir: Annotated[Path, typer.Option(help="Folder for results.")] = Path("runs"),
) -> None:
    """Train on handwritten digits with FedAvg and with another strategy, and compare.

    Starts a SuperLink and NODES client nodes as processes on this machine. Each node has only a few
    of the ten digits. Both strategies use the same model, start, optimiser and local epochs. The
    results are shown as a table and written to RUNS_DIR/demo.json. Ctrl-C ends all processes.

    FedHEAD (--strategy fedhead or fedhead-plus) uses 2 sectors of nodes with direct links, and a
    Dirichlet split of the digits (alpha 0.1). analytic (--strategy analytic) takes one round on
    random features; FedAvg takes five with its network.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it like Ctrl-C
    sectored = strategy in SECTORED
    rounds = rounds or (FEW_ROUNDS if strategy == "analytic" else ROUNDS)
    console = Console()
    runs_dir.mkdir(parents=True, exist_ok=True)
    state_dir = runs_dir / "demo-federation"
    with exit_on(FederationRunsError, command="demo"):
        _clear(state_dir)
    config = {
        "dataset": "digits",
        **(FEDHEAD_TASK if sectored else {"partition.classes": classes}),
        **(HFLDD_TASK if strategy == "hfldd" else {}),
        "num-rounds": rounds,
        "min-nodes": nodes,
        "seed": seed,
        "runs-dir": str(runs_dir.resolve()),
    }
    split = "digits by Dirichlet 0.1" if sectored else f"{classes} digits a node"
    results: dict[str, Any] = {}
    federation = LocalFederation(
        nodes, state_dir, node_settings={"device": device}, direct_links=sectored
    )
    with exit_on(RuntimeError, command="demo"):
        start(federation, console)
    with federation:
        console.print(f"{nodes} nodes are online; their logs are in {state_dir}")
        for name in ("fedavg", strategy):
            own = {**config, **(ANALYTIC_RUN if name == "analytic" else {}), "strategy": name}
            console.rule(f"{name}: {counted(int(str(own['num-rounds'])), 'round')}, {split}")
            with exit_on(RunError, command="demo"), RunLog(console) as log:
                outcome = federation.run(APP_DIR, own, on_line=log.show)
            if not outcome.completed or log.folder is None:
                fail(f"{name} ended as {outcome.status}: {log.reason(outcome.details)}", "demo")
            summary = log.folder / "summary.json"
            results[name] = {**json.loads(summary.read_text()), "run_id": str(outcome.run_id)}
    (runs_dir / "demo.json").write_text(json.dumps(results, indent=2) + "\n")
    console.print(results_table("Handwritten digits, each node with a few of them", results))
    _draw(results, runs_dir)

    # Here: `flwr-distill --help` must not import these.
    from flwr_distill.server.page.comparison_page import comparison_page
    from flwr_distill.server.page.run_files import read_run

    folders = [runs_dir / result["run_id"] for result in results.values()]
    page = comparison_page([read_run(folder) for folder in folders], runs_dir)
    (runs_dir / "demo.html").write_text(page, encoding="utf-8")
    console.print("Reports, to open in a browser:", runs_dir / "demo.html")
    for folder in folders:
        console.print(f"  {folder / 'report.html'}", soft_wrap=True)


def _clear(state_dir: Path) -> None:
    """Remove what the demo before has left, unless it runs; FederationRunsError if it does."""
    file = FederationFile(state_dir)
    file.lock()
    shutil.rmtree(state_dir, ignore_errors=True)
    file.unlock()


def _draw(results: dict[str, Any], runs_dir: Path) -> None:
    """Draw the accuracy of both strategies by round."""
    from matplotlib.figure import Figure  # here, as above

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, result in results.items():
        lines = (runs_dir / result["run_id"] / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        accuracies = [100 * row["accuracy"] for row in rows]
        label = f"{name}, {result['server_bytes'] / 1e6:.1f} MB through the server"
        axes.plot([row["round"] for row in rows], accuracies, marker="o", label=label)
    axes.set(xlabel="round", ylabel="test accuracy (%)", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(runs_dir / "demo.png", dpi=120)
